// Section of the GPUs: their tiles, and the card of the one that is opened.

import { bounded, fact, mark, ofPressure, RANK, troubles, word } from "./marks.js";
import { memory, memoryFacts } from "./memory.js";
import { anchor, place, tiles } from "./tiles.js";
import { h } from "./tree.js";
import { amount, clock, clockReason, degrees, hertz, known, percent, plain, short, watts } from "./words.js";

const MAX_XIDS = 4;
const MAX_OWNERS = 4;

// Indices of GPUs and MIG instances by UUID.
export function places(gpus) {
  const found = new Map();
  for (const gpu of gpus) {
    found.set(gpu.uuid, String(gpu.index));
    for (const each of gpu.mig ?? []) found.set(each.uuid, place(gpu, each));
  }
  return found;
}

// `open` is the id of what is opened on the page; a single GPU is always.
export function gpus(state, charts, open) {
  const nameless = (state.daemon.gpus_asleep ?? 0) - state.gpus.filter(({ status }) => status === "asleep").length;
  const opened = state.gpus.length === 1 ? state.gpus[0] : state.gpus.find((gpu) => anchor(gpu) === open);
  return h("section", { "data-key": "gpus", "aria-labelledby": "gpus" },
    h("h2", { id: "gpus", class: "unseen" }, "GPUs"),
    state.gpus.length ? tiles(state, opened) : h("p", {}, "No GPU found."),
    nameless > 0 ? h("p", {}, `Asleep since the daemon started, names not known yet: ${nameless}.`) : null,
    opened ? card(opened, state, charts) : null);
}

function card(gpu, state, charts) {
  const id = anchor(gpu);
  return h("article", { class: `card ${gpu.condition}`, id, "data-key": gpu.uuid, tabindex: "-1", "aria-labelledby": `${id}-name` },
    h("div", { class: "title" },
      mark(gpu.condition),
      h("h3", { id: `${id}-name`, class: "number" }, `GPU ${gpu.index}`, h("span", { class: "unseen" }, `, ${word(gpu.condition)}`)),
      h("span", { class: "name" }, gpu.name),
      state.gpus.length > 1 ? h("a", { class: "close", href: "#gpus" }, "Close", h("span", { class: "unseen" }, ` GPU ${gpu.index}`)) : null),
    troubles(gpu.troubles, ""),
    gpu.status === "up" && gpu.condition !== "unknown" ? readings(gpu) : silence(gpu),
    xids(gpu.xids ?? []),
    gpu.mig ? h("div", { class: "cards" }, gpu.mig.map((each) => instance(gpu, each))) : null,
    owners(gpu.owners ?? [], state.runs),
    charts.ofGpu(gpu),
    hardware(gpu));
}

function silence(gpu) {
  if (gpu.status === "asleep") return h("p", {}, "Asleep. gpuwarden does not wake it up.");
  if (gpu.status === "not_asked") return h("p", {}, "Not polled.");
  if (gpu.status === "up") return h("p", {}, "No readings: the driver answers none of the queries about this GPU.");
  const seen = gpu.last_success_timestamp_seconds;
  return h("p", {},
    known(seen) ? `Last answer at ${clock(seen)}. ` : "", gpu.fault_advice ? ["Action: ", h("b", {}, `${gpu.fault_advice}.`)] : "");
}

function readings(gpu) {
  return [
    memory(gpu),
    h("dl", { class: "facts" }, memoryFacts(gpu), temperature(gpu), utilization(gpu), clocks(gpu), power(gpu)),
  ];
}

function temperature(gpu) {
  const core = gpu.temperature_celsius?.core;
  if (!known(core)) return null;
  const limit = gpu.temperature_threshold_celsius?.slowdown;
  return fact("Temperature", degrees(core), { note: known(limit) ? `throttles at ${degrees(limit)}` : null, level: ofPressure(gpu.pressure?.thermal), ratio: limit ? core / limit : null });
}

function utilization(gpu) {
  const ratio = gpu.utilization_ratio;
  const bandwidth = gpu.memory_bandwidth_utilization_ratio;
  if (!known(ratio)) return null;
  return fact("Utilization", percent(ratio), { ratio, note: known(bandwidth) ? `memory bandwidth ${percent(bandwidth)}` : null });
}

function clocks(gpu) {
  const now = gpu.clock_hertz?.graphics;
  if (!known(now)) return null;
  const most = gpu.clock_max_hertz?.graphics;
  const reasons = (gpu.clock_event_reasons ?? []).filter((name) => name !== "gpu_idle").map(clockReason).join(", ");
  const note = [most ? `of ${hertz(most)}` : null, reasons ? `limited by ${reasons}` : null].filter(Boolean).join(" · ");
  return fact("Clock", hertz(now), { note, ratio: most ? now / most : null });
}

function power(gpu) {
  const now = gpu.power_usage_watts;
  if (!known(now)) return null;
  const limit = gpu.power_limit_watts?.enforced;
  return fact("Power", watts(now), { note: limit ? `of ${watts(limit)}` : null, ratio: limit ? now / limit : null });
}

function xids(found) {
  const sorted = found.toSorted((one, other) => RANK[one.level] - RANK[other.level]);
  if (!sorted.length) return null;
  return h("div", { class: "xids" },
    h("h4", {}, "XIDs of the last hour"),
    bounded(sorted.map((each) =>
      h("li", { class: each.level }, mark(each.level), " ", h("b", {}, `XID ${each.xid}`),
        `${each.count > 1 ? ` × ${each.count}` : ""}, last at ${clock(each.last_timestamp_seconds)}. ${each.meaning} `, h("b", {}, each.action))),
      MAX_XIDS, "XIDs"));
}

function instance(gpu, each) {
  return h("div", { class: "mig", "data-key": each.uuid },
    h("h4", {}, `MIG ${place(gpu, each)} ${each.profile ?? ""}`),
    memory(each),
    h("dl", { class: "facts" }, memoryFacts(each)));
}

function owners(found, runs) {
  const names = new Map(runs.map(({ run_id: id, name }) => [id, name]));
  const shown = found.map(({ kind, name, memory_bytes: bytes }) =>
    h("li", {}, `${plain(kind)} `, h("b", {}, h("bdi", {}, short(kind === "run" ? names.get(name) ?? name : name))), ` ${amount(bytes)}`));
  return shown.length ? h("div", { class: "owners" }, h("h4", {}, "Memory by owner"), bounded(shown, MAX_OWNERS, "owners")) : null;
}

function hardware(gpu) {
  const counted = (name, found) => found && Object.entries(found).map(([by, count]) => [`${name}, ${plain(by)}`, String(count)]);
  const rows = [
    ["UUID", gpu.uuid], ["PCI", gpu.pci_bus_id], ["Serial number", gpu.serial], ["Architecture", gpu.architecture], ["Firmware", gpu.vbios_version],
    ["Performance state", known(gpu.performance_state) ? `P${gpu.performance_state}` : undefined],
    ["Memory temperature", known(gpu.temperature_celsius?.memory) ? degrees(gpu.temperature_celsius.memory) : undefined], // read less often than the core's
    ["Memory clock", known(gpu.clock_hertz?.memory) ? hertz(gpu.clock_hertz.memory) : undefined],
    ["Fans", gpu.fan_speed_ratio && Object.values(gpu.fan_speed_ratio).map(percent).join(", ")],
    ["Peak memory used", gpu.memory_used_peak_bytes && Object.entries(gpu.memory_used_peak_bytes).map(([span, bytes]) => `${amount(bytes)} in ${span}`).join(", ")],
    ...Object.entries(gpu.ecc_errors ?? {}).map(([kind, by]) => [`Memory errors, ${kind}`, Object.entries(by).map(([span, count]) => `${count} ${span}`).join(", ")]),
    ...(counted("Remapped rows", gpu.remapped_rows) ?? []),
    ...(counted("Retired pages", gpu.retired_pages) ?? []),
  ].filter(([, value]) => value);
  return h("details", { "data-key": "hardware" }, h("summary", {}, "Hardware", h("span", { class: "unseen" }, ` of GPU ${gpu.index}`)),
    h("dl", { class: "rows" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

// All GPUs as tiles on one screen, the worst first: memory, headroom, temperature, and which runs use it. A tile opens the card of its GPU.

import { isTrouble, mark, ofPressure, RANK, troubles, word } from "./marks.js";
import { bar, NAMES, ofMemory, usage, usedOf } from "./memory.js";
import { h } from "./tree.js";
import { amount, capital, energy, known, part, percent, power, short } from "./words.js";

const MAX_LOOSE = 16; // tiles; more than that are dense
const ROOM = { loose: 24, dense: 80 }; // places on a screen of 1280 by 800 pixels
const LARGE_PLACES = 4; // places of a large tile
const RANKED = { unknown: 4, info: 4 }; // a GPU that is not polled comes after the healthy ones
const IN_LEGEND = ["use", "pool", "others", "driver", "headroom"];
const SILENT = { asleep: "asleep", not_asked: "not polled" };

export const anchor = (gpu) => `gpu-${gpu.index}`;
export const place = (gpu, instance) => `${gpu.index}/${instance.gpu_instance}`;
const rank = ({ condition }) => RANKED[condition] ?? RANK[condition];

export function tiles(state, opened) {
  const { gpus } = state;
  const sorted = gpus.toSorted((one, other) => rank(one) - rank(other));
  const isDense = gpus.length > MAX_LOOSE || gpus.some(({ mig }) => mig);
  const room = (ROOM[isDense ? "dense" : "loose"] - gpus.length) / (LARGE_PLACES - 1);
  const large = new Set(sorted.filter(({ condition }) => isTrouble(condition)).slice(0, Math.max(Math.floor(room), 1)));
  const users = usersOf(state);
  return [
    totals(state),
    h("ul", { class: `tiles${isDense ? " dense" : ""}` }, sorted.map((gpu) => tile(gpu, users, large.has(gpu), gpu === opened))),
  ];
}

function tile(gpu, users, isLarge, isOpen) {
  const isDivided = Boolean(gpu.mig) && gpu.status === "up";
  return h("li", { class: `tile ${gpu.condition}${isLarge ? " large" : ""}${isDivided ? " divided" : ""}`, "data-key": gpu.uuid },
    h("a", { href: isOpen ? "#gpus" : `#${anchor(gpu)}`, "aria-current": isOpen ? "true" : null },
      h("span", { class: "id" }, isTrouble(gpu.condition) ? [mark(gpu.condition), " "] : null, `GPU ${gpu.index}`, h("span", { class: "unseen" }, `, ${word(gpu.condition)}: `)),
      isDivided ? null : h("span", { class: `left ${ofMemory(gpu)}` }, leftText(gpu)), " ",
      isDivided ? h("span", { class: "slices" }, gpu.mig.map((each) => slice(gpu, each, users))) : bar(gpu) ?? h("span", { class: "bar none" }),
      isLarge ? h("span", { class: "why" }, troubles(problems(gpu, users)), gpu.fault_advice ? h("span", { class: "advice" }, ` ${capital(gpu.fault_advice)}.`) : null) : null,
      isDivided ? null : [who(gpu, users.get(gpu.uuid)), " ", h("span", { class: "used" }, usage(gpu) ? usedOf(gpu) : ""), " ",
        h("span", { class: "busy" }, known(gpu.utilization_ratio) ? percent(gpu.utilization_ratio) : "")], " ",
      heat(gpu)));
}

// Return the problems of the GPU and of the runs on it; those on a GPU that does not answer only say so again.
function problems(gpu, users) {
  if (gpu.fault) return gpu.troubles;
  const runs = [gpu, ...(gpu.mig ?? [])].flatMap(({ uuid }) => users.get(uuid)?.runs ?? []);
  const found = [...(gpu.troubles ?? []), ...runs.flatMap((run) => run.troubles ?? [])];
  return found.filter(({ text }, place) => found.findIndex((each) => each.text === text) === place);
}

function slice(gpu, each, users) {
  return h("span", { class: "slice" },
    h("span", { class: "id" }, place(gpu, each)), " ", bar(each) ?? h("span", { class: "bar none" }), " ",
    h("span", { class: `left ${ofMemory(each)}` }, leftText(each)), " ", who(gpu, users.get(each.uuid), []));
}

// What is left: of the run that has the least at its peak, as it will need that again, and now; or free memory.
function leftText(of) {
  if (of.status && of.status !== "up") return SILENT[of.status] ?? "no answer";
  if (of.condition === "unknown") return "no readings";
  if (!known(of.headroom_bytes)) return "";
  if (!of.headroom_run_id) return [amount(of.headroom_bytes), h("span", { class: "unit" }, " free")];
  const atPeak = of.headroom_at_peak_bytes;
  if (!known(atPeak)) return [amount(of.headroom_bytes), h("span", { class: "unit" }, " headroom")];
  return [h("span", { class: "unseen" }, "headroom "), amount(atPeak), h("span", { class: "unit" }, ` at peak, now ${amount(of.headroom_bytes)}`)];
}

function heat(gpu) {
  const core = gpu.temperature_celsius?.core;
  const limit = gpu.temperature_threshold_celsius?.slowdown;
  if (!known(core)) return null;
  return h("span", { class: `heat ${ofPressure(gpu.pressure?.thermal)}` }, `${core.toFixed(0)}${known(limit) ? `/${limit.toFixed(0)}` : ""}`, h("span", { class: "unit" }, " °C"));
}

// Return the runs, and the users with processes of none, by the UUID of GPU or MIG instance.
function usersOf(state) {
  const found = new Map();
  const of = (uuid) => found.get(uuid) ?? found.set(uuid, { runs: [], others: [] }).get(uuid);
  for (const run of state.runs.filter(({ up }) => up)) {
    for (const { uuid, unused } of run.devices ?? []) if (!unused) of(uuid).runs.push(run);
  }
  for (const each of state.processes) if (!each.run_id) of(each.instance_uuid ?? each.uuid).others.push(each);
  return found;
}

// Return who and what uses a GPU or MIG instance; the title has what is cut where the tile is narrow.
function who(gpu, users, owners) {
  const made = h("span", { class: "who" }, named(gpu, users, owners));
  made.title = made.textContent;
  return made;
}

function named(gpu, { runs = [], others = [] } = {}, owners = gpu.owners ?? []) {
  const more = (found) => (found.length > 1 ? ` +${found.length - 1}` : "");
  if (runs.length) {
    const { user, name, condition } = runs[0];
    return [isTrouble(condition) ? [mark(condition), " "] : null, h("bdi", {}, [user, short(name)].filter(Boolean).join(" · ")), more(runs)];
  }
  if (others.length) {
    const { user, command, systemd_unit: unit, container } = others[0];
    return [h("bdi", {}, short([user, container ?? unit ?? command].filter(Boolean).join(" · ") || "a process")), more(others)];
  }
  const user = owners.find(({ kind }) => kind === "user");
  return user ? h("bdi", {}, short(user.name)) : gpu.status === "up" && gpu.condition !== "unknown" ? "no process" : "";
}

function totals(state) {
  const { gpus, energy: used } = state;
  const up = gpus.filter(({ status }) => status === "up");
  const sum = (found, value) => found.reduce((all, each) => all + (value(each) ?? 0), 0);
  const going = state.runs.filter((run) => run.up).length;
  const measured = up.filter(usage);
  const powered = up.filter(({ power_usage_watts: now }) => known(now));
  const limits = powered.map((gpu) => gpu.power_limit_watts?.enforced);
  const since = used && new Date(used.since_timestamp_seconds * 1000);
  const today = since && since.getHours() + since.getMinutes() ? `since ${since.toTimeString().slice(0, 5)}` : "today";
  const found = [
    [gpus.length === 1 ? "GPU up" : "GPUs up", up.length === gpus.length ? String(gpus.length) : `${up.length} of ${gpus.length}`],
    [going === 1 ? "run" : "runs", String(going)],
    measured.length && ["GPU memory", part(sum(measured, (gpu) => usage(gpu).used), sum(measured, (gpu) => usage(gpu).size))],
    powered.length && ["power", `${power(sum(powered, (gpu) => gpu.power_usage_watts))}${limits.every(known) ? ` of ${power(limits.reduce((all, each) => all + each))}` : ""}`],
    used && [`energy ${today}`, energy(used.joules)],
  ].filter(Boolean);
  return h("div", { class: "totals" },
    h("dl", { "aria-label": "Totals" }, found.map(([name, value]) => h("div", {}, h("dt", {}, name), " ", h("dd", {}, value)))),
    h("p", { class: "legend", "aria-hidden": "true" }, IN_LEGEND.map((kind) => h("span", {}, h("span", { class: `swatch ${kind}` }), ` ${NAMES[kind].replace(" by runs", "")}`))));
}

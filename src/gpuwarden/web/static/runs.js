// Training runs: a row for each that is running, with a card for the one that is opened, and a line for each that has ended.

import { bounded, fact, isTrouble, mark, ofPressure, section, troubles, word } from "./marks.js";
import { highestPeak } from "./memory.js";
import { h, prose } from "./tree.js";
import { amount, clock, errorKind, forecast, known, lasting, pace, percent, plain, rate, short, step } from "./words.js";

const MAX_RUNNING = 24;
const MAX_ENDED = 8;
const HEADROOM_UNKNOWN = {
  device_unresolved: "the device matches no GPU for certain",
  free_memory_unreported: "the driver does not report free memory",
  gpu_down: "the GPU is not responding",
  no_allocator_figures: "the framework reports no memory in use",
  no_report: "no report yet",
  process_memory_unreported: "the driver does not report the memory of the process",
  process_unlisted: "the driver does not list the process",
  report_expired: "the last report is too old",
};

export const anchor = (run) => `run-${run.run_id}`;

// `open` is the id of what is opened on the page; a single run is always.
export function runs(state, places, charts, open) {
  const going = state.runs.filter(({ up }) => up);
  const ended = state.runs.filter(({ up }) => !up);
  const opened = going.length === 1 ? going[0] : going.find((run) => anchor(run) === open);
  const rows = going.flatMap((run) => [row(run, places, run === opened), run === opened ? opening(run, places, charts, going.length > 1) : null]).filter(Boolean);
  const shown = MAX_RUNNING + Number(going.indexOf(opened) > -1 && going.indexOf(opened) < MAX_RUNNING);
  const rest = rows.slice(shown);
  return section("runs", "Training runs", [
    state.runs.length ? null : howTo(),
    going.length ? table(rows.slice(0, shown)) : null,
    rest.length ? h("details", { "data-key": "more runs", open: rest.some((each) => each.dataset.key === `${opened?.run_id} card`) }, h("summary", {}, `and ${going.length - MAX_RUNNING} more runs`), table(rest)) : null,
    ended.length ? [h("h3", {}, "Ended"), bounded(ended.map(line), MAX_ENDED, "ended runs", "ul", { class: "lines" })] : null,
    state.runs_dropped ? h("p", {}, `and ${state.runs_dropped} more runs that are not listed here`) : null,
  ]);
}

const COLUMNS = [["Run", ""], ["GPU", "number"], ["State", "wide"], ["Headroom at peak", "number"], ["In use", "number wide"], ["Steps/s", "number wide"], ["Input wait", "number wide"]];

function table(rows) {
  return h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", {}, rows));
}

function row(run, places, isOpen) {
  const devices = run.devices ?? [];
  const tight = tightest(devices);
  const cells = [
    [isTrouble(run.condition) ? [mark(run.condition), " "] : null, h("a", { href: isOpen ? "#runs" : `#${anchor(run)}`, "aria-current": isOpen ? "true" : null }, h("bdi", {}, short(run.name))), h("span", { class: "unseen" }, `, ${word(run.condition)}`),
      run.user ? h("span", { class: "note" }, ` ${run.user}`) : null, " · ", page(run), isOpen ? null : troubles(run.troubles, "")],
    where(run, places, "none", "?"),
    doing(run),
    known(tight?.headroom_bytes) ? amount(tight.headroom_at_peak_bytes ?? tight.headroom_bytes) : "-",
    inUse(devices) ?? "-",
    known(run.steps_per_second) ? pace(run.steps_per_second) : "-",
    known(run.input_wait_ratio) ? percent(run.input_wait_ratio) : "-",
  ];
  return h("tr", { "data-key": run.run_id }, cells.map((content, place) =>
    h(place ? "td" : "th", { scope: place ? null : "row", class: COLUMNS[place][1] }, content)));
}

const opening = (run, places, charts, several) =>
  h("tr", { "data-key": `${run.run_id} card`, class: "opened" }, h("td", { colspan: COLUMNS.length }, card(run, places, charts, several)));

function where(run, places, none, unknown) {
  const used = (run.devices ?? []).filter(({ unused }) => !unused);
  if (used.length) return used.map(({ uuid, unverified }) => `${places.get(uuid) ?? "?"}${unverified ? " (unverified)" : ""}`).join(", ");
  return (run.findings ?? []).some(({ name }) => name === "no_gpu") ? none : unknown;
}

function howTo() {
  const code = (text) => h("pre", {}, h("code", {}, text));
  return h("div", { class: "howto" },
    h("p", {}, "No training run has reported. Add to a Keras script:"),
    code("from gpuwarden.keras import GpuWarden\n\nmodel.fit(…, callbacks=[GpuWarden()])"),
    h("p", {}, "Or to a custom training loop:"),
    code('from gpuwarden import watch\n\nwith watch("my training") as run:\n    for batch in loader:\n        train(batch)\n        run.step()'));
}

function card(run, places, charts, closable) {
  const id = anchor(run);
  const devices = run.devices ?? [];
  const tight = tightest(devices);
  const place = where(run, places, "no GPU", "GPU unknown");
  const of = [run.user, run.framework, run.job ? `job ${run.job}` : null, known(run.rank) ? `rank ${run.rank}` : null].filter(Boolean).join(" · ");
  return h("article", { class: `card ${run.condition}`, id, "data-key": run.run_id, tabindex: "-1", "aria-labelledby": `${id}-name` },
    h("div", { class: "title" },
      mark(run.condition),
      h("h3", { id: `${id}-name` }, h("bdi", {}, short(run.name)), h("span", { class: "unseen" }, `, ${word(run.condition)}`)),
      h("span", { class: "name" }, /^[\d?]/.test(place) ? `GPU ${place}` : place),
      closable ? h("a", { class: "close", href: "#runs" }, "Close", h("span", { class: "unseen" }, ` ${short(run.name)}`)) : null),
    h("p", { class: "about" }, of),
    troubles(run.troubles, ""),
    h("dl", { class: "facts" }, tight ? headroom(tight) : null, held(devices), speed(run), progress(run), waits(run), host(run)),
    outlooks(run, devices, places),
    errors(run), findings(run), diagnosis(run),
    run.batch_size_advice && !run.diagnosis ? h("p", {}, run.batch_size_advice) : null,
    devices.filter((each) => each.headroom_unknown).map((each) => h("p", {}, `Headroom on GPU ${places.get(each.uuid) ?? "?"} unknown: ${HEADROOM_UNKNOWN[each.headroom_unknown] ?? plain(each.headroom_unknown)}.`)),
    run.unresolved_devices ? h("p", {}, `Devices that match no GPU for certain: ${run.unresolved_devices}.`) : null,
    charts.ofRun(run, tight, places.has(tight?.uuid) ? ` on GPU ${places.get(tight.uuid)}` : ""),
    h("p", { class: "about" }, `since ${clock(run.began_timestamp_seconds)} · process ${run.pid || "unknown"} · `, page(run)));
}

function line(run) {
  const level = run.condition === "ok" && run.headline ? "warning" : run.condition;
  const bad = level !== "ok";
  return h("li", { id: anchor(run), "data-key": run.run_id, tabindex: "-1" },
    bad ? mark(level) : null, " ", h("b", {}, h("bdi", {}, short(run.name))), " ",
    h("span", { class: bad ? level : "" }, plain(run.state)),
    known(run.ended_timestamp_seconds) ? ` at ${clock(run.ended_timestamp_seconds)}` : "",
    run.evidence ? [": ", h("bdi", {}, run.evidence)] : "", ". ", page(run), headline(run));
}

const page = (run) => h("a", { href: `run/${encodeURIComponent(run.run_id)}` }, "details", h("span", { class: "unseen" }, ` of ${short(run.name)}`));

function tightest(devices) {
  return devices.filter(({ headroom_ratio: share }) => known(share)).sort((one, other) => one.headroom_ratio - other.headroom_ratio)[0] ?? devices[0];
}

function headroom(tight) {
  if (!known(tight.headroom_bytes)) return null;
  const { headroom_at_peak_bytes: atPeak } = tight;
  const share = [
    known(atPeak) ? `now ${amount(tight.headroom_bytes)}` : null,
    known(tight.headroom_ratio) ? `${percent(tight.headroom_ratio)} of its limit is free` : null,
    tight.headroom_limit_text,
    known(tight.headroom_in_step_bytes) ? `${amount(tight.headroom_in_step_bytes)} left within a step` : null,
  ].filter(Boolean).join(", ");
  return fact(known(atPeak) ? "Headroom at peak" : "Headroom", amount(atPeak ?? tight.headroom_bytes), { note: share, level: ofPressure(tight.pressure), ratio: tight.headroom_ratio ?? null });
}

// Memory of the GPU that the run fills the most, as its peak is in all lists.
function inUse(devices) {
  const used = devices.map((each) => each.memory_in_use_bytes).filter(known);
  return used.length ? amount(Math.max(...used)) : null;
}

function held(devices) {
  const now = inUse(devices);
  const peak = highestPeak(devices);
  const note = [known(peak) ? `peak ${amount(peak)}` : null, devices.length > 1 ? "on the fullest GPU" : null].filter(Boolean).join(", ");
  return now ? fact("Memory in use", now, { note: note || null }) : null;
}

function speed(run) {
  const { steps_per_second: now, step_median_seconds: median, step_p95_seconds: p95 } = run;
  const times = [known(median) ? `median ${step(median)}` : null, known(p95) ? `p95 ${step(p95)}` : null].filter(Boolean).join(", ");
  const note = times ? `step time: ${times}` : "";
  if (!known(now) && !note) return null;
  return fact("Steps per second", known(now) ? pace(now) : "-", { note });
}

const doing = (run) => [plain(run.state), run.phase, known(run.epoch) ? `epoch ${run.epoch}` : null].filter(Boolean).join(" · ") || "-";

function progress(run) {
  const now = [doing(run), known(run.batch) ? `batch ${run.batch}` : null, known(run.loss) ? `loss ${Number(run.loss.toPrecision(4))}` : null];
  const note = [known(run.steps) ? `${run.steps} steps` : null, known(run.batch_size) ? `batch size ${run.batch_size}` : null].filter(Boolean).join(" · ");
  return fact("Phase", now.filter(Boolean).join(" · "), { note });
}

function waits(run) {
  return known(run.input_wait_ratio) ? fact("Input wait", percent(run.input_wait_ratio), { ratio: run.input_wait_ratio }) : null;
}

function host(run) {
  return known(run.host_memory_bytes) ? fact("Host memory", amount(run.host_memory_bytes)) : null;
}

// Leaks: how fast memory grows, and when it will be used up.
function outlooks(run, devices, places) {
  const grown = devices.filter((each) => known(each.memory_growth_bytes_per_second)).map((each) => [
    `memory on GPU ${places.get(each.uuid) ?? "?"}`, each.memory_growth_bytes_per_second, each.memory_grown_bytes, each.seconds_to_oom, each.seconds_to_oom_lower, each.seconds_to_oom_upper,
  ]);
  if (known(run.host_memory_growth_bytes_per_second)) {
    grown.push(["host memory", run.host_memory_growth_bytes_per_second, run.host_memory_grown_bytes, run.seconds_to_host_oom, run.seconds_to_host_oom_lower, run.seconds_to_host_oom_upper]);
  }
  return grown.map(([what, speed, soFar, seconds, lower, upper]) =>
    h("p", {}, `Leak: ${what} grows by ${rate(speed)}${known(soFar) ? `, ${amount(soFar)} so far` : ""}; `,
      known(seconds) ? h("b", {}, `out of ${what.startsWith("host") ? "host " : ""}memory ${forecast(seconds, lower, upper)}.`) : "no forecast yet."));
}

function errors(run) {
  const found = Object.entries(run.errors ?? {}).filter(([, count]) => count);
  if (!found.length) return null;
  return h("p", {}, "Errors: ", found.map(([kind, count]) => `${errorKind(kind)}${count > 1 ? ` × ${count}` : ""}`).join(", "), ".");
}

function findings(run) {
  return (run.findings ?? []).map((each) => h("p", {}, prose(each.text), " ", h("b", {}, prose(each.next_step))));
}

function headline({ headline: found }) {
  return found ? h("p", {}, h("b", {}, prose(found.text)), ". ", prose(found.next_step)) : null;
}

function diagnosis(run) {
  if (!run.diagnosis) return null;
  return h("p", {}, "Out of memory, cause: ", h("b", {}, plain(run.diagnosis.name)), ". ", prose(run.diagnosis.evidence), " ", h("b", {}, prose(run.diagnosis.next_step)));
}

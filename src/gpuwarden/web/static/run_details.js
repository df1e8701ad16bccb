// Errors of a run, what holds its tensors, its environment, and the earlier runs of its name.

import { bounded, mark } from "./marks.js";
import { highestPeak } from "./memory.js";
import { copyable } from "./run_copy.js";
import { count } from "./run_figures.js";
import { outcome } from "./run_summary.js";
import { h, prose } from "./tree.js";
import { amount, capital, clock, errorKind, errorWords, known, lasting, percent, plain, short, step } from "./words.js";

const MAX_ERRORS = 3;
const MAX_HOLDERS = 8;
const MIN_SHARE = 0.02; // share of the memory from which a holder is listed

const section = (key, title, ...content) =>
  h("section", { "data-key": key, "aria-labelledby": key }, h("h2", { id: key }, title), content);

function table(titles, rows, numbers = []) {
  return h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, titles.map((title, place) => h("th", { scope: "col", class: numbers.includes(place) ? "number" : null }, title)))),
    h("tbody", {}, rows)));
}

// `key` is the id of the section, as a page of several runs has several.
export function errors({ record }, key = "errors") {
  const reported = (record.reported_errors ?? []).toReversed();
  const counts = Object.entries(record.errors ?? {}).filter(([, number]) => number);
  if (!reported.length && !counts.length) return null;
  const hidden = reported.some(({ frame, text }) => !frame && text.startsWith("not shown"));
  return section(key, "Errors",
    counts.reduce((sum, [, number]) => sum + number, 0) > reported.length ? h("p", {}, counts.map(([kind, number]) => `${errorKind(kind)}${number > 1 ? ` × ${count(number)}` : ""}`).join(", "), ".") : null,
    hidden ? [h("p", {}, "Messages can have paths and names, so this page does not show them. The run's user and root can read them on the host:"), copyable(`gpuwarden runs show ${record.run_id}`)] : null,
    bounded(reported.map((each) => error(each, hidden, record.headline)), MAX_ERRORS, "errors", "ol", { class: "lines errors" }));
}

function error(each, hidden, headline) {
  const { timestamp_seconds: at, kind, exception, text, frame, phase, steps, allocations = [], diagnosis, next_step: next } = each;
  const explained = headline && (diagnosis ? diagnosis.evidence === headline.evidence : next === headline.next_step); // the page has begun with it
  const when = [phase, known(steps) ? `after ${count(steps)} steps` : null].filter(Boolean).join(" ");
  return h("li", { "data-key": `${at} ${exception}` },
    h("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)), " ", h("b", {}, h("bdi", {}, short(exception))), errorWords(kind), when ? `, ${when}` : null,
    frame ? h("p", {}, "at ", h("code", {}, h("bdi", {}, frame))) : null,
    allocations.map((one) => h("p", {}, `requested ${requested(one)}`)),
    hidden ? null : h("pre", { class: "message" }, text),
    diagnosis && !explained ? h("p", {}, "Cause: ", h("b", {}, plain(diagnosis.name)), ". ", prose(diagnosis.evidence)) : null,
    (diagnosis?.next_step ?? next) && !explained ? h("p", {}, h("b", {}, "Next step: "), prose(diagnosis?.next_step ?? next)) : null);
}

function requested({ requested_bytes: bytes, shape, dtype, op, device }) {
  return [known(bytes) ? amount(bytes) : null, shape ? `for [${shape}] ${dtype ?? ""}`.trim() : null, op ? `by ${op}` : null, device ? `on ${device}` : null].filter(Boolean).join(" ") || "memory";
}

// Tensors by what keeps them, if the run takes a census.
export function census({ record }, key = "census") {
  const found = record.census;
  if (!found) return null;
  const whole = Math.max(found.in_use_bytes ?? 0, found.tensor_bytes);
  const rows = (found.groups ?? []).filter(({ size_bytes: bytes }) => bytes >= MIN_SHARE * whole).slice(0, MAX_HOLDERS).map((each) =>
    h("tr", {},
      h("td", { class: "number" }, percent(each.size_bytes / whole)), h("td", { class: "number" }, amount(each.size_bytes)), h("td", { class: "number" }, count(each.count)),
      h("td", {}, each.shape === undefined ? "several shapes" : `${each.dtype ?? ""}[${each.shape}]`),
      h("td", {}, h("bdi", {}, prose(each.holder ?? "-")), each.place ? [" in ", h("code", {}, each.place)] : null)));
  return section(key, "Who holds the memory",
    h("p", { class: "about" }, `Live tensors at ${clock(found.timestamp_seconds)}, after ${count(found.steps)} steps: ${count(found.tensors)} with ${amount(found.tensor_bytes)}.`,
      found.cut ? " The census was cut by its time limit: tensors or their holders are missing." : ""),
    table(["Share", "Memory", "Tensors", "Shape", "Kept by"], rows, [0, 1, 2]));
}

export function earlierRuns(view, runs) {
  if (!runs.length) return null;
  const rows = [view.record, ...runs].map((each, place) => {
    const { text, level } = outcome(place ? { record: each } : view);
    const peak = highestPeak(each.devices);
    const began = clock(each.began_timestamp_seconds);
    return h("tr", { "data-key": `${each.run_id} ${each.began_timestamp_seconds}`, class: place ? null : "this" },
      h("td", {}, place ? h("a", { href: `./${encodeURIComponent(each.run_id)}` }, began) : h("b", {}, began, h("span", { class: "about" }, " this run"))),
      h("td", { class: "outcome" }, h("span", { class: level }, mark(level), " ", text)),
      h("td", { class: "number" }, lasting(each.duration_seconds)),
      h("td", { class: "number" }, known(each.steps) ? count(each.steps) : "-"),
      h("td", { class: "number" }, known(peak) ? amount(peak) : "-"),
      h("td", { class: "number" }, known(each.step_median_seconds) ? step(each.step_median_seconds) : "-"),
      h("td", { class: "number" }, known(each.batch_size) ? count(each.batch_size) : "-"));
  });
  return section("earlier", "Compared with the last runs of this name",
    table(["Start", "Outcome", "Duration", "Steps", "Peak memory", "Step time", "Batch size"], rows, [2, 3, 4, 5, 6]));
}

// Incidents of the run, and those of its GPUs while it ran.
export function incidentsOf(incidents, record) {
  const { run_id: id, devices = [], began_timestamp_seconds: began, ended_timestamp_seconds: ended } = record;
  const during = ({ began_timestamp_seconds: at }) => at >= began && at <= (ended ?? Infinity);
  const found = incidents.filter((each) => each.subject?.run_id === id || (each.subject?.kind === "gpu" && during(each) && devices.some(({ uuid }) => uuid === each.subject.uuid)));
  if (!found.length) return null;
  return section("incidents", "Incidents",
    h("p", { class: "about" }, "Recordings of the ten minutes before: all GPUs, runs and the host, second by second."),
    found.map((each) => h("div", { "data-key": each.id },
      h("p", {}, h("time", { datetime: new Date(each.began_timestamp_seconds * 1000).toISOString() }, clock(each.began_timestamp_seconds)), " ",
        h("a", { href: `../incident/${encodeURIComponent(each.id)}` }, h("bdi", {}, prose(each.finding.text))), " · ", h("a", { href: `../api/v1/incidents/${encodeURIComponent(each.id)}` }, "JSON")),
      copyable(`gpuwarden incidents show ${each.id}`))));
}

export function environment({ record, state, at }) {
  const { daemon, host } = state;
  const ended = Boolean(record.outcome);
  const rows = [
    ["Run ID", record.run_id], ["Process", record.pid || null], ["Framework", record.framework],
    ...(record.devices ?? []).map(({ uuid, name }) => [at.has(uuid) ? `GPU ${at.get(uuid)}` : "GPU", `${name}, ${uuid}`]),
    [`Driver${ended ? ", now" : ""}`, daemon.driver_version], [`CUDA of the driver${ended ? ", now" : ""}`, daemon.cuda_version],
    ["Host", [host.name, known(host.cpus) ? `${host.cpus} CPUs` : null, known(host.memory_size_bytes) ? amount(host.memory_size_bytes) : null].filter(Boolean).join(", ")],
    ["gpuwarden", daemon.version],
  ].filter(([, value]) => value);
  return section("environment", "Environment",
    h("dl", { class: "rows" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("bdi", {}, String(value)))))),
    h("p", { class: "about" }, "The same in a terminal on the host:"), copyable(`gpuwarden runs show ${record.run_id}`));
}

// Table of processes, and lists of events and incidents.

import { bounded, mark, section, word } from "./marks.js";
import { h, prose } from "./tree.js";
import { amount, capital, clock, known, plain, short } from "./words.js";

const MAX_PROCESSES = 12;
const MAX_EVENTS = 12;
const MAX_INCIDENTS = 5;
// All other keys of a process are its owners, by kind.
const OF_ITSELF = new Set(["pid", "uuid", "instance_uuid", "type", "memory_bytes", "command", "user", "run_id"]);

export function processes(state, places) {
  const names = new Map(state.runs.map(({ run_id: id, name }) => [id, name]));
  const found = state.processes.map((each) => row(each, places, names));
  const rest = found.slice(MAX_PROCESSES);
  const none = state.gpus.some(({ status, condition }) => status === "up" && condition !== "unknown") ? "No process uses a GPU." : "Unknown: no GPU has readings.";
  return section("processes", "GPU memory by process", [
    found.length ? table(found.slice(0, MAX_PROCESSES)) : h("p", {}, none),
    rest.length ? h("details", { "data-key": "more" }, h("summary", {}, `and ${rest.length} more processes`), table(rest)) : null,
    state.processes_dropped ? h("p", {}, `and ${state.processes_dropped} more processes with less memory`) : null,
  ], { extra: true });
}

function table(rows) {
  const head = [["GPU", ""], ["Memory", "number"], ["User", ""], ["Program", ""], ["Owner", "wide"]];
  return h("table", {}, h("thead", {}, h("tr", {}, head.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), h("tbody", {}, rows));
}

function row(each, places, names) {
  const owners = Object.keys(each).filter((key) => !OF_ITSELF.has(key)).map((kind) => `${plain(kind)} ${each[kind]}`);
  if (each.run_id) owners.push(`run ${short(names.get(each.run_id) ?? each.run_id)}`);
  return h("tr", { "data-key": `${each.uuid} ${each.pid} ${each.type}` },
    h("td", {}, places.get(each.instance_uuid) ?? places.get(each.uuid) ?? "?"),
    h("td", { class: "number" }, known(each.memory_bytes) ? amount(each.memory_bytes) : "-"),
    h("td", {}, h("bdi", {}, each.user ?? "unknown")),
    h("td", {}, h("bdi", {}, each.command ?? ""), ` ${each.pid}${each.type === "graphics" ? " (graphics)" : ""}`),
    h("td", { class: "wide" }, h("bdi", {}, owners.join(" · ") || "-")));
}

export function events(state) {
  const found = state.events.map(({ timestamp_seconds: at, level, text, kind }) =>
    h("li", { class: level, "data-key": `${at} ${kind} ${text}` },
      h("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)), " ", mark(level), " ",
      word(level) ? h("span", { class: "unseen" }, `${word(level)}: `) : null, h("bdi", {}, capital(text))));
  const none = h("p", {}, "None since the daemon started.");
  return section("events", "Events", found.length ? bounded(found, MAX_EVENTS, "events", "ol", { class: "lines events" }) : none, { extra: true });
}

export function incidents(found) {
  if (!found.length) return null;
  const lines = found.map(({ id, severity, began_timestamp_seconds: at, finding, interrupted }) =>
    h("li", { "data-key": id },
      h("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)), " ", mark(severity), " ",
      word(severity) ? h("span", { class: "unseen" }, `${word(severity)}: `) : null, h("bdi", {}, prose(finding.text)),
      h("p", {}, interrupted ? "cut short, as the daemon was killed · " : "", h("code", {}, `gpuwarden incidents show ${id}`), " · ", h("a", { href: `incident/${encodeURIComponent(id)}` }, "page"), " · ", h("a", { href: `api/v1/incidents/${encodeURIComponent(id)}` }, "JSON"))));
  return section("incidents", "Incidents", bounded(lines, MAX_INCIDENTS, "incidents", "ol", { class: "lines events" }), { extra: true });
}

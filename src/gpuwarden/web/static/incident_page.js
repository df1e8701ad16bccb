// Page of one incident, at incident/ID. It is loaded again until the recording is complete.

import { Charts } from "./charts.js";
import { places } from "./gpus.js";
import { processes } from "./lists.js";
import { get } from "./live.js";
import { bounded, mark } from "./marks.js";
import { highestPeak } from "./memory.js";
import { copyable } from "./run_copy.js";
import { census, errors } from "./run_details.js";
import { count } from "./run_figures.js";
import { h, prose, show } from "./tree.js";
import { amount, capital, clock, degrees, known, plain, short } from "./words.js";

const SAME_SECONDS = 1.5; // between an event and its part of the finding
const MAX_GPUS = 8; // with charts
const MAX_LINES = 20; // of each list
const RETRY_SECONDS = 3;
const ROLES = { followers: "then", before: "before", others: "also" };
const ID = location.pathname.split("/").at(-1);

const charts = new Charts();
const part = (id) => document.getElementById(id);
const section = (key, title, ...content) => h("section", { "data-key": key, "aria-labelledby": key }, h("h2", { id: key }, title), content);
const when = (seconds, text = clock(seconds)) => h("time", { datetime: new Date(seconds * 1000).toISOString() }, text);

async function load() {
  let next = RETRY_SECONDS;
  try {
    const incident = (await get(`api/v1/incidents/${ID}`)).body;
    draw(incident);
    if (known(incident.ended_timestamp_seconds) || incident.interrupted) next = null;
  } catch (error) {
    if (error.status === 404) next = null;
    if (error.status === 404) plainPage("Unknown incident", "The daemon has no incident with this ID: the oldest ones make room for new ones.");
    else if (!document.title.includes(" on ")) plainPage("The daemon does not answer", `${error.message}. Retrying.`);
    console.warn(error);
  }
  if (next) setTimeout(load, next * 1000);
}

function plainPage(text, note) {
  show(part("main"), h("section", { class: "banner unknown", "aria-labelledby": "sentence" }, h("h2", { id: "sentence" }, text), h("p", {}, note)),
    h("p", {}, "Incidents that it knows: "), copyable("gpuwarden incidents"), h("p", {}, h("a", { href: "../" }, "All GPUs and runs")));
}

function draw(incident) {
  const { host, severity, finding, note, runs = [], gpus = [], kernel_lines: lines = [], xids = [], box } = incident;
  const at = places(gpus.map((gpu) => ({ ...gpu, mig: (gpu.mig ?? []).map((uuid) => ({ uuid, gpu_instance: uuid.slice(0, 12) })) })));
  const gpu = (uuid) => `GPU ${at.get(uuid) ?? "?"}`;
  charts.start(recorded(incident));
  show(part("head"),
    h("p", { class: "way" }, h("a", { href: "../" }, "gpuwarden"), " / ", h("a", { href: "../" }, h("bdi", {}, short(host))), " / incident"),
    h("h1", {}, "Incident on ", h("bdi", {}, short(host))),
    h("p", { class: "facts-line" }, when(incident.began_timestamp_seconds), ` · ${plain(incident.kind)} · ${incident.id}`, state(incident)));
  show(part("main"),
    h("section", { class: `banner ${severity}`, "aria-labelledby": "sentence", "data-key": "banner" },
      h("h2", { id: "sentence" }, mark(severity), " ", h("bdi", {}, prose(finding.text))), note ? h("p", {}, "Note: ", h("bdi", {}, note)) : null),
    timeline(incident),
    concerned(incident).map((each) => section(`gpu-${each.uuid}`, [gpu(each.uuid), " ", h("span", { class: "about" }, each.name, each.fault ? ` (${plain(each.fault)})` : "")], charts.ofIncident(each))),
    runs.map((run) => runSection(run, incident)),
    incident.processes?.length ? processes({ gpus, runs, processes: incident.processes.map(({ owners: { run, ...owners } = {}, ...each }) => ({ ...each, ...owners, run_id: run })) }, at) : null,
    xids.length ? section("xids", "XIDs", list(xids.map((each) =>
      h("li", {}, when(each.timestamp_seconds), " ", mark(each.severity), ` ${gpu(each.uuid)}, XID ${each.code}: ${each.meaning} ${each.action ?? ""}`)), "XIDs")) : null,
    lines.length ? section("kernel", "Kernel log", list(lines.map((each) => h("li", {}, when(each.timestamp_seconds), " ", h("code", {}, each.text))), "lines")) : null);
  show(part("foot"),
    h("p", {}, [["gpuwarden", box.version], ["driver", box.driver_version], ["CUDA", box.cuda_version], ["kernel", box.kernel]].filter(([, value]) => value).map((pair) => pair.join(" ")).join(" · ")),
    h("p", {}, h("a", { href: "../" }, "all GPUs and runs"), " · ", h("a", { href: `../api/v1/incidents/${ID}` }, "this incident as JSON"), " · ", h("code", {}, `gpuwarden incidents show ${incident.id}`)));
  charts.draw();
  document.title = `Incident ${incident.id} on ${short(host)}`;
}

const list = (items, name) => bounded(items, MAX_LINES, name, "ol", { class: "lines events" });

function state(incident) {
  if (incident.interrupted) return " · cut short, as the daemon was killed";
  return known(incident.ended_timestamp_seconds) ? null : " · still being recorded";
}

// The series as charts read them. Of device memory, a point has the highest of the samples since the one before.
function recorded({ series, began_timestamp_seconds: began }) {
  const { timestamp_seconds: times = [], gpus = {}, runs = {}, devices = {}, memory_samples: samples = {} } = series ?? {};
  const column = (key) => {
    const words = key.split(" ");
    const name = words.pop();
    const of = words[0] !== "run" ? gpus[words[0]] : words.length > 2 ? devices[words[1]]?.[words[2]] : runs[words[1]];
    const values = of?.[name] ?? times.map(() => null);
    return name === "memory_used_bytes" ? withSamples(times, values, samples[words[0]]) : values;
  };
  return { times, column, cause: began };
}

function withSamples(times, values, samples) {
  if (!samples) return values;
  return values.map((value, place) => {
    const since = samples.used_bytes.filter((_, each) => samples.timestamp_seconds[each] > (times[place - 1] ?? 0) && samples.timestamp_seconds[each] <= times[place]);
    return value === null ? null : Math.max(value, ...since);
  });
}

// Parts of the finding, and the events that are not among them, in order of time.
function timeline({ finding, events = [], began_timestamp_seconds: began }) {
  const parts = [{ ...finding.root, role: "first cause" }, ...Object.entries(ROLES).flatMap(([key, role]) => (finding[key] ?? []).map((each) => ({ ...each, role })))];
  const isTold = (event) => parts.some((each) => Math.abs(each.timestamp_seconds - event.timestamp_seconds) < SAME_SECONDS && (event.run_id ? event.run_id === each.run_id : event.uuid === each.uuid));
  const moments = [...parts, ...events.filter((event) => !isTold(event))].sort((one, other) => one.timestamp_seconds - other.timestamp_seconds);
  return section("timeline", "Timeline", h("table", { class: "moments" }, h("tbody", {}, moments.map(({ timestamp_seconds: at, role, text }) =>
    h("tr", { class: role === "first cause" ? "cause" : null },
      h("td", { class: "number" }, when(at, clock(at).slice(-8)), h("span", { class: "offset" }, offset(at - began))), h("td", {}, role ? h("b", {}, capital(role), ": ") : null, h("bdi", {}, prose(capital(text)))))))));
}

function offset(seconds) {
  const whole = Math.round(seconds);
  const size = Math.abs(whole);
  return `${whole < 0 ? "-" : whole > 0 ? "+" : ""}${size < 60 ? "" : `${Math.floor(size / 60)}m`}${size < 60 ? size : String(size % 60).padStart(2, "0")}s`;
}

// GPUs that the finding names, else those with processes, else all.
function concerned({ subject, finding, processes: listed = [], gpus = [] }) {
  const named = [subject, finding.root, ...Object.keys(ROLES).flatMap((key) => finding[key] ?? [])].map((each) => each?.uuid);
  const within = (uuids) => [...new Set(uuids)].map((uuid) => gpus.find((each) => each.uuid === uuid)).filter(Boolean);
  const found = within(named);
  const used = found.length ? found : within(listed.map(({ uuid }) => uuid));
  return (used.length ? used : gpus).slice(0, MAX_GPUS);
}

function runSection(run, { series }) {
  const { run_id: id, name, rank, world_size: size, framework, user, steps, evidence } = run;
  const peak = highestPeak(run.devices);
  const facts = [
    known(rank) ? `rank ${rank}${known(size) ? ` of ${size}` : ""}` : null, framework, user ? `user ${user}` : null,
    known(steps) ? `${count(steps)} steps` : null, known(peak) ? `peak memory ${amount(peak)}` : null,
  ].filter(Boolean).join(" · ");
  const uuid = Object.keys(series?.devices?.[id] ?? {})[0];
  return section(`run-${id}`, ["Run ", h("a", { href: `../run/${encodeURIComponent(id)}` }, h("bdi", {}, short(name))), `: ${plain(run.state ?? run.outcome ?? "running")}`],
    h("p", { class: "about" }, h("bdi", {}, facts)), evidence ? h("p", {}, h("bdi", {}, capital(evidence)), ".") : null,
    charts.ofRun(run, uuid ? { uuid } : null), errors({ record: run }, `errors-${id}`), census({ record: run }, `census-${id}`));
}

part("main").append(h("p", {}, "Loading …")); // not in the document, which is also read without scripts
load();

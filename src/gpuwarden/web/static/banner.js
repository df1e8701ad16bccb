// Banner: the condition of the host, and its problems by GPU and run.

import { bounded, isTrouble, mark, word } from "./marks.js";
import { anchor as ofRun } from "./runs.js";
import { anchor as ofGpu } from "./tiles.js";
import { h } from "./tree.js";
import { amount, capital, clock, known, part, plain, several, short } from "./words.js";

const MAX_LINES = 6;
const MAX_LINKS = 12;

// Problems by subject, the worst first, as the daemon sorts them.
function subjects(state) {
  const indices = new Map(state.gpus.map((gpu) => [gpu.uuid, gpu]));
  const found = new Map();
  for (const { level, text, name, uuid, run_id: id } of state.troubles ?? []) {
    const to = uuid && indices.has(uuid) ? ofGpu(indices.get(uuid)) : id ? ofRun({ run_id: id }) : "";
    const key = uuid ?? id ?? name;
    if (!found.has(key)) found.set(key, { key, name, to, level, texts: [] });
    found.get(key).texts.push(text);
  }
  return [...found.values()];
}

// Number of problems by severity, in words.
function counts(found) {
  const count = (wanted) => found.filter(({ level }) => level === wanted).length;
  return [count("critical") ? `${count("critical")} critical` : null, count("warning") ? several(count("warning"), "warning") : null].filter(Boolean).join(", ");
}

// Return the banner's sentence, which is the worst problem, links to the others that the tiles show, and a line for each of the rest.
export function summarize(state) {
  const { daemon, gpus, condition } = state;
  const bad = subjects(state);
  const onTiles = new Set(gpus.filter((gpu) => isTrouble(gpu.condition)).flatMap(({ uuid, mig = [] }) => [uuid, ...mig.map((each) => each.uuid)]));
  for (const { run_id: id, devices = [] } of state.runs) if (devices.some(({ uuid, unused }) => !unused && onTiles.has(uuid))) onTiles.add(id);
  const link = ({ name, to, level }) => [to ? h("a", { href: `#${encodeURIComponent(to)}` }, h("bdi", {}, short(name))) : name, h("span", { class: "unseen" }, `, ${word(level)}`)];
  const [worst, ...others] = bad;
  const shown = others.filter(({ key }) => onTiles.has(key));
  const links = shown.length ? [shown.slice(0, MAX_LINKS).map((each, place) => [place ? ", " : "", link(each)]), shown.length > MAX_LINKS ? ` and ${shown.length - MAX_LINKS} more` : ""] : null;
  const list = (found) => found.filter(({ key, to }) => (to || !daemon.fault) && !onTiles.has(key)).map((each) =>
    h("li", { class: each.level, "data-key": each.key }, mark(each.level), " ", link(each), `: ${each.texts.join("; ")}`));
  const lines = list(bad);
  const more = state.troubles_dropped ? `and ${state.troubles_dropped} more problems` : null;
  const paused = daemon.paused_until_timestamp_seconds;
  if (daemon.fault) return { condition, text: `NVIDIA driver not responding: ${plain(daemon.fault)}`, note: daemon.fault_advice, lines, bad };
  if (known(paused)) {
    return { condition, text: `Paused until ${clock(paused)}`, note: "the driver is released and no GPU is polled; resume with gpuwarden resume", lines, bad };
  }
  if (worst) {
    const what = worst.texts.join("; ");
    const also = others.length ? h("p", {}, `Also ${counts(others)}${links ? ": " : ""}`, links) : null;
    return { condition, text: `${capital(worst.name)}: ${what}`, sentence: [link({ ...worst, name: capital(worst.name) }), `: ${what}`], also, note: more, lines: list(others), bad };
  }
  if (!gpus.length) return { condition, text: "No GPU found", lines, bad };
  const left = gpus.filter(({ status }) => status !== "up").length;
  const mute = gpus.filter((gpu) => gpu.status === "up" && gpu.condition === "unknown").length;
  const unknown = [left ? `${several(left, "GPU")} not polled` : null, mute ? `${several(mute, "GPU")} without readings` : null].filter(Boolean);
  const well = unknown.length ? "No known problem" : "All OK";
  return { condition, text: condition === "ok" ? well : "Unknown", note: unknown.join(", ") || null, lines, bad };
}

// `old` says why the data is old.
export function banner(state, seen, old) {
  const lines = seen ? bounded(seen.lines, MAX_LINES, "with problems", "ul", { class: "wrong" }) : null;
  if (old) {
    return h("section", { id: "banner", class: "banner unknown", "aria-labelledby": "sentence", "data-key": "banner" },
      h("h2", { id: "sentence" }, mark("unknown"), " ", old.text), old.note ? h("p", {}, old.note) : null,
      state ? h("div", { class: "was" }, h("p", {}, `At ${clock(state.polled_timestamp_seconds)}: ${sentence(seen)}`), lines) : null);
  }
  return h("section", { id: "banner", class: `banner ${seen.condition}`, "aria-labelledby": "sentence", "data-key": "banner" },
    h("h2", { id: "sentence" }, mark(seen.condition), " ", seen.sentence ?? seen.text), seen.also, seen.note ? h("p", {}, `${capital(seen.note)}.`) : null, fitness(state), lines);
}

// Sentence on the fitness of the node for jobs, unless it is fit, or something worse than its warning is wrong.
function fitness({ fitness: found, condition }) {
  const words = { warning: condition === "critical" ? "" : "Fit for jobs, with a warning", unfit: "Unfit for jobs" };
  return found && words[found.status] ? h("p", { "data-key": "fitness" }, `${words[found.status]}: ${found.text}.`) : null;
}

const sentence = ({ text, note }) => (note ? `${text}; ${note}.` : `${text}.`);

// Text for screen readers, without numbers that change with each poll.
export function announcement(seen, old) {
  if (old) return old.text;
  const names = seen.bad.map(({ name, level }) => `${short(name)} ${word(level)}`);
  return [seen.sentence ? counts(seen.bad) : seen.text, ...names.slice(0, MAX_LINES)].join("; ");
}

export function head(state, incidents) {
  const { host, daemon } = state;
  const [size, free] = [host.memory_size_bytes, host.memory_available_bytes];
  const counts = [["GPUs", state.gpus.length], ["Runs", state.runs.length], ["Processes", state.processes.length], ["Incidents", incidents.length], ["Events", state.events.length]];
  const facts = [
    h("time", { datetime: new Date(state.polled_timestamp_seconds * 1000).toISOString() }, `polled ${clock(state.polled_timestamp_seconds)}`),
    known(size) && known(free) ? `host memory ${part(size - free, size)}` : null,
    host.swap_used_bytes ? `swap ${amount(host.swap_used_bytes)}` : null,
  ].filter(Boolean);
  return [
    h("p", { class: "product" }, "gpuwarden"),
    h("h1", {}, h("bdi", {}, host.name)),
    h("p", {}, facts.map((each, place) => [place ? " · " : "", each])),
    daemon.source === "nvml" ? null : h("p", { class: "notice" }, mark("warning"), daemon.source === "simulated" ? " Demo data: simulated GPUs, not this machine's." : " Replayed data: GPUs of a capture, not this machine's."),
    h("nav", { "aria-label": "Sections" }, counts.filter(([name, count]) => count || name === "GPUs").map(([name, count]) =>
      h("span", {}, h("a", { href: `#${name.toLowerCase()}` }, name), ` ${count}`))),
  ];
}

export function foot(state) {
  const { version, driver_version: driver, cuda_version: cuda } = state.daemon;
  const versions = [`gpuwarden ${version}`, driver ? `driver ${driver}` : null, cuda ? `CUDA ${cuda}` : null, known(state.host.cpus) ? several(state.host.cpus, "CPU") : null];
  const link = (to, name) => h("a", { href: to }, name);
  return [
    h("p", {}, "Training runs report to ", h("code", {}, state.daemon.runs_socket), ": set ", h("code", {}, "GPUWARDEN_SOCKET"), " to this path for them."),
    h("p", {}, link("metrics", "metrics"), " for Prometheus · JSON: ", link("api/v1/state", "state"), ", ", link("api/v1/runs", "runs"), " · ",
      link("-/healthy", "healthy"), " · ", link("-/ready", "ready"), ` · ${versions.filter(Boolean).join(" · ")}`),
  ];
}

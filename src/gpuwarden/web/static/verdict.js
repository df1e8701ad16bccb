// Banner: the condition of the host, and its problems by GPU and run.

import { anchor as ofGpu } from "./gpus.js";
import { bounded, mark, word } from "./marks.js";
import { anchor as ofRun } from "./runs.js";
import { h } from "./tree.js";
import { amount, capital, clock, known, part, plain, several, short } from "./words.js";

const MOST = 6;

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

// Return the banner's sentence, and the lines below it.
export function judged(state) {
  const { daemon, gpus, condition } = state;
  const bad = subjects(state);
  const lines = bad.filter(({ to }) => to || !daemon.fault).map(({ key, name, to, level, texts }) =>
    h("li", { class: level, "data-key": key }, mark(level), " ",
      to ? h("a", { href: `#${encodeURIComponent(to)}` }, h("bdi", {}, short(name))) : h("b", {}, name),
      h("span", { class: "unseen" }, `, ${word(level)}`), `: ${texts.join("; ")}`));
  const count = (wanted) => bad.filter(({ level }) => level === wanted).length;
  const more = state.troubles_dropped ? `and ${state.troubles_dropped} more problems` : null;
  const paused = daemon.paused_until_timestamp_seconds;
  if (daemon.fault) return { condition, text: `NVIDIA driver not responding: ${plain(daemon.fault)}`, note: daemon.fault_advice, lines, bad };
  if (known(paused)) {
    return { condition, text: `Paused until ${clock(paused)}`, note: "the driver is released and no GPU is polled; resume with gpuwarden resume", lines, bad };
  }
  const found = [["critical", count("critical")], ["warning", count("warning")]].filter(([, number]) => number);
  if (found.length) return { condition, text: found.map(([level, number]) => (level === "warning" ? several(number, "warning") : `${number} critical`)).join(", "), note: more, lines, bad };
  if (!gpus.length) return { condition, text: "No GPU found", lines, bad };
  const up = gpus.filter(({ status }) => status === "up").length;
  const left = gpus.length - up;
  const going = state.runs.filter((run) => run.up).length;
  const counts = [up ? `${several(up, "GPU")} up` : null, left ? `${left} not polled` : null, `${several(going, "training run")} running`];
  return { condition, text: condition === "ok" ? "All OK" : "Unknown", note: counts.filter(Boolean).join(", "), lines, bad };
}

// `old` says why the data is old.
export function verdict(state, seen, old) {
  const lines = seen ? bounded(seen.lines, MOST, "with problems", "ul", { class: "wrong" }) : null;
  if (old) {
    return h("section", { id: "verdict", class: "verdict unknown", "aria-labelledby": "sentence", "data-key": "verdict" },
      h("h2", { id: "sentence" }, mark("unknown"), " ", old.text), old.note ? h("p", {}, old.note) : null,
      state ? h("div", { class: "was" }, h("p", {}, `At ${clock(state.polled_timestamp_seconds)}: ${sentence(seen)}`), lines) : null);
  }
  return h("section", { id: "verdict", class: `verdict ${seen.condition}`, "aria-labelledby": "sentence", "data-key": "verdict" },
    h("h2", { id: "sentence" }, mark(seen.condition), " ", seen.text), seen.note ? h("p", {}, `${capital(seen.note)}.`) : null, lines);
}

const sentence = ({ text, note }) => (note ? `${text}; ${note}.` : `${text}.`);

// Text for screen readers, without numbers that change with each poll.
export function announced(seen, old) {
  if (old) return old.text;
  const names = seen.bad.map(({ name, level }) => `${short(name)} ${word(level)}`);
  return [seen.text, ...names.slice(0, MOST)].join("; ");
}

export function head(state) {
  const { host, daemon } = state;
  const [size, free] = [host.memory_size_bytes, host.memory_available_bytes];
  const facts = [
    h("time", { datetime: new Date(state.polled_timestamp_seconds * 1000).toISOString() }, `polled at ${clock(state.polled_timestamp_seconds)}`),
    known(size) && known(free) ? `host memory ${part(size - free, size)}` : null,
    host.swap_used_bytes ? `swap ${amount(host.swap_used_bytes)}` : null,
    known(host.cpus) ? several(host.cpus, "CPU") : null,
    daemon.driver_version ? `driver ${daemon.driver_version}` : null,
    daemon.cuda_version ? `CUDA ${daemon.cuda_version}` : null,
  ].filter(Boolean);
  return [
    h("h1", {}, h("bdi", {}, host.name)),
    h("p", {}, facts.map((each, place) => [place ? " · " : "", each])),
    daemon.source === "nvml" ? null : h("p", { class: "notice" }, mark("warning"), daemon.source === "simulated" ? " Demo data: simulated GPUs, not this machine's." : " Replayed data: GPUs of a capture, not this machine's."),
  ];
}

export function foot(state) {
  const link = (to, name) => h("a", { href: to }, name);
  return [
    h("p", {}, "Training runs report to ", h("code", {}, state.daemon.runs_socket), ": set ", h("code", {}, "GPUWARDEN_SOCKET"), " to this path for them."),
    h("p", {}, link("metrics", "metrics"), " for Prometheus · JSON: ", link("api/v1/state", "state"), ", ", link("api/v1/runs", "runs"), " · ",
      link("-/healthy", "healthy"), " · ", link("-/ready", "ready"), ` · gpuwarden ${state.daemon.version}`),
  ];
}

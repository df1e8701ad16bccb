// Header of a run's page, and the sentence that matters most: the forecast, the diagnosis, or how it ended.

import { mark, RANK, troubles } from "./marks.js";
import { copyable } from "./run_copy.js";
import { gpusOf } from "./run_figures.js";
import { OUTCOME_SEVERITY } from "./tables.js";
import { h, prose } from "./tree.js";
import { capital, clock, known, lasting, plain, rate, short } from "./words.js";

const LEVELS = { ...OUTCOME_SEVERITY, running: "ok", finished: "ok", unknown: "unknown" }; // of states
const ENDINGS = {
  finished: "Finished", failed: "Failed", out_of_memory: "Out of memory", killed: "Killed", crashed: "Crashed", unknown: "Ended, outcome unknown",
};
const FORECAST = /^out of memory/i; // the daemon's text of the same
const CENSUS = "gpuwarden run --census -- python train.py";

// State in words and its severity; `run` is its entry in the daemon's state while it is up.
export function outcome(view) {
  const { record, run } = view;
  const state = record.state ?? record.outcome ?? "running";
  const ended = state === "finished" && record.headline ? "warning" : LEVELS[state] ?? "warning";
  return { text: plain(state), level: run ? problems(view)[0]?.level ?? run.condition : ended };
}

// Problems of a running run and of its GPUs, the worst first. The run has those of a GPU that does not respond, and of memory, itself.
function problems({ run, state }) {
  if (!run) return [];
  const own = run.troubles ?? [];
  const said = new Set(own.map(({ text }) => text));
  const ofGpus = gpusOf(run, state).filter(({ status }) => status === "up").flatMap(({ index, troubles: found = [] }) =>
    found.filter(({ text }) => !said.has(text)).map((each) => ({ ...each, text: `GPU ${index}: ${each.text}`, name: `GPU ${index}` })));
  return [...own, ...ofGpus].sort((one, other) => RANK[one.level] - RANK[other.level]);
}

export function head(view) {
  const { record, state, at } = view;
  const gpus = record.devices?.map(({ uuid }) => at.get(uuid)).filter(known).toSorted() ?? [];
  const began = record.began_timestamp_seconds;
  const time = (seconds) => h("time", { datetime: new Date(seconds * 1000).toISOString() }, clock(seconds));
  const facts = [
    h("bdi", {}, record.user ?? `uid ${record.uid}`),
    gpus.length ? `GPU ${gpus.join(", ")}` : record.no_gpu ? "no GPU" : null,
    h("bdi", {}, state.host.name),
    record.outcome
      ? [time(began), known(record.ended_timestamp_seconds) ? [" to ", time(record.ended_timestamp_seconds)] : null, ` (${lasting(record.duration_seconds)})`]
      : ["since ", time(began), ` (${lasting(record.duration_seconds)})`],
    record.job ? h("bdi", {}, `job ${short(record.job)}`) : null,
    known(record.rank) ? `rank ${record.rank}${known(record.world_size) ? ` of ${record.world_size}` : ""}` : null,
  ].filter(Boolean);
  const { text, level } = outcome(view);
  const shown = text === "running" && level !== "ok" ? "" : level; // the sentence below has the problem
  return [
    h("p", { class: "way" }, h("a", { href: "../" }, "gpuwarden"), " / ", h("a", { href: "../" }, h("bdi", {}, state.host.name)), " / run"),
    h("h1", {}, h("bdi", {}, short(record.name))),
    h("p", { class: `state ${shown}` }, shown ? [mark(shown), " "] : null, text),
    h("p", { class: "facts-line" }, facts.map((each, place) => [place ? " · " : "", each])),
    state.daemon.source === "nvml" ? null : h("p", { class: "notice" }, mark("warning"), state.daemon.source === "simulated" ? " Demo data: simulated GPUs, not this machine's." : " Replayed data: GPUs of a capture, not this machine's."),
  ];
}

// The device that runs out of memory first, by the forecast.
export function nextOom({ record }) {
  return (record.devices ?? []).filter(({ seconds_to_oom: seconds }) => known(seconds)).sort((one, other) => one.seconds_to_oom - other.seconds_to_oom)[0];
}

// Return the sentence, its severity, and what follows. `said` is for screen readers, without numbers that change with each poll.
export function headline(view) {
  const { record } = view;
  const { text, level } = outcome(view);
  if (record.outcome) return ended(record, level);
  const device = nextOom(view);
  if (device) return forecast(view, device, level);
  const [worst] = problems(view);
  const sentence = worst ? capital(worst.text) : `${capital(text)}, no problem found`;
  const lost = worst && gpusOf(view.run, view.state).find(({ fault_advice: found }) => found);
  const link = worst?.alert ? h("p", {}, h("a", { href: `../alerts/${worst.alert}` }, "What to do")) : null;
  const said = worst ? `${worst.level}: ${worst.name ?? `run ${short(record.name)}`}` : sentence;
  return { text: sentence, said, level, body: [lost ? nextStep(`${capital(lost.fault_advice)}.`) : null, link, advice(record)] };
}

function forecast({ record, at, now }, device, level) {
  const { seconds_to_oom: seconds, seconds_to_oom_lower: lower, seconds_to_oom_upper: upper } = device;
  const text = seconds ? `Out of memory at about ${clock(now + seconds)}` : "Out of memory at any moment";
  const where = at.has(device.uuid) ? `GPU ${at.get(device.uuid)}` : "the GPU";
  const bounds = known(lower) ? `, between ${clock(now + lower)} and ${known(upper) ? clock(now + upper) : "much later"}` : "";
  const left = seconds ? `in about ${lasting(seconds)}${bounds}` : "now";
  return {
    text, said: "Out of memory is forecast", covers: FORECAST, level: level === "ok" ? "warning" : level,
    body: [
      h("p", {}, `Memory on ${where} grows by ${rate(device.memory_growth_bytes_per_second)}. At this rate none is left ${left}.`),
      h("p", { class: "step" }, h("b", {}, "Next step: "), record.census ? "the table of tensors below names what keeps the memory." : "find what the program keeps from step to step. The next start can name it:"),
      record.census ? null : copyable(CENSUS),
    ],
  };
}

function ended(record, level) {
  const { text: cause, holder, evidence, next_step: step, code } = record.headline ?? {};
  const text = cause ?? `${ENDINGS[record.outcome] ?? capital(plain(record.outcome))} after ${lasting(record.duration_seconds)}`;
  const about = record.evidence && record.evidence !== evidence ? h("p", { class: "about" }, h("bdi", {}, capital(record.evidence)), ".") : null;
  const reasons = [holder, evidence].filter(Boolean).map((each) => h("p", { class: "evidence" }, prose(each)));
  return { text, said: text, level, body: [reasons, step ? nextStep(step) : null, code ? copyable(code) : null, about, code ? null : advice(record)] };
}

const nextStep = (text) => h("p", { class: "step" }, h("b", {}, "Next step: "), prose(text));

function advice(record) {
  return record.batch_size_advice ? h("p", {}, record.batch_size_advice.text) : null;
}

export function summary(view, { text, level, body, covers }) {
  const found = view.run?.findings ?? []; // a trouble can be the same as the sentence or a finding
  const said = (trouble) => trouble === text || covers?.test(trouble) || found.some((finding) => finding.text.startsWith(trouble));
  const others = problems(view).filter((each) => !said(capital(each.text)));
  const findings = found.map((each) => h("p", {}, prose(each.text), " ", h("b", {}, prose(each.next_step))));
  return h("section", { id: "banner", class: `banner ${level}`, "aria-labelledby": "sentence", "data-key": "banner" },
    h("h2", { id: "sentence" }, mark(level), " ", text), body, troubles(others, "../"), findings);
}

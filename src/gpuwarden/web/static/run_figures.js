// Figures of a run: time, input, GPU and energy over its whole life, and charts of the last ten minutes.

import { fact } from "./marks.js";
import { h } from "./tree.js";
import { amount, clockReason, energy, known, lasting, pace, percent, several, step } from "./words.js";

const SHORT_SECONDS = 1; // of throttling, which is not shown

export const count = (number) => number.toLocaleString("en-US");

export function figures(view) {
  const { record, run } = view;
  return h("section", { "data-key": "figures", "aria-labelledby": "figures" },
    h("h2", { id: "figures" }, "Training"),
    h("dl", { class: "facts tiles" },
      stepTime(record, run), progress(record), inputWait(record), throttled(view), gpuActivity(record), energyUse(view), host(record)));
}

function stepTime(record, run) {
  const { step_median_seconds: median, step_p95_seconds: p95, compile_seconds: compiled } = record;
  if (!known(median)) return null;
  const note = [known(p95) ? `p95 ${step(p95)}` : null, known(run?.steps_per_second) ? `${pace(run.steps_per_second)} steps per second` : null, compiled ? `compile time ${lasting(compiled)}` : null];
  return fact("Step time, median", step(median), { note: joined(note) });
}

function progress(record) {
  if (!known(record.steps)) return null;
  const { epoch, batch_size: batch, examples, loss, stalls } = record;
  const note = [
    known(epoch) ? `epoch ${epoch}` : null, known(batch) ? `batch size ${count(batch)}` : null, known(examples) ? `${count(examples)} examples` : null,
    known(loss) ? `loss ${Number(loss.toPrecision(4))}` : null, stalls ? several(stalls, "stall") : null,
  ];
  return fact("Steps", count(record.steps), { note: joined(note) });
}

function inputWait(record) {
  const { input_wait_ratio: ratio, input_wait_seconds: seconds } = record;
  return known(ratio) ? fact("Input wait", percent(ratio), { ratio, note: `of step time: ${lasting(seconds)}` }) : null;
}

// Age of what is counted by the driver, while the run is running: its counters are read less often than the rest.
const counted = ({ record, state }) => (record.outcome ? null : `counted every ${lasting(state.daemon.slow_interval_seconds)}`);

function throttled(view) {
  const { record } = view;
  const reasons = Object.entries(record.throttled_seconds ?? {}).filter(([, seconds]) => seconds >= SHORT_SECONDS);
  if (!record.throttled_seconds) return null;
  const total = Math.max(0, ...reasons.map(([, seconds]) => seconds)); // several may apply at once
  const note = reasons.map(([reason, seconds]) => `${clockReason(reason)} ${lasting(seconds)}`);
  return fact("Throttled", lasting(total), { note: joined([...note, counted(view)]) ?? "not slowed down", ratio: record.outcome && record.gpu_seconds ? total / record.gpu_seconds : null });
}

function gpuActivity(record) {
  const { gpu_idle_ratio: idle, gpu_seconds: seconds } = record;
  return known(idle) ? fact("GPU activity", percent(1 - idle), { ratio: 1 - idle, note: known(seconds) ? `of ${lasting(seconds)} GPU time` : null }) : null;
}

function energyUse(view) {
  const { energy_joules: joules, gpu_seconds: seconds, outcome } = view.record;
  return known(joules) && (joules || outcome) ? fact("Energy", energy(joules), { note: outcome && seconds ? `${(joules / seconds).toFixed(0)} W on average a GPU` : counted(view) }) : null;
}

function host(record) {
  const { host_memory_peak_bytes: peak, cpu_seconds: cpu, read_bytes: read } = record;
  if (!known(peak)) return null;
  return fact("Host memory, peak", amount(peak), { note: joined([known(cpu) ? `CPU time ${lasting(cpu)}` : null, read ? `read ${amount(read)}` : null]) });
}

const joined = (parts) => parts.filter(Boolean).join(" · ") || null;

// GPUs that a run uses, also where it uses an instance of one.
export const gpusOf = (run, state) => state.gpus.filter((gpu) => (run.devices ?? []).some(({ uuid }) => uuid === gpu.uuid || (gpu.mig ?? []).some((each) => each.uuid === uuid)));

// Charts of the last ten minutes, while it is running.
export function activity({ run, state, at }, charts) {
  if (!run) return null;
  const gpus = gpusOf(run, state);
  const speed = charts.ofRun(run, null);
  if (!speed && !gpus.length) return null;
  return h("section", { "data-key": "activity", "aria-labelledby": "activity" },
    h("h2", { id: "activity" }, "Recent activity"),
    h("div", { class: "activity" }, speed ? h("div", { class: "speed" }, h("h3", {}, "Run"), speed) : null,
      gpus.map((gpu) => h("div", { "data-key": gpu.uuid }, h("h3", {}, `GPU ${at.get(gpu.uuid)}`), charts.ofGpu(gpu)))));
}

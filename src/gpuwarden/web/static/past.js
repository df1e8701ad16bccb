// The last hour: the daemon's history and all states since, at coarser steps before the last ten minutes.

const SECONDS = 3600;
const FINE_SECONDS = 600; // with all points
const COARSE_SECONDS = 30; // between older points, as in the daemon's history
const GAP_SECONDS = 15; // without a point: shown as a gap

export class Past {
  #points = []; // {at, values}, the oldest first

  // Load the daemon's history; points that it no longer has, for example after its restart, stay.
  load(history) {
    const times = history.timestamp_seconds;
    if (!times.length) return;
    const points = times.map((at) => ({ at, values: new Map() }));
    const put = (key, column) => column.forEach((value, place) => value !== null && points[place].values.set(key, value));
    for (const [uuid, columns] of Object.entries(history.gpus)) {
      for (const [name, column] of Object.entries(columns)) put(`${uuid} ${name}`, column);
    }
    for (const [id, { steps = [], devices = {} }] of Object.entries(history.runs)) {
      put(`run ${id} steps`, steps);
      for (const [uuid, columns] of Object.entries(devices)) {
        for (const [name, column] of Object.entries(columns)) put(`run ${id} ${uuid} ${name}`, column);
      }
    }
    const [first, last] = [times[0], times.at(-1)];
    this.#points = [...this.#points.filter(({ at }) => at < first), ...points, ...this.#points.filter(({ at }) => at > last)];
  }

  add(state) {
    const at = state.polled_timestamp_seconds;
    if (this.#points.length && at <= this.#points.at(-1).at) {
      if (at > this.#points.at(-1).at - FINE_SECONDS) return; // the same poll
      this.#points = []; // the clock was set back
    }
    const values = new Map();
    const put = (key, value) => value !== undefined && values.set(key, value);
    for (const gpu of state.gpus) {
      put(`${gpu.uuid} utilization_ratio`, gpu.utilization_ratio);
      put(`${gpu.uuid} temperature_celsius`, gpu.temperature_celsius?.core);
      for (const of of [gpu, ...(gpu.mig ?? [])]) {
        put(`${of.uuid} memory_used_bytes`, of.memory_used_bytes);
        put(`${of.uuid} memory_in_use_bytes`, of.memory_in_use_bytes);
      }
    }
    for (const run of state.runs.filter(({ up }) => up)) {
      put(`run ${run.run_id} steps`, run.steps);
      for (const device of run.devices ?? []) {
        put(`run ${run.run_id} ${device.uuid} memory_in_use_bytes`, device.memory_in_use_bytes);
        put(`run ${run.run_id} ${device.uuid} headroom_bytes`, device.headroom_bytes);
      }
    }
    this.#points.push({ at, values });
    let kept = -Infinity;
    this.#points = this.#points.filter((point) => {
      if (point.at <= at - SECONDS || (point.at <= at - FINE_SECONDS && point.at - kept < COARSE_SECONDS * 0.9)) return false;
      kept = point.at;
      return true;
    });
  }

  // Return the times, and a function that returns a column by its key, with null for unknown values.
  read(pollSeconds) {
    const gap = Math.max(3 * pollSeconds, GAP_SECONDS);
    const rows = [];
    for (const point of this.#points) {
      const before = rows.at(-1)?.at ?? point.at;
      const longest = before > this.#points.at(-1).at - FINE_SECONDS ? gap : Math.max(gap, 2 * COARSE_SECONDS);
      if (point.at - before > longest) rows.push({ at: before + gap / 2, values: new Map() });
      rows.push(point);
    }
    return { times: rows.map(({ at }) => at), column: (key) => rows.map(({ values }) => values.get(key) ?? null) };
  }
}

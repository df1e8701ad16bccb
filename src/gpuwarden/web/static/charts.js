// Charts of the last ten minutes or the last hour, drawn by uPlot once they are visible. A row of charts has the choice between the two.
//
// The mouse and the arrow keys show the values of a moment in place of the current one. Charts of an incident have all of its recording.

import { usage } from "./memory.js";
import { h } from "./tree.js";
import { amount, clock, degrees, hertz, known, pace, percent, watts } from "./words.js";

const SPANS = { 600: "ten minutes", 3600: "hour" }; // names by seconds
const MIN_SECONDS = 60; // of a time axis
const HEIGHT = 132; // pixels, with the axes
const HALF_TIME = 24; // pixels, of a label of the time axis
const PACE_SECONDS = 60; // over which steps per second are averaged, as the daemon does
const { uPlot } = window;

export class Charts {
  #span = 600;
  #wanted = new Map(); // data to draw, by key
  #drawn = new Map(); // {element, plot} by key
  #past = { times: [], column: () => [] };
  #seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    target.inView = isIntersecting;
    if (isIntersecting) this.#draw(target);
  }), { rootMargin: "200px" });
  #sized = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const drawn = this.#drawn.get(target.dataset.keep);
    if (drawn?.element === target && target.clientWidth) drawn.plot.setSize({ width: target.clientWidth, height: HEIGHT });
  }));

  // `redraw` draws the page again, after another span was chosen.
  constructor(redraw = () => this.draw()) {
    const paper = matchMedia("print");
    for (const query of [matchMedia("(prefers-color-scheme: dark)"), paper]) {
      query.addEventListener("change", () => {
        for (const key of [...this.#drawn.keys()]) this.#forget(key);
        this.draw(paper.matches);
      });
    }
    document.addEventListener("click", ({ target }) => {
      const seconds = Number(target.dataset?.span);
      if (!seconds) return;
      this.#span = seconds;
      redraw();
    });
    document.addEventListener("keydown", (event) => this.#press(event));
    document.addEventListener("focusout", ({ target }) => this.#drawn.get(target.dataset?.keep)?.plot.setCursor({ left: -10, top: -10 }));
  }

  // Start a new page. `past.cause` is the time of an incident's first cause, which is marked.
  start(past) {
    this.#past = past;
    this.#wanted.clear();
  }

  // Update the charts of the page, whose elements exist now: the visible ones, or all.
  draw(all = false) {
    for (const key of [...this.#drawn.keys()]) if (!this.#wanted.has(key)) this.#forget(key);
    for (const element of document.querySelectorAll(".chart[data-keep]")) {
      if (element.inView === undefined) {
        element.inView = false;
        this.#seen.observe(element);
        this.#sized.observe(element);
      }
      if (all || element.inView) this.#draw(element);
    }
  }

  get #seconds() {
    return known(this.#past.cause) ? Infinity : this.#span;
  }

  ofIncident(gpu) {
    const more = [["power_watts", "Power", watts], ["sm_clock_hertz", "SM clock", hertz]].map(([name, title, write]) => {
      const values = this.#past.column(`${gpu.uuid} ${name}`);
      return values.some(known) && this.#chart(`${gpu.uuid} ${name}`, title, write, [0, highest(values) * 1.1], [{ look: "line", values }]);
    });
    return this.ofGpu(gpu, more);
  }

  ofGpu(gpu, more = []) {
    const { column } = this.#past;
    const limit = gpu.temperature_threshold_celsius?.slowdown;
    const [listed, inUse, busy, heat] = ["memory_used_bytes", "memory_in_use_bytes", "utilization_ratio", "temperature_celsius"].map((name) => column(`${gpu.uuid} ${name}`));
    const used = listed.map((value, place) => (value === null ? null : Math.max(value, inUse[place] ?? 0))); // as in the bar
    const some = (values) => values.some(known);
    return this.#row([
      some(used) && this.#chart(`${gpu.uuid} memory`, "Memory used", amount, [0, usage(gpu)?.size ?? highest(used) * 1.1],
        [{ look: "use", name: "in use by runs", values: inUse }, { look: "line", name: "used", values: used }]),
      some(busy) && this.#chart(`${gpu.uuid} utilization`, "Utilization", percent, [0, 1], [{ look: "area", values: busy }]),
      some(heat) && this.#chart(`${gpu.uuid} temperature`, "Temperature", degrees, [20, Math.max(limit ?? 90, highest(heat)) + 3],
        [{ look: "limit", name: "throttle point", values: known(limit) ? this.#past.times.map(() => limit) : [] }, { look: "line", values: heat }]),
      ...more,
    ]);
  }

  // `name` says whose memory the device's is.
  ofRun(run, device, name = "") {
    const { column } = this.#past;
    const key = `run ${run.run_id}`;
    const inUse = device ? column(`${key} ${device.uuid} memory_in_use_bytes`) : [];
    const left = device ? column(`${key} ${device.uuid} headroom_bytes`) : [];
    const limit = inUse.map((used, place) => (used === null || left[place] === null ? null : used + left[place]));
    const speed = this.#pace(column(`${key} steps`));
    if (speed.length && known(run.steps_per_second)) speed[speed.length - 1] = run.steps_per_second; // as elsewhere on the page
    return this.#row([
      inUse.some(known) && this.#chart(`${key} memory`, `Memory in use${name}`, amount, [0, highest(limit, inUse)],
        [{ look: "limit", name: "limit", values: limit }, { look: "use", values: inUse }]),
      speed.some(known) && this.#chart(`${key} pace`, "Steps per second", pace, [0, highest(speed) * 1.1], [{ look: "line", values: speed }]),
    ]);
  }

  #row(charts) {
    const found = charts.filter(Boolean);
    if (!found.length) return null;
    if (this.#seconds === Infinity) return h("div", { class: "charts" }, found);
    const buttons = Object.entries(SPANS).map(([seconds, name]) =>
      h("button", { type: "button", "data-span": seconds, "aria-pressed": String(Number(seconds) === this.#span) }, `Last ${name}`));
    return h("div", { class: "past" }, h("p", { class: "spans" }, buttons), h("div", { class: "charts" }, found));
  }

  // The last of the series is the one that is named and described in text; the others have a name.
  #chart(key, name, write, range, series) {
    this.#wanted.set(key, { write, range, series });
    const { times } = this.#past;
    const shown = series.at(-1).values.filter((value, place) => known(value) && times[place] > times.at(-1) - this.#seconds);
    const now = series.at(-1).values.at(-1);
    const [over, end] = this.#seconds === Infinity ? ["the recording", "at its end"] : [`the last ${SPANS[this.#span]}`, "now"];
    const label = shown.length
      ? `${name} over ${over}: ${write(Math.min(...shown))} to ${write(Math.max(...shown))}, ${end} ${known(now) ? write(now) : "unknown"}`
      : `${name}: not known yet`;
    const others = series.slice(0, -1).filter(({ values }) => values.some(known));
    return h("figure", { "data-key": key },
      h("figcaption", { "aria-hidden": "true" },
        h("span", {}, name, others.map((each) => [", ", h("span", { class: `key ${each.look}` }), ` ${each.name}`])),
        this.#seconds === Infinity ? null : h("span", { class: "now" }, known(now) ? write(now) : "-")),
      h("div", { class: "chart", role: "img", tabindex: "0", "aria-label": label, "data-keep": key }),
      h("output", { class: "at", "data-keep": `${key} at` }));
  }

  #draw(element) {
    const key = element.dataset.keep;
    const wanted = this.#wanted.get(key);
    if (!wanted || !element.clientWidth) return;
    const data = [this.#past.times, ...wanted.series.map(({ values }) => (values.length ? values : this.#past.times.map(() => null)))];
    let drawn = this.#drawn.get(key);
    if (drawn && drawn.element !== element) {
      this.#forget(key);
      drawn = undefined;
    }
    if (!drawn) {
      drawn = { element, plot: this.#made(element, wanted, data) };
      this.#drawn.set(key, drawn);
    }
    drawn.plot.setData(data);
  }

  #made(element, wanted, data) {
    const key = element.dataset.keep;
    const color = (name) => getComputedStyle(element).getPropertyValue(name).trim();
    const looks = {
      use: { stroke: color("--use"), fill: color("--use-fill"), width: 1.5 },
      area: { stroke: color("--use"), fill: color("--use-fill"), width: 1.5 },
      line: { stroke: color("--line"), width: 1.5 },
      limit: { stroke: color("--muted"), width: 1, dash: [4, 3] },
    };
    const axis = { stroke: color("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: color("--edge"), width: 1 }, ticks: { show: false } };
    const range = () => (this.#wanted.get(key) ?? wanted).range;
    const options = {
      width: element.clientWidth,
      height: HEIGHT,
      padding: [6, HALF_TIME, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false, setScale: false } },
      select: { show: false },
      axes: [
        { ...axis, size: 20, gap: 4, space: 70, values: (plot, times) => times.map((at) => clock(at).slice(-8, plot.scales.x.max - plot.scales.x.min < 300 ? undefined : -3)) },
        { ...axis, size: 62, gap: 4, splits: () => [range()[0], (range()[0] + range()[1]) / 2, range()[1]], values: (_plot, values) => values.map((value) => wanted.write(value)) },
      ],
      scales: { x: { range: () => this.#shown(key) }, y: { range } },
      series: [{}, ...wanted.series.map(({ look }) => ({ ...looks[look], points: { show: false }, spanGaps: false }))],
      hooks: { setCursor: [(plot) => this.#point(plot, key, element.nextElementSibling)], draw: [(plot) => this.#markCause(plot, color("--critical"))] },
    };
    return new uPlot(options, data, element);
  }

  // Return the times of the axis: the span, or less if less is known.
  #shown(key) {
    const { times } = this.#past;
    const end = times.at(-1) ?? 1;
    const series = this.#wanted.get(key)?.series.at(-1).values ?? [];
    const first = times[series.findIndex(known)] ?? end;
    return [Math.max(end - this.#seconds, Math.min(first, end - MIN_SECONDS)), end];
  }

  #markCause({ ctx, bbox: { left, top, width, height }, valToPos }, color) {
    const x = known(this.#past.cause) ? valToPos(this.#past.cause, "x", true) : -1;
    if (x < left || x > left + width) return;
    ctx.save();
    Object.assign(ctx, { strokeStyle: color, lineWidth: 2 * devicePixelRatio });
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.restore();
  }

  // Show time and values under the cursor.
  #point(plot, key, at) {
    const place = plot.cursor.idx;
    const { write, series } = this.#wanted.get(key) ?? { series: [] };
    const values = series.map(({ name = "", values: { [place]: value } }) => (known(value) ? `${name} ${write(value)}` : null)).filter(Boolean);
    const text = known(place) && plot.cursor.left >= 0 && values.length ? `${clock(plot.data[0][place])}  ${values.reverse().join(", ")}` : "";
    if (at.textContent !== text) at.textContent = text;
  }

  // Move the cursor of the focused chart by a point.
  #press(event) {
    const drawn = this.#drawn.get(document.activeElement?.dataset?.keep);
    if (!drawn || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const { plot } = drawn;
    const [times, [first, last]] = [plot.data[0], this.#shown(document.activeElement.dataset.keep)];
    const low = times.findIndex((at) => at >= first);
    const from = plot.cursor.left >= 0 ? plot.cursor.idx : times.length;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: low, End: times.length - 1 }[event.key];
    const left = event.key === "Escape" ? -10 : plot.valToPos(times[Math.min(Math.max(to, low), times.length - 1)] ?? last, "x");
    plot.setCursor({ left, top: left < 0 ? -10 : 0 });
  }

  #forget(key) {
    const { element, plot } = this.#drawn.get(key);
    plot.destroy();
    element.replaceChildren();
    this.#drawn.delete(key);
  }

  #pace(steps) {
    const { times } = this.#past;
    let first = 0;
    return steps.map((now, place) => {
      while (first < place && (times[place] - times[first] > PACE_SECONDS || steps[first] === null)) first += 1;
      const from = first === place && place && steps[place - 1] !== null ? place - 1 : first; // points of the hour are further apart
      const before = steps[from];
      return now !== null && before !== null && now >= before && times[place] > times[from] ? (now - before) / (times[place] - times[from]) : null;
    });
  }
}

function highest(...columns) {
  return Math.max(...columns.flat().filter(known), 0) || 1;
}

// Small charts of the last ten minutes, drawn by uPlot once they are visible.

import { h } from "./tree.js";
import { amount, clock, degrees, known, pace, percent } from "./words.js";

const SECONDS = 600;
const HEIGHT = 56; // pixels
const PACE_POINTS = 6; // over which steps per second are averaged, as single polls come between steps
const { uPlot } = window;

export class Charts {
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

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const key of [...this.#drawn.keys()]) this.#forget(key);
      this.draw();
    });
  }

  // Start a new page.
  start(past) {
    this.#past = past;
    this.#wanted.clear();
  }

  // Update the charts of the page, whose elements exist now.
  draw() {
    for (const key of [...this.#drawn.keys()]) if (!this.#wanted.has(key)) this.#forget(key);
    for (const element of document.querySelectorAll("[data-keep]")) {
      if (element.inView === undefined) {
        element.inView = false;
        this.#seen.observe(element);
        this.#sized.observe(element);
      } else if (element.inView) {
        this.#draw(element);
      }
    }
  }

  ofGpu(gpu) {
    const { column } = this.#past;
    const limit = gpu.temperature_threshold_celsius?.slowdown;
    const [used, inUse, busy, heat] = ["memory_used_bytes", "memory_in_use_bytes", "utilization_ratio", "temperature_celsius"].map((name) => column(`${gpu.uuid} ${name}`));
    const some = (values) => values.some(known);
    return this.#row([
      some(used) && this.#chart(`${gpu.uuid} memory`, "Memory", amount, [0, gpu.memory_size_bytes ?? highest(used)], [{ look: "use", values: inUse }, { look: "line", values: used }]),
      some(busy) && this.#chart(`${gpu.uuid} utilization`, "Utilization", percent, [0, 1], [{ look: "area", values: busy }]),
      some(heat) && this.#chart(`${gpu.uuid} temperature`, "Temperature", degrees, [20, Math.max(limit ?? 90, highest(heat)) + 3], [
        { look: "limit", values: known(limit) ? this.#past.times.map(() => limit) : [] }, { look: "line", values: heat },
      ]),
    ]);
  }

  ofRun(run, device) {
    const { column } = this.#past;
    const key = `run ${run.run_id}`;
    const inUse = device ? column(`${key} ${device.uuid} memory_in_use_bytes`) : [];
    const left = device ? column(`${key} ${device.uuid} headroom_bytes`) : [];
    const limit = inUse.map((used, place) => (used === null || left[place] === null ? null : used + left[place]));
    const speed = this.#pace(column(`${key} steps`));
    return this.#row([
      inUse.some(known) && this.#chart(`${key} memory`, "Memory in use", amount, [0, highest(limit, inUse)], [{ look: "limit", values: limit }, { look: "use", values: inUse }]),
      speed.some(known) && this.#chart(`${key} pace`, "Steps per second", pace, [0, highest(speed) * 1.1], [{ look: "line", values: speed }]),
    ]);
  }

  #row(charts) {
    const found = charts.filter(Boolean);
    return found.length ? h("div", { class: "charts" }, found) : null;
  }

  // The last of the series is described in text.
  #chart(key, name, write, range, series) {
    this.#wanted.set(key, { write, range, series });
    const shown = series.at(-1).values.filter(known);
    const now = series.at(-1).values.at(-1);
    const label = shown.length
      ? `${name} over the last ten minutes: ${write(Math.min(...shown))} to ${write(Math.max(...shown))}, now ${known(now) ? write(now) : "unknown"}`
      : `${name}: not known yet`;
    return h("figure", { "data-key": key },
      h("figcaption", { "aria-hidden": "true" }, h("span", {}, name), h("span", { class: "now" }, known(now) ? write(now) : "-")),
      h("div", { class: "chart", role: "img", "aria-label": label, "data-keep": key }));
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
    drawn.wanted = wanted;
    drawn.range = wanted.range;
    drawn.plot.setData(data);
  }

  #made(element, wanted, data) {
    const key = element.dataset.keep;
    const color = (name) => getComputedStyle(element).getPropertyValue(name).trim();
    const looks = {
      use: { stroke: color("--use"), fill: color("--use-fill"), width: 1.5 },
      area: { stroke: color("--use"), fill: color("--use-fill"), width: 1.5 },
      line: { stroke: color("--line"), width: 1.5 },
      limit: { stroke: color("--limit"), width: 1, dash: [4, 3] },
    };
    const at = h("span", { class: "at" });
    const options = {
      width: element.clientWidth,
      height: HEIGHT,
      padding: [2, 0, 2, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false, setScale: false } },
      select: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: {
        x: { range: () => [(this.#past.times.at(-1) ?? 0) - SECONDS, this.#past.times.at(-1) ?? 1] },
        y: { range: () => this.#wanted.get(key)?.range ?? wanted.range },
      },
      series: [{}, ...wanted.series.map(({ look }) => ({ ...looks[look], points: { show: false }, spanGaps: false }))],
      hooks: { setCursor: [(plot) => this.#point(plot, key, at)] },
    };
    const plot = new uPlot(options, data, element);
    element.append(at);
    return plot;
  }

  // Show time and value under the mouse.
  #point(plot, key, at) {
    const place = plot.cursor.idx;
    const value = known(place) ? plot.data.at(-1)[place] : null;
    const text = value !== null && known(value) ? `${clock(plot.data[0][place])} ${this.#wanted.get(key)?.write(value) ?? ""}` : "";
    if (at.textContent !== text) at.textContent = text;
  }

  #forget(key) {
    const { element, plot } = this.#drawn.get(key);
    plot.destroy();
    element.replaceChildren();
    this.#drawn.delete(key);
  }

  #pace(steps) {
    const { times } = this.#past;
    return steps.map((now, place) => {
      const first = Math.max(place - PACE_POINTS, 0);
      if (now === null || steps.slice(first, place).includes(null) || first === place) return null;
      const before = steps[first];
      return now >= before && times[place] > times[first] ? (now - before) / (times[place] - times[first]) : null;
    });
  }
}

function highest(...columns) {
  return Math.max(...columns.flat().filter(known), 0) || 1;
}

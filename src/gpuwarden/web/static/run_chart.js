// Chart of a run's memory on one GPU: in use, peak and limit over its whole life or the last ten minutes, numbered events,
// and the forecast of an out-of-memory with its bounds. Arrow keys move the cursor.

import { bounded, mark } from "./marks.js";
import { nextOom } from "./run_summary.js";
import { OUTCOME_SEVERITY } from "./tables.js";
import { h } from "./tree.js";
import { amount, capital, clock, errorWords, known, short } from "./words.js";

const HEIGHTS = { wide: 320, narrow: 240 }; // pixels
const NARROW = 600; // pixels
const RANGES = [[0, "whole run"], [3600, "last hour"], [600, "last ten minutes"]]; // by seconds
const GAP_SECONDS = 2; // between two windows of the record: no daemon was running
const MAX_EVENTS = 9; // listed at once; the chart has all
const BADGE = 16; // pixels
const ROWS = 2; // of badges that would lie on each other
const Y_INCREMENTS = Array.from({ length: 28 }, (_, power) => 2 ** (power + 18));
const { uPlot } = window;

export class MemoryChart {
  #view = null;
  #data = null; // what the plot shows
  #plot = null;
  #element = null;
  #chosen = { uuid: null, range: "0" };
  #index = null; // of the cursor
  #sized = new ResizeObserver(() => this.#element?.clientWidth && this.#plot?.setSize(size(this.#element)));

  // `onChoice` redraws the page.
  constructor(onChoice) {
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(query).addEventListener("change", () => {
        this.#forget();
        this.draw();
      });
    }
    document.addEventListener("click", ({ target }) => {
      const button = target.closest?.("button[data-choice]");
      if (!button) return;
      this.#chosen[button.dataset.choice] = button.dataset.value;
      this.#index = null;
      onChoice();
    });
  }

  section(view) {
    this.#view = view;
    const devices = (view.record.devices ?? []).filter(({ timeline }) => timeline);
    const device = devices.find(({ uuid }) => uuid === this.#chosen.uuid) ?? nextOom(view) ?? devices.toSorted((one, other) => room(one) - room(other))[0];
    if (!device?.timeline) return null;
    const ranges = RANGES.filter(([seconds]) => view.record.duration_seconds > seconds);
    const range = view.run && ranges.some(([seconds]) => String(seconds) === this.#chosen.range) ? this.#chosen.range : "0";
    this.#data = range === "0" ? wholeRun(view, device) : lastSeconds(view, device, Number(range));
    const name = gpuName(view, device.uuid);
    const events = this.#data.events;
    return h("section", { class: "memory-section", "data-key": "memory", "aria-labelledby": "memory" },
      h("div", { class: "title-row" },
        h("h2", { id: "memory" }, `Memory on ${name}`),
        devices.length > 1 ? choices("uuid", "GPU", devices.map(({ uuid }) => [uuid, gpuName(view, uuid)]), device.uuid) : null,
        view.run && ranges.length > 1 ? choices("range", "Time", ranges.map(([seconds, text]) => [String(seconds), text]), range) : null),
      legend(this.#data),
      h("div", {
        class: "memory-chart", "data-keep": "memory chart", role: "slider", tabindex: "0", "aria-label": `Memory on ${name} over time`,
        "aria-valuemin": "0", "aria-valuemax": String(this.#data.times.length - 1), "aria-valuenow": String(this.#index ?? this.#data.times.length - 1), "aria-valuetext": this.#reading(),
      }),
      h("p", { class: "readout", "data-keep": "readout", "aria-hidden": "true" }),
      this.#data.forecast ? h("p", { class: "unseen" }, forecastText(this.#data.forecast)) : null,
      events.length ? bounded(events.map((each, place) => line(each, place)), MAX_EVENTS, "events", "ol", { class: "lines timeline" }) : null,
      values(this.#data));
  }

  draw() {
    const element = document.querySelector(".memory-chart");
    if (element !== this.#element) this.#forget();
    if (!element?.clientWidth || !this.#data) return;
    const { times, limit, peak, inUse } = this.#data;
    if (!this.#plot) this.#make(element);
    this.#plot.setData([times, limit, peak, inUse]);
    this.#read();
  }

  #make(element) {
    this.#element = element;
    const color = (name) => getComputedStyle(element).getPropertyValue(name).trim();
    const axis = { stroke: color("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: color("--edge"), width: 1 }, ticks: { stroke: color("--edge"), width: 1 } };
    const options = {
      ...size(element),
      padding: [ROWS * BADGE + 6, 30, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { show: false } },
      select: { show: false },
      axes: [
        { ...axis, space: 72, size: 34, values: (_, splits, __, ___, increment) => splits.map((at) => axisTime(at, increment)) },
        { ...axis, size: 68, incrs: Y_INCREMENTS, values: (_, splits) => splits.map((bytes) => (bytes ? amount(bytes).replace(/\.0+(?= )/, "") : "0")) },
      ],
      scales: { x: { range: () => this.#data.span }, y: { range: () => [0, this.#data.top] } },
      series: [
        {},
        { stroke: color("--limit"), width: 1.5, dash: [5, 4], points: { show: false } },
        { stroke: color("--line"), width: 1.25, points: { show: false } },
        { stroke: color("--use"), fill: color("--use-fill"), width: 2, points: { show: false } },
      ],
      hooks: {
        draw: [(plot) => drawOver(plot, this.#data, color)],
        setCursor: [(plot) => {
          this.#index = plot.cursor.left >= 0 ? plot.cursor.idx : null;
          this.#read();
        }],
      },
    };
    this.#plot = new uPlot(options, [[], [], [], []], element);
    this.#sized.observe(element);
    element.onkeydown = (event) => this.#press(event);
    element.onblur = () => this.#plot?.setCursor({ left: -10, top: -10 });
  }

  #forget() {
    this.#plot?.destroy();
    this.#sized.disconnect();
    this.#element?.replaceChildren();
    this.#plot = this.#element = null;
  }

  #press(event) {
    const last = this.#data.times.length - 1;
    const now = this.#index ?? last;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowDown: now - 1, ArrowUp: now + 1, PageDown: now - 10, PageUp: now + 10, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const at = Math.min(Math.max(to, 0), last);
    this.#plot.setCursor({ left: this.#plot.valToPos(this.#data.times[at], "x"), top: 0 });
  }

  // Show the values at the cursor, or the last ones.
  #read() {
    const readout = document.querySelector(".readout");
    if (!readout || !this.#element) return;
    const text = this.#reading();
    if (readout.textContent !== text) readout.textContent = text;
    this.#element.setAttribute("aria-valuenow", String(this.#index ?? this.#data.times.length - 1));
    this.#element.setAttribute("aria-valuetext", text);
  }

  #reading() {
    const { times, inUse, peak, limit, others, epochs, batches } = this.#data;
    const at = Math.min(this.#index ?? times.length - 1, times.length - 1);
    if (!times.length) return "";
    return [
      clock(times[at]), known(inUse[at]) ? `in use ${amount(inUse[at])}` : "not known", known(peak[at]) ? `peak until then ${amount(peak[at])}` : null,
      known(limit[at]) && known(inUse[at]) ? `headroom ${amount(limit[at] - inUse[at])}` : null, others[at] ? `other processes ${amount(others[at])}` : null,
      known(epochs[at]) ? `epoch ${epochs[at]}` : null, known(batches[at]) ? `batch size ${batches[at]}` : null,
    ].filter(Boolean).join(" · ");
  }
}

// Counted back, as the clock may have been set meanwhile.
const startOf = ({ updated_timestamp_seconds: updated, duration_seconds: seconds }) => updated - seconds;
const room = (device) => device.lowest_headroom_bytes ?? Infinity;
const gpuName = ({ at }, uuid) => (at.has(uuid) ? `GPU ${at.get(uuid)}` : "a GPU");
const size = (element) => ({ width: element.clientWidth, height: innerWidth < NARROW ? HEIGHTS.narrow : HEIGHTS.wide });

function choices(name, label, options, chosen) {
  return h("div", { class: "choices", role: "group", "aria-label": label }, options.map(([value, text]) =>
    h("button", { type: "button", "data-choice": name, "data-value": value, "data-key": value, "aria-pressed": String(value === chosen) }, text)));
}

// The whole life, from the record's timeline.
function wholeRun(view, device) {
  const { record } = view;
  const timeline = device.timeline;
  const began = startOf(record);
  const rows = [];
  timeline.ended_seconds.forEach((ended, place) => {
    const row = (seconds) => ({
      at: began + seconds, inUse: timeline.highest_bytes[place], peak: timeline.peak_bytes[place],
      others: timeline.others_bytes?.[place], epoch: timeline.epoch?.[place], batch: timeline.batch_size?.[place],
    });
    const start = timeline.began_seconds[place];
    const before = place ? timeline.ended_seconds[place - 1] : null;
    if (before !== null && start - before > GAP_SECONDS) rows.push({ at: began + before + GAP_SECONDS / 2, inUse: null, peak: null }, row(start));
    else if (before === null && start < ended) rows.push(row(start));
    if (!rows.length || began + ended > rows.at(-1).at) rows.push(row(ended));
  });
  const end = record.outcome ? Math.max(rows.at(-1).at, began + record.duration_seconds) : view.now;
  return complete(view, device, rows, began, end);
}

// The last seconds, from the daemon's history and what this page has seen.
function lastSeconds(view, device, seconds) {
  const { times, column } = view.past;
  const inUse = column(`run ${view.record.run_id} ${device.uuid} memory_in_use_bytes`);
  const rows = times.map((at, place) => ({ at, inUse: inUse[place], peak: null }));
  const first = rows.findIndex((row) => known(row.inUse) && row.at >= times.at(-1) - seconds); // what is known fills the width
  const shown = first < 0 ? rows.slice(-1) : rows.slice(first);
  return complete(view, device, shown, shown[0]?.at ?? view.now, shown.at(-1)?.at ?? view.now);
}

// What the run could use when it used the most, in all: of one moment, so that it is a limit.
function limitOf({ memory_peak_bytes: peak, headroom_at_peak_bytes: left, memory_limit_bytes: own }) {
  return known(peak) && known(left) ? peak + left : own ?? null;
}

function complete(view, device, rows, from, to) {
  const column = (name) => rows.map((row) => row[name] ?? null);
  const [times, inUse, peak] = ["at", "inUse", "peak"].map(column);
  const limit = times.map(() => limitOf(device));
  const forecast = forecastOf(view, device, [limit, inUse, peak].map((values) => values.findLast(known)));
  const seconds = Math.max(to - from, 1);
  let end = to;
  if (forecast) {
    const wanted = (forecast.upper ?? forecast.at) - to;
    end += wanted <= 2 * seconds ? Math.max(wanted, 0.1 * seconds) * 1.06 : seconds;
  }
  const highest = Math.max(1, ...[...inUse, ...peak, ...limit].filter(known));
  return {
    times, inUse, peak, limit, others: column("others"), epochs: column("epoch"), batches: column("batch"),
    span: [from, end], top: highest * 1.16, forecast, now: to, events: eventsOf(view.record, device.uuid).filter(({ at }) => at >= from - 1),
  };
}

function eventsOf(record, uuid) {
  const began = startOf(record);
  const events = (record.events ?? []).filter((each) => !each.uuid || each.uuid === uuid).map(({ at_seconds: at, kind, text, level }) => ({ at: began + at, kind, text, level }));
  const others = (record.reported_errors ?? []).filter(({ kind }) => kind !== "device_oom" && kind !== "host_oom").map(({ timestamp_seconds: at, kind, exception }) => ({ at, kind: "error", text: `${short(exception)}${errorWords(kind)}`, level: OUTCOME_SEVERITY.failed }));
  return [...events, ...others].sort((one, other) => one.at - other.at);
}

// The line ends at the limit. It continues what reaches it: memory in use between steps, or the peak within them.
function forecastOf({ record, now }, device, [limit, ...levels]) {
  const { seconds_to_oom: seconds, seconds_to_oom_lower: lower, seconds_to_oom_upper: upper, memory_growth_bytes_per_second: rate } = device;
  if (record.outcome || !known(seconds) || !known(limit)) return null;
  const due = (level) => Math.abs(limit - rate * seconds - level);
  const [from] = levels.filter(known).sort((one, other) => due(one) - due(other));
  return { now, at: now + seconds, lower: known(lower) ? now + lower : null, upper: known(upper) ? now + upper : null, from, limit };
}

function forecastText({ at, lower, upper }) {
  return `out of memory about ${clock(at)}${known(lower) ? ` (${clock(lower)} to ${known(upper) ? clock(upper) : "?"})` : ""}`;
}

function legend({ inUse, peak, limit, forecast }) {
  const now = (values) => values.findLast(known);
  const item = (kind, name, value) => known(value) ? h("li", {}, h("span", { class: `stroke ${kind}`, "aria-hidden": "true" }), ` ${name} `, h("b", {}, value)) : null;
  const [used, left] = [now(inUse), now(limit)];
  const headroom = known(inUse.at(-1)) && known(limit.at(-1)) ? limit.at(-1) - inUse.at(-1) : null; // of one moment
  return h("ul", { class: "legend", "aria-label": "Memory, last values" },
    item("use", "in use", known(used) ? amount(used) : null), item("peak", "peak", known(now(peak)) ? amount(now(peak)) : null), item("limit", "limit", known(left) ? amount(left) : null),
    known(headroom) ? h("li", {}, "headroom ", h("b", {}, amount(headroom))) : null,
    forecast ? item("forecast", "forecast", forecastText(forecast)) : null);
}

function line({ at, kind, text, level }, place) {
  return h("li", { "data-key": `${at} ${kind} ${text}`, class: level ?? "" },
    h("span", { class: "badge" }, String(place + 1)), " ", h("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)), " ",
    level ? [mark(level), " ", h("span", { class: "unseen" }, `${level}: `)] : null, h("bdi", {}, capital(text)));
}

// All points, for those who cannot see the chart.
function values({ times, inUse, peak, limit, others }) {
  const cell = (value) => h("td", { class: "number" }, known(value) ? amount(value) : "-");
  return h("details", { "data-key": "values" }, h("summary", {}, "Values as a table"),
    h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Values" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Time", "In use", "Peak", "Limit", "Other processes"].map((title, place) => h("th", { scope: "col", class: place ? "number" : null }, title)))),
      h("tbody", {}, times.map((at, place) => h("tr", {}, h("td", {}, clock(at)), cell(inUse[place]), cell(peak[place]), cell(limit[place]), cell(others[place])))))));
}

function axisTime(at, increment) {
  const time = clock(at);
  if (increment >= 86400) return time.split(" ")[0];
  return increment < 60 ? time.slice(-8) : time.slice(-8, -3);
}

// Epochs at the bottom, numbered events, the limit's name, and the forecast.
function drawOver(plot, { epochs, times, events, forecast, limit, now }, color) {
  const { ctx, bbox } = plot;
  const scale = uPlot.pxRatio;
  const x = (at) => plot.valToPos(at, "x", true);
  const y = (bytes) => plot.valToPos(bytes, "y", true);
  const right = bbox.left + bbox.width;
  const write = (text, at, height, style, align, weight = "") => {
    ctx.font = `${weight} ${12 * scale}px system-ui, sans-serif`;
    ctx.textAlign = align;
    ctx.strokeStyle = color("--card"); // behind it, so that it can be read on lines
    ctx.lineWidth = 3 * scale;
    ctx.strokeText(text, at, height);
    ctx.lineWidth = scale;
    ctx.fillStyle = style;
    ctx.fillText(text, at, height);
  };
  ctx.save();
  ctx.textBaseline = "alphabetic";
  ctx.lineWidth = scale;
  drawEpochs();
  const last = limit.findLast(known);
  if (known(last)) write("limit", bbox.left + 6 * scale, y(last) - 5 * scale, color("--limit"), "left");
  drawMarks();
  if (forecast) drawForecast();
  ctx.restore();

  function drawEpochs() {
    let written = -Infinity;
    epochs.forEach((epoch, place) => {
      if (!known(epoch) || (place && epochs[place - 1] === epoch)) return;
      ctx.strokeStyle = color("--muted");
      const at = x(times[place && times[place - 1] ? place - 1 : place]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top + bbox.height);
      ctx.lineTo(at, bbox.top + bbox.height - 8 * scale);
      ctx.stroke();
      if (at - written > 64 * scale && at + 56 * scale < right) {
        write(`epoch ${epoch}`, at + 3 * scale, bbox.top + bbox.height - 4 * scale, color("--text"), "left");
        written = at;
      }
    });
  }

  function drawMarks() {
    const ends = Array.from({ length: ROWS }, () => -Infinity);
    events.forEach(({ at, level }, place) => {
      const middle = x(at);
      if (middle < bbox.left - 1 || middle > right + 1) return;
      const style = color({ critical: "--critical", warning: "--warning" }[level] ?? "--muted");
      const row = ends.findIndex((end) => middle - end > BADGE * scale);
      ctx.strokeStyle = style;
      ctx.globalAlpha = 0.75;
      ctx.beginPath();
      ctx.moveTo(middle, bbox.top);
      ctx.lineTo(middle, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      if (row < 0) return; // its number is in the list
      ends[row] = middle;
      const height = bbox.top - (row * BADGE + BADGE / 2 + 1) * scale;
      ctx.beginPath();
      ctx.arc(middle, height, (BADGE / 2 - 1) * scale, 0, 2 * Math.PI);
      ctx.fillStyle = color("--ground");
      ctx.fill();
      ctx.stroke();
      ctx.font = `600 ${10 * scale}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.fillStyle = style;
      ctx.fillText(String(place + 1), middle, height + 3.5 * scale);
    });
  }

  function drawForecast() {
    const style = color("--forecast");
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    if (known(forecast.lower)) {
      ctx.globalAlpha = 0.18;
      ctx.fillStyle = style;
      ctx.beginPath();
      ctx.moveTo(x(forecast.now), y(forecast.from));
      ctx.lineTo(x(forecast.lower), y(forecast.limit));
      ctx.lineTo(known(forecast.upper) ? x(forecast.upper) : right, known(forecast.upper) ? y(forecast.limit) : y(forecast.from));
      ctx.fill();
      ctx.globalAlpha = 1;
    }
    ctx.strokeStyle = style;
    ctx.lineWidth = 2 * scale;
    ctx.setLineDash([7 * scale, 5 * scale]);
    ctx.beginPath();
    ctx.moveTo(x(forecast.now), y(forecast.from));
    ctx.lineTo(x(forecast.at), y(forecast.limit));
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = scale;
    ctx.beginPath();
    ctx.moveTo(x(now), bbox.top);
    ctx.lineTo(x(now), bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
    const end = x(forecast.at);
    if (end <= right) {
      ctx.beginPath();
      ctx.arc(end, y(forecast.limit), 4 * scale, 0, 2 * Math.PI);
      ctx.fillStyle = style;
      ctx.fill();
    }
    const at = Math.min(end + 6 * scale, right);
    ctx.font = `600 ${12 * scale}px system-ui, sans-serif`;
    const fitting = [forecastText(forecast), `about ${clock(forecast.at)}`].find((each) => ctx.measureText(each).width < at - bbox.left - 60 * scale) ?? "";
    write(end <= right ? fitting : `${fitting} →`, at, y(forecast.limit) - 8 * scale, style, "right", "600");
  }
}

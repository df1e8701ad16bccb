// Page of one run, at run/ID: redrawn with each answer of the API, until the run has ended and after.

import { Charts } from "./charts.js";
import { places } from "./gpus.js";
import { get, Live } from "./live.js";
import { Past } from "./past.js";
import { MemoryChart } from "./run_chart.js";
import { copyable } from "./run_copy.js";
import { census, earlierRuns, environment, errors, incidentsOf } from "./run_details.js";
import { activity, figures } from "./run_figures.js";
import { head, headline, outcome, summary } from "./run_summary.js";
import { h, show } from "./tree.js";
import { capital, clock, lasting, short } from "./words.js";

const EARLIER = 8; // runs of the same name
const EARLIER_SECONDS = 60; // between two requests for them
const ID = decoded(location.pathname.split("/").at(-1));

const part = (id) => document.getElementById(id);
const past = new Past();
const charts = new Charts(() => redraw());
const chart = new MemoryChart(() => redraw());
let last = null; // the last answer that could be drawn: {state, record, runs, incidents}
let redraw = () => {}; // draws the same again, after a choice
let earlier = { due: 0, state: "", runs: [] };

function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name; // no valid address
  }
}

// Return the run's record, null if the daemon does not know it, and the last runs of its name.
async function load() {
  let record;
  try {
    record = (await get(`api/v1/runs/${encodeURIComponent(ID)}`)).body;
  } catch (error) {
    if (error.status !== 404) throw error;
    return { record: null, runs: [] };
  }
  if (Date.now() >= earlier.due || earlier.state !== record.state) await loadEarlier(record);
  return { record, runs: earlier.runs };
}

// A failure leaves the known runs, and costs nothing else of the page.
async function loadEarlier(record) {
  earlier = { ...earlier, due: Date.now() + EARLIER_SECONDS * 1000, state: record.state };
  try {
    const { live, past: ended } = (await get(`api/v1/runs?limit=${EARLIER + 1}&name=${encodeURIComponent(record.name)}`)).body;
    const others = [...live, ...ended].filter((each) => each.uid === record.uid && (each.run_id !== ID || each.began_timestamp_seconds !== record.began_timestamp_seconds));
    earlier.runs = others.slice(0, EARLIER);
  } catch (error) {
    console.warn(error);
  }
}

// `old` says why the values are old, `away` why those of an ended run, which no longer change, are not confirmed.
function draw(seen, old, away) {
  redraw = () => draw(seen, old, away);
  const { state, record, runs, incidents } = seen;
  const run = record.outcome ? null : state.runs.find(({ run_id: id, up }) => id === ID && up);
  const at = places(state.gpus);
  document.body.classList.toggle("old", Boolean(old));
  const view = { state, record, run, at, now: record.updated_timestamp_seconds, past: past.read(state.daemon.poll_interval_seconds) };
  charts.start(view.past);
  const first = headline(view);
  show(part("head"), head(view), away ? h("p", { class: "notice away" }, away) : null);
  show(part("main"), old ? oldData(old, first) : summary(view, first), h("div", { class: "halves", "data-key": "halves" },
    h("div", {}, chart.section(view), figures(view), activity(view, charts)),
    h("div", {}, errors(view), census(view), earlierRuns(view, runs), incidentsOf(incidents, record), environment(view))));
  show(part("foot"), foot(state));
  charts.draw();
  chart.draw();
  setTitle(old ? "? unknown" : outcome(view).text, record.name, state.host.name);
  announce(old ? old.text : first.said);
}

function oldData(old, first) {
  return h("section", { id: "banner", class: "banner unknown", "aria-labelledby": "sentence", "data-key": "banner" },
    h("h2", { id: "sentence" }, `? ${old.text}`), old.note ? h("p", {}, old.note) : null,
    h("p", { class: "was" }, `Last known: ${first.text}`));
}

function setTitle(...words) {
  document.title = [...words.filter(Boolean).map(short), "gpuwarden"].join(" · ");
}

function announce(text) {
  if (part("announcement").textContent !== text) part("announcement").textContent = text; // otherwise a screen reader repeats it
}

// A plain page: for an unknown run, and before the first answer.
function plainPage(text, note, ...more) {
  document.body.classList.toggle("old", false);
  show(part("head"), h("h1", {}, "Training run"));
  show(part("main"), h("section", { id: "banner", class: "banner unknown", "aria-labelledby": "sentence", "data-key": "banner" },
    h("h2", { id: "sentence" }, text), note ? h("p", {}, note) : null), more);
  setTitle(text);
  announce(text);
}

function foot(state) {
  return [
    h("p", {}, h("a", { href: "../" }, "all GPUs and runs"), " · JSON: ", h("a", { href: `../api/v1/runs/${encodeURIComponent(ID)}` }, "this run"), ", ",
      h("a", { href: "../api/v1/runs" }, "all runs"), ` · gpuwarden ${state.daemon.version}`),
  ];
}

function showAnswer(state, history, now, incidents, { record, runs }) {
  if (last && state.daemon.version !== last.state.daemon.version) {
    location.reload(); // a new version may have a new page
    return;
  }
  if (history) past.load(history);
  past.add(state);
  if (!record && last) {
    draw(last, { text: "Old data: the daemon no longer knows this run", note: "It was restarted, or the run's record was replaced by newer ones." });
    return;
  }
  if (!record) {
    plainPage("Unknown run", ["The daemon on ", h("bdi", {}, state.host.name), " has no run with this ID: ", h("bdi", {}, short(ID)), ". An ID is that of a process until the host reboots; the oldest records make room for new ones."],
      h("p", {}, "Runs that it knows: "), copyable("gpuwarden runs"), h("p", {}, h("a", { href: "../" }, "All GPUs and runs")));
    return;
  }
  last = { state, record, runs, incidents };
  const age = now - state.polled_timestamp_seconds;
  const stale = !record.outcome && age > state.thresholds.poll_stale_seconds;
  draw(last, stale ? { text: `Old data: the last poll was ${lasting(age)} ago`, note: "The daemon answers but does not poll the GPUs; see its log" } : null);
}

function showFailure(why, since, error) {
  const at = clock(since / 1000);
  const reasons = {
    away: { text: `Old data: the daemon has not answered since ${at}`, note: "Retrying; the page will resume automatically." },
    refused: { text: `Old data: the daemon cannot answer since ${at}`, note: error?.message },
    broken: { text: `Old data: this page failed at ${at}`, note: error?.message },
    hidden: { text: "Loading …", note: "" },
  };
  if (why === "hidden" && !last) return;
  if (last?.record.outcome) draw(last, null, `${reasons[why].text.replace("Old data: t", "T")}. The run had ended before.`);
  else if (last) draw(last, reasons[why]);
  else plainPage(capital(reasons[why].text.replace("Old data: ", "")), reasons[why].note);
}

part("main").append(h("p", {}, "Loading …")); // not in the document, which is also read without scripts
new Live(showAnswer, showFailure, load);

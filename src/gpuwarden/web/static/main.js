// The status page, redrawn with each answer of the API.

import { Charts } from "./charts.js";
import { gpus, places } from "./gpus.js";
import { events, incidents, processes } from "./lists.js";
import { Live } from "./live.js";
import { Past } from "./past.js";
import { runs } from "./runs.js";
import { h, show } from "./tree.js";
import { announcement, foot, head, summarize, banner } from "./banner.js";
import { capital, clock, lasting } from "./words.js";

const part = (id) => document.getElementById(id);
const past = new Past();
const charts = new Charts(() => redraw());
let last = null; // the last state that could be drawn
let recorded = []; // incidents, the newest first
let redraw = () => {}; // draws the same again

// Return the id that the address names.
function hash() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // no valid address
  }
}

function draw(state, old) {
  redraw = () => draw(state, old);
  const seen = state && summarize(state);
  document.body.classList.toggle("old", Boolean(old));
  if (state) {
    const at = places(state.gpus);
    charts.start(past.read(state.daemon.poll_interval_seconds));
    show(part("head"), head(state, recorded));
    show(part("main"), banner(state, seen, old), gpus(state, charts, hash()),
      h("div", { class: "columns", "data-key": "columns" },
        h("div", {}, runs(state, at, charts, hash()), processes(state, at)), h("div", {}, incidents(recorded), events(state))));
    show(part("foot"), foot(state));
    charts.draw();
  } else {
    show(part("main"), banner(null, null, old));
  }
  document.title = [old ? "? unknown" : seen.text, state?.host.name, "gpuwarden"].filter(Boolean).join(" · ");
  const text = announcement(seen, old);
  if (part("announcement").textContent !== text) part("announcement").textContent = text; // otherwise a screen reader repeats it
}

function showState(state, history, now, found) {
  if (last && state.daemon.version !== last.daemon.version) {
    location.reload(); // a new version may have a new page
    return;
  }
  recorded = found;
  if (history) past.load(history);
  past.add(state);
  const age = now - state.polled_timestamp_seconds;
  const stale = age > state.thresholds.poll_stale_seconds;
  draw(state, stale ? { text: `Old data: the last poll was ${lasting(age)} ago`, note: "The daemon answers but does not poll the GPUs; see its log" } : null);
  if (!last) reveal();
  last = state;
}

function showFailure(why, since, error) {
  const at = clock(since / 1000);
  const reasons = {
    away: { text: `Old data: the daemon has not answered since ${at}`, note: "Retrying; the page will resume automatically." },
    refused: { text: `Old data: the daemon has had no poll since ${at}`, note: error?.message },
    broken: { text: `Old data: this page failed at ${at}`, note: error?.message },
    hidden: { text: "Loading …", note: "" },
  };
  if (why === "hidden" && !last) return;
  draw(last, last ? reasons[why] : { ...reasons[why], text: capital(reasons[why].text.replace("Old data: ", "")) });
}

// Show and focus what the address names: a link opens the card of a GPU or run, and so does Back.
function reveal() {
  const target = part(hash());
  target?.closest("details")?.setAttribute("open", "");
  target?.scrollIntoView({ block: target.matches("article") ? "nearest" : "start" });
  target?.focus({ preventScroll: true });
}

addEventListener("hashchange", () => {
  redraw();
  reveal();
});

addEventListener("keydown", (event) => {
  const opened = event.target.closest?.("article");
  if (event.key !== "Escape" || event.defaultPrevented || !opened) return;
  const section = opened.closest("section");
  location.hash = section.dataset.key; // which takes the focus
  section.querySelector("[aria-current]").focus();
});

part("main").append(h("p", {}, "Loading …")); // not in the document, which is also read without scripts
new Live(showState, showFailure);

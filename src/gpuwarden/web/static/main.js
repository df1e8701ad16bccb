// The status page: what the daemon says of the box, drawn anew with each answer.

import { Charts } from "./charts.js";
import { gpus, places } from "./gpus.js";
import { events, processes } from "./lists.js";
import { Live } from "./live.js";
import { Past } from "./past.js";
import { runs } from "./runs.js";
import { show } from "./tree.js";
import { announced, foot, head, judged, verdict } from "./verdict.js";
import { clock, lasting } from "./words.js";

const part = (id) => document.getElementById(id);
const past = new Past();
const charts = new Charts();
let last = null; // what was heard last, and could be drawn

function draw(state, old) {
  const seen = state && judged(state);
  document.body.classList.toggle("old", Boolean(old));
  if (state) {
    const at = places(state.gpus);
    charts.begin(past.read(state.daemon.poll_interval_seconds));
    show(part("head"), head(state));
    show(part("main"), verdict(state, seen, old), gpus(state, charts), runs(state, at, charts), processes(state, at), events(state));
    show(part("foot"), foot(state));
    charts.draw();
  } else {
    show(part("main"), verdict(null, null, old));
  }
  document.title = [old ? "? not known" : seen.text, state?.host.name, "gpuwarden"].filter(Boolean).join(" · ");
  const told = announced(seen, old);
  if (part("announcement").textContent !== told) part("announcement").textContent = told; // else it would be read anew
}

function heard(state, history, now) {
  if (last && state.daemon.version !== last.daemon.version) {
    location.reload(); // another version may have another page
    return;
  }
  if (history) past.load(history);
  past.add(state);
  const age = now - state.polled_timestamp_seconds;
  const stale = age > state.thresholds.poll_stale_seconds;
  draw(state, stale ? { text: `The last poll was ${lasting(age)} ago; what you see is old.`, note: "The daemon answers, but does not read the GPUs: its log says why." } : null);
  last = state;
}

function silent(why, since, error) {
  const at = clock(since / 1000);
  const reasons = {
    away: { text: `The daemon has not answered since ${at}; what you see is old.`, note: "It is asked again and again: the page goes on by itself." },
    refused: { text: `The daemon has had no poll since ${at}; what you see is old.`, note: error?.message },
    broken: { text: `This page has failed at ${at}; what you see is old.`, note: error?.message },
    hidden: { text: "Asking the daemon …", note: "" },
  };
  if (why === "hidden" && !last) return;
  draw(last, last ? reasons[why] : { ...reasons[why], text: reasons[why].text.replace("; what you see is old", "") });
}

new Live(heard, silent);

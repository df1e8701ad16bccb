// Memory bar of a GPU: its parts, and below them the headroom of the run that has the least.

import { ofPressure, fact } from "./marks.js";
import { h } from "./tree.js";
import { amount, known, percent } from "./words.js";

const MIN_LEGEND_SHARE = 0.01; // smaller parts are only in the bar

export function memory(of) {
  const { memory_size_bytes: size, memory_used_bytes: used } = of;
  if (!known(size) || size <= 0 || !known(used)) return null;
  const shares = divided(of, size, used);
  return h("div", { class: "memory" },
    h("div", { class: "bar", "aria-hidden": "true" },
      shares.map(({ kind, bytes }) => h("span", { class: `share ${kind}`, style: { width: `${(bytes / size) * 100}%` } }))),
    known(of.headroom_bytes)
      ? h("div", { class: "bar headroom-bar", "aria-hidden": "true" }, h("span", { class: "share headroom", style: { width: `${Math.min(of.headroom_bytes / size, 1) * 100}%` } }))
      : null,
    h("ul", { class: "legend", "aria-label": "Memory" },
      shares.filter(({ bytes }) => bytes > size * MIN_LEGEND_SHARE).map(({ kind, name, bytes }) =>
        h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), ` ${name} `, h("b", {}, amount(bytes)))),
      known(of.headroom_bytes)
        ? h("li", {}, h("span", { class: "swatch headroom", "aria-hidden": "true" }), " headroom ", h("b", {}, amount(of.headroom_bytes)))
        : null));
}

// Used memory and headroom in numbers.
export function memoryFacts(of) {
  const { memory_size_bytes: size, memory_used_bytes: used, headroom_bytes: left, headroom_ratio: share } = of;
  const level = ofPressure(of.pressure?.memory);
  return [
    known(size) ? fact("Memory used", known(used) ? amount(used) : "-", { note: known(used) ? `${percent(used / size)} of ${amount(size)}` : `of ${amount(size)}` }) : null,
    known(left) ? fact("Headroom", amount(left), { level, note: known(share) ? `${percent(share)} free${severalRuns(of) ? " for the run with the least headroom" : ""}` : "free memory" }) : null,
  ];
}

const severalRuns = (of) => (of.owners ?? []).filter(({ kind }) => kind === "run").length > 1;

function divided(of, size, used) {
  const inUse = Math.min(of.memory_in_use_bytes ?? 0, used);
  const ofRuns = (of.owners ?? []).filter(({ kind }) => kind === "run").reduce((sum, { memory_bytes: bytes }) => sum + bytes, 0);
  const held = Math.min(Math.max(ofRuns, inUse), used); // by the processes of runs, including the pools of their frameworks
  const reserved = Math.min(of.memory_reserved_bytes ?? 0, size - used);
  return [
    { kind: "driver", name: "driver", bytes: reserved },
    { kind: "others", name: "others", bytes: used - held },
    { kind: "use", name: "in use by runs", bytes: inUse },
    { kind: "pool", name: "reserved by runs", bytes: held - inUse },
    { kind: "free", name: "free", bytes: size - used - reserved },
  ];
}

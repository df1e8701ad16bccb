// Memory bar of a GPU or MIG instance: its parts, and along its lower edge the headroom of the run that has the least.

import { fact, ofPressure } from "./marks.js";
import { h } from "./tree.js";
import { amount, known, part, percent } from "./words.js";

const MIN_LEGEND_SHARE = 0.01; // smaller parts are only in the bar
export const NAMES = { use: "in use by runs", pool: "reserved by runs", others: "others", driver: "driver", free: "free", headroom: "headroom" };

// Return size and use, or null if unknown. Where a run reports more than the driver lists, as one that only stands for a training on
// that GPU, its own figures hold: what it uses, of what it can have.
export function usage(of) {
  const { memory_size_bytes: total, memory_used_bytes: listed, memory_in_use_bytes: inUse = 0, headroom_bytes: left } = of;
  if (!known(total) || total <= 0 || !known(listed)) return null;
  const own = inUse > listed && known(left);
  return { size: own ? Math.min(total, inUse + left) : total, used: Math.max(listed, Math.min(inUse, total)), own };
}

// Peak of the GPU that the run filled the most, as in all its lists; undefined if none is known.
export const highestPeak = (devices = []) => devices.map(({ memory_peak_bytes: peak }) => peak).filter(known).sort((one, other) => other - one)[0];

export const ofMemory = (of) => ofPressure(of.pressure?.memory);

export function bar(of) {
  const whole = usage(of);
  if (!whole) return null;
  const { size } = whole;
  const width = (bytes) => ({ width: `${(bytes / size) * 100}%` });
  const shares = divided(of, whole);
  const before = shares.slice(0, 3).reduce((sum, { bytes }) => sum + bytes, 0); // as headroom begins where the use by runs ends
  const left = Math.min(of.headroom_bytes ?? 0, size - before);
  return h("span", { class: `bar ${ofMemory(of)}`, "aria-hidden": "true" },
    shares.map(({ kind, bytes }) => h("span", { class: `share ${kind}`, style: width(bytes) })),
    left > 0 ? h("span", { class: "headroom", style: { ...width(left), left: `${(before / size) * 100}%` } }) : null);
}

export function memory(of) {
  const whole = usage(of);
  if (!whole) return null;
  const item = (kind, bytes) => h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), ` ${NAMES[kind]} ${amount(bytes)}`);
  return h("div", { class: "memory" }, bar(of),
    h("ul", { class: "legend", "aria-label": "Memory" },
      divided(of, whole).filter(({ bytes }) => bytes > whole.size * MIN_LEGEND_SHARE).map(({ kind, bytes }) => item(kind, bytes)),
      known(of.headroom_bytes) ? item("headroom", of.headroom_bytes) : null));
}

// Used memory and headroom in numbers.
export function memoryFacts(of) {
  const { memory_size_bytes: total, headroom_bytes: left, headroom_at_peak_bytes: atPeak, headroom_ratio: share } = of;
  const whole = usage(of);
  return [
    known(total) ? fact("Memory used", whole ? amount(whole.used) : "-", { note: usedNote(total, whole) }) : null,
    known(left) ? fact(known(atPeak) ? "Headroom at peak" : "Headroom", amount(atPeak ?? left), { level: ofMemory(of), note: known(share) ? `${known(atPeak) ? `now ${amount(left)}, ` : ""}${percent(share)} free${severalRuns(of) ? " for the run with the least headroom" : ""}` : "free memory" }) : null,
  ];
}

function usedNote(total, whole) {
  if (!whole) return `of ${amount(total)}`;
  return whole.own ? `of ${amount(whole.size)}, as its run reports; the driver lists less` : `${percent(whole.used / total)} of ${amount(total)}`;
}

// Used memory of the total: 60.3 of 80.0 GiB.
export const usedOf = (of) => (({ used, size }) => part(used, size))(usage(of));

const severalRuns = (of) => (of.owners ?? []).filter(({ kind }) => kind === "run").length > 1;

function divided(of, { size, used, own }) {
  const inUse = Math.min(of.memory_in_use_bytes ?? 0, used);
  const ofRuns = (of.owners ?? []).filter(({ kind }) => kind === "run").reduce((sum, { memory_bytes: bytes }) => sum + bytes, 0);
  const held = Math.min(Math.max(ofRuns, inUse), used); // by the processes of runs, including the pools of their frameworks
  const reserved = own ? 0 : Math.min(of.memory_reserved_bytes ?? 0, size - used);
  return [
    { kind: "driver", bytes: reserved },
    { kind: "others", bytes: used - held },
    { kind: "use", bytes: inUse },
    { kind: "pool", bytes: held - inUse },
    { kind: "free", bytes: size - used - reserved },
  ];
}

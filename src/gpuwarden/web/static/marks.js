// Marks of severity: a sign, a word and a color, so that none of them is the only one.

import { h } from "./tree.js";
import { capital } from "./words.js";

const SIGNS = { critical: "✖", warning: "▲", ok: "✔", unknown: "?", info: "•" };
const WORDS = { critical: "critical", warning: "warning", ok: "OK", unknown: "unknown", info: "" };
const OF_PRESSURE = { none: "ok", warning: "warning", critical: "critical" };

export const RANK = { critical: 0, warning: 1, unknown: 2, ok: 3, info: 4 };
export const word = (level) => WORDS[level] ?? level;
export const ofPressure = (level) => OF_PRESSURE[level] ?? "";
export const isTrouble = (level) => level === "critical" || level === "warning";
export const mark = (level) => h("span", { class: `mark ${level}`, "aria-hidden": "true" }, SIGNS[level] ?? "");

// Problems; `root` is the way to the daemon's pages, for links to what to do. There are none inside another link.
export function troubles(found = [], root = null) {
  if (!found.length) return null;
  return h("ul", { class: "troubles" }, found.map(({ level, text, alert }) =>
    h("li", { class: level }, mark(level), " ", h("span", { class: "unseen" }, `${word(level)}: `), capital(text),
      alert && root !== null ? [" · ", h("a", { href: `${root}alerts/${alert}` }, "what to do", h("span", { class: "unseen" }, ` about ${text}`))] : null)));
}

const NARROW = matchMedia("(max-width: 40rem)");

// Section that can be folded; `extra` ones are folded at first where the page is narrow.
export function section(id, title, content, { extra = false } = {}) {
  return h("section", { "data-key": id, "aria-labelledby": id },
    h("details", { "data-key": "fold", class: "fold", open: !(extra && NARROW.matches) }, h("summary", {}, h("h2", { id }, title)), content));
}

// The first items of a list; the others are folded.
export function bounded(items, most, name, list = "ul", of = {}) {
  const rest = items.slice(most);
  return [
    items.length ? h(list, of, items.slice(0, most)) : null,
    rest.length ? h("details", { "data-key": `more ${name}` }, h("summary", {}, `and ${rest.length} more ${name}`), h(list, of, rest)) : null,
  ];
}

// A number with its name; `level` marks a warning, `ratio` draws a bar, `note` adds details.
export function fact(name, value, { note = null, level = "", ratio = null } = {}) {
  const grave = isTrouble(level);
  return h("div", { class: `fact ${grave ? level : ""}` },
    h("dt", {}, name),
    h("dd", {}, grave ? [mark(level), " ", h("span", { class: "unseen" }, `${word(level)}: `)] : null, h("span", { class: "value" }, value),
      ratio === null ? null : h("span", { class: "gauge", "aria-hidden": "true" }, h("span", { style: { width: `${Math.min(Math.max(ratio, 0), 1) * 100}%` } })),
      note ? [" ", h("span", { class: "note" }, note)] : null));
}

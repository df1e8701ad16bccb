// Elements of the page, and their update. All untrusted text passes here as text: nothing on this page parses markup.

export function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") for (const [property, of] of Object.entries(value)) made.style.setProperty(property, of);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((each) => each !== undefined && each !== null && each !== false && each !== ""));
  return made;
}

// Text of the daemon, in which names of programs are between backticks.
export const prose = (text) => text.split("`").map((each, place) => (place % 2 ? h("code", {}, each) : each));

// Replace the children of an element with as few changes as possible, so that the focus, the selection, opened details
// and drawn charts (`data-keep`) stay. Children with the same `data-key` are matched at any position.
export function show(element, ...children) {
  bring(element, h("x", {}, ...children));
}

function bring(old, fresh) {
  const keyed = new Map([...old.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const found = key ? keyed.get(key) : at;
    if (found && isSameElement(found, wanted)) {
      keyed.delete(key);
      if (found !== at) old.insertBefore(found, at);
      else at = at.nextSibling;
      update(found, wanted);
    } else {
      old.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function isSameElement(found, wanted) {
  return found.nodeName === wanted.nodeName && found.dataset?.key === wanted.dataset?.key && found.dataset?.keep === wanted.dataset?.keep;
}

function update(found, wanted) {
  if (found.nodeType === Node.TEXT_NODE) {
    if (found.data !== wanted.data) found.data = wanted.data;
    return;
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && name !== "open" && found.getAttribute(name) !== value) found.setAttribute(name, value);
  }
  for (const { name } of [...found.attributes]) {
    if (name !== "style" && name !== "open" && !wanted.hasAttribute(name)) found.removeAttribute(name);
  }
  if (found.dataset.keep) return;
  if (found.style.cssText !== wanted.style.cssText) found.style.cssText = wanted.style.cssText;
  bring(found, wanted);
}

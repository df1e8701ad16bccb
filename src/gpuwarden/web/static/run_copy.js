// Code with a button that copies it. By the selection, which needs no secure context: a daemon is mostly reached by plain HTTP.

import { h } from "./tree.js";

const SHOWN_MS = 2000;

export function copyable(code, name = "Copy") {
  return h("div", { class: "copyable" },
    h("pre", { tabindex: "0", "aria-label": "Code" }, h("code", {}, code)),
    h("button", { type: "button", class: "copy" }, name));
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest?.(".copy");
  if (!button) return;
  getSelection().selectAllChildren(button.parentElement.querySelector("code"));
  const copied = document.execCommand("copy");
  document.getElementById("copied").textContent = copied ? "Copied" : "Selected: copy it with Ctrl+C";
  button.dataset.done = copied ? "✔" : "Ctrl+C";
  setTimeout(() => {
    delete button.dataset.done;
    document.getElementById("copied").textContent = "";
  }, SHOWN_MS);
});

// Light, dark, or as the system says. The choice is kept in this browser.

import { h } from "./dom.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };

function chosen() {
  try {
    return localStorage.getItem("headrace-theme") || "auto";
  } catch {
    return "auto"; // storage may be forbidden
  }
}

export function theme(value = chosen()) {
  document.documentElement.dataset.theme = value;
  try {
    localStorage.setItem("headrace-theme", value);
  } catch {
    // it is forgotten when the page is closed
  }
}

export function themeButton() {
  const node = h("button", { type: "button", class: "plain", id: "theme" });
  const say = () => {
    node.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[chosen()];
    node.setAttribute("aria-label", `Theme: ${chosen()}`);
  };
  node.addEventListener("click", () => {
    theme(NEXT[chosen()]);
    say();
  });
  say();
  return node;
}

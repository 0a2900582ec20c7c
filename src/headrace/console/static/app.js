// The frame: who is logged in, which page the address names, keys, themes, and the banner while the broker is away.

import { ask, get, state } from "./api.js";
import { access } from "./access.js";
import { cluster } from "./cluster.js";
import { deadLetters, letters } from "./dead_letters.js";
import { button, closeDialogs, dialog, h, put, toast } from "./dom.js";
import { login } from "./login.js";
import { message } from "./message.js";
import { overview } from "./overview.js";
import { pipelines } from "./pipelines.js";
import { setMe, whoAmI } from "./rights.js";
import { scheduled } from "./scheduled.js";
import { subscription } from "./subscription.js";
import { subscriptions } from "./subscriptions.js";
import { theme, themeButton } from "./theme.js";
import { topic } from "./topic.js";
import { topics } from "./topics.js";

const PAGES = [
  [[""], overview],
  [["topics"], topics],
  [["topics", "{}"], topic],
  [["topics", "{}", "{}"], topic],
  [["topics", "{}", "messages", "{}", "{}"], message],
  [["subscriptions"], subscriptions],
  [["subscriptions", "{}"], subscription],
  [["dead-letters"], deadLetters],
  [["dead-letters", "{}"], letters],
  [["scheduled"], scheduled],
  [["pipelines"], pipelines],
  [["cluster"], cluster],
  [["access"], access],
];
const CLUSTER = ["cluster", "Cluster", "n"];
let MENU = [
  ["", "Overview", "o"], ["topics", "Topics", "t"], ["subscriptions", "Subscriptions", "s"],
  ["dead-letters", "Dead letters", "d"], ["scheduled", "Scheduled", "c"], ["pipelines", "Pipelines", "p"], ["access", "Access", "a"],
];

const app = document.getElementById("app");
const main = h("main", { id: "main", tabindex: "-1" });
const banner = h("div", { class: "banner", role: "alert", hidden: true }, "The broker does not answer. Trying again …");
let leaving = new AbortController();
let failed = false;

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  try {
    return { words: path.split("/").map(decodeURIComponent), query: new URLSearchParams(query) };
  } catch {
    return { words: ["no such page"], query: new URLSearchParams() }; // somebody has cut the address
  }
}

function find(words) {
  for (const [pattern, page] of PAGES) {
    if (pattern.length === words.length && pattern.every((word, at) => word === "{}" || word === words[at])) {
      return [page, words.filter((_, at) => pattern[at] === "{}")];
    }
  }
  return [null, []];
}

/** Open the page that the address names. */
async function open() {
  leaving.abort();
  leaving = new AbortController();
  closeDialogs();
  failed = false;
  const { words, query } = address();
  const [page, values] = find(words);
  for (const link of document.querySelectorAll("#menu a")) {
    if (link.getAttribute("href") === `#/${words[0]}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const context = {
    signal: leaving.signal,
    query,
    again: open,
    fail,
    // Remember what is shown in the address, without opening the page again.
    keep(changes) {
      for (const [name, value] of Object.entries(changes)) {
        if (value === "" || value === null || value === undefined) query.delete(name);
        else query.set(name, value);
      }
      const path = location.hash.split("?")[0] || "#/";
      history.replaceState(null, "", query.size ? `${path}?${query}` : path);
    },
    title(text) {
      document.title = `${text} · Headrace`;
    },
  };
  main.setAttribute("aria-busy", "true");
  try {
    const content = page ? await page(context, ...values) : h("p", { class: "empty" }, "There is no such page.");
    if (context.signal.aborted) return;
    put(main, content);
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  } catch (error) {
    if (context.signal.aborted || error.name === "AbortError") return;
    failed = true;
    put(main, h("h1", {}, error.status === 403 ? "You may not see this" : error.status === 404 ? "Not found" : "This did not work"),
      h("p", { class: "problem" }, error.message),
      h("p", {}, h("a", { href: "#/" }, "Overview"), " · ", h("a", { href: location.hash, onclick: open }, "Try again")));
    if (!("status" in error)) console.error(error);
  } finally {
    main.removeAttribute("aria-busy");
  }
}

/** A page that cannot go on shows why, instead of numbers that are old. */
function fail(error) {
  leaving.abort();
  put(main, h("h1", {}, error.status === 404 ? "Not found" : "This did not work"), h("p", { class: "problem" }, error.message),
    h("p", {}, h("a", { href: "#/topics" }, "All topics"), " · ", h("a", { href: "#/subscriptions" }, "All subscriptions")));
}

async function logOut() {
  await ask("DELETE", "/console/session");
  forget();
}

/** Nothing that was shown or typed stays for the next user. */
function forget() {
  leaving.abort();
  history.replaceState(null, "", "#/");
  location.reload();
}

function frame() {
  const me = whoAmI();
  const anyone = me.name === "anyone";
  const menu = h("nav", { id: "menu", "aria-label": "Pages" }, MENU.map(([word, title]) => h("a", { href: `#/${word}` }, title)));
  const who = h("div", { class: "who" }, themeButton(),
    h("a", { href: "#/access", title: anyone ? "This broker has no access control" : "You" }, anyone ? "no login" : me.name),
    anyone ? null : button("Sign out", logOut, { class: "plain" }));
  put(app, h("a", { class: "skip", href: "#main", onclick: (event) => {
    event.preventDefault();
    main.focus();
  } }, "Skip to the content"),
  h("header", {}, h("a", { class: "brand", href: "#/" }, "Headrace"), menu, who), banner, main);
}

async function begin() {
  try {
    const me = await get("/access/whoami");
    if (!["nobody", me.name].includes(whoAmI().name)) return forget();
    setMe(me);
    const info = await get("/info");
    MENU = MENU.filter((entry) => entry !== CLUSTER);
    if (info.cluster !== null) MENU.splice(-1, 0, CLUSTER); // there is one, and the user may see it
  } catch (error) {
    if (error.status !== 401) {
      put(app, banner, h("main", {}, h("p", { class: "problem" }, error.message)));
      if (error.code === "offline") state.addEventListener("online", begin, { once: true });
    }
    return;
  }
  frame();
  open();
}

state.addEventListener("signedout", () => {
  leaving.abort();
  if (!document.getElementById("login")) {
    closeDialogs();
    put(app, banner, login(begin));
    document.querySelector("#login input")?.focus();
  }
});
state.addEventListener("offline", () => (banner.hidden = false));
state.addEventListener("online", () => {
  banner.hidden = true;
  toast("The broker answers again.");
  if (failed) open();
});
addEventListener("hashchange", () => whoAmI().name !== "nobody" && open());

// --- keys ---
let after = "";
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey || typing || document.querySelector("dialog[open]")) return;
  if (after === "g") {
    const entry = MENU.find(([, , key]) => key === event.key);
    after = "";
    if (entry) location.hash = `#/${entry[0]}`;
  } else if (event.key === "/") {
    const filter = document.querySelector("main input[type=search]");
    if (filter) {
      event.preventDefault();
      filter.focus();
    }
  } else if (event.key === "?") {
    const rows = [...MENU.map(([, title, key]) => [`g ${key}`, title]), ["/", "Go to the filter"], ["?", "These keys"]];
    dialog("Keys", h("dl", { class: "keys" }, rows.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)))), []);
  } else {
    after = event.key;
  }
});

theme();
begin();

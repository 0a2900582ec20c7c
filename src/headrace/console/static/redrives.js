// Redrives that run in the broker: how far each is, and a button that stops it.

import { get, path, remove } from "./api.js";
import { button, h, put, toast } from "./dom.js";
import { ago, count, plural } from "./format.js";
import { every } from "./live.js";
import { may } from "./rights.js";

const told = new Set();

/** What became of a redrive, as a sentence at the edge of the screen, once. */
export function tell(found) {
  if (told.has(found.id)) return;
  told.add(found.id);
  const skipped = found.skipped ? ` Skipped: ${count(found.skipped)} (${found.reason}).` : "";
  const early = { stopped: " Stopped.", failed: ` Failed: ${found.why}.` }[found.state] || "";
  toast(`Redriven: ${count(found.redriven)}.${skipped}${early}`, found.skipped || found.state === "failed" ? "bad" : "ok");
}

/** The section, and a function that draws it now. `ended` is called when one has ended. */
export function redrives(name, signal, ended) {
  const section = h("section", { "aria-label": "Redrives", id: "redrives" });
  let seen = new Set();

  async function refresh() {
    const found = await get(path("dead-letters", name, "redrives"), {}, signal);
    const running = found.filter((each) => each.state === "running");
    const over = found.filter((each) => each.state !== "running" && seen.has(each.id));
    seen = new Set(running.map((each) => each.id));
    put(section, running.map(line));
    over.forEach(tell);
    if (over.length) await ended();
  }
  const line = (each) => h("div", { class: "row", role: "status" },
    h("progress", { value: each.redriven, max: Math.max(each.redriven + each.left, 1), "aria-label": "Redriven" }),
    h("span", {}, `${count(each.redriven)} redriven, ${plural(each.left, "letter")} left${each.rate ? `, at most ${each.rate} a second` : ""}; begun ${ago(each.began)} by ${each.by}.`),
    may("manage", null, name) ? button("Stop", () => stop(each), { class: "danger", "data-focus": `stop-${each.id}` }) : null);

  async function stop(each) {
    await remove(path("dead-letters", name, "redrives", each.id));
    await refresh();
  }
  every(1000, signal, refresh);
  return { section, refresh };
}

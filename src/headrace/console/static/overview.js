// What needs attention, then how the broker is doing.

import { get } from "./api.js";
import { h, put } from "./dom.js";
import { bytes, count, duration, ms, rate } from "./format.js";
import { lettersLink, subscriptionLink, topicLink } from "./links.js";
import { every } from "./live.js";
import { plot } from "./plots.js";
import { may } from "./rights.js";
import { facts, findings } from "./table.js";

const FINDINGS = 20;

function link(finding) {
  if (finding.code === "dead_letters") return h("a", { href: lettersLink(finding.subscription) }, "Dead letters");
  if (finding.subscription) return h("a", { href: subscriptionLink(finding.subscription, finding.topic) }, "Look at it");
  if (finding.topic) return h("a", { href: topicLink(finding.topic) }, finding.topic);
  if (finding.pipeline) return h("a", { href: "#/pipelines" }, "Pipelines");
  return null;
}

export async function overview({ signal, title, fail }) {
  title("Overview");
  const attention = h("section", { "aria-label": "Needs attention", id: "attention" });
  const totals = h("section", { "aria-label": "Totals" });
  const plots = {
    messages: plot("Messages per second", ["published", "delivered", "acknowledged"], rate),
    bytes: plot("Bytes per second", ["published"], (value) => `${bytes(value)}/s`, { floor: 1024, unit: 1024 }),
    lag: plot("Lag", ["messages not done", "in flight"], count, { floor: 10 }),
    trouble: plot("Trouble per second", ["redelivered", "dead-lettered"], rate),
    times: plot("Time of a commit", ["commit", "sync"], ms),
    connections: plot("Connections", ["open"], count, { floor: 5 }),
    disk: plot("Disk", ["free"], bytes, { floor: 1024, unit: 1024 }),
    memory: plot("Memory", ["resident", "counted"], bytes, { floor: 1024, unit: 1024 }),
  };
  const series = {
    messages: ["published_per_second", "delivered_per_second", "acked_per_second"],
    bytes: ["bytes_per_second"],
    lag: ["lag", "in_flight"],
    trouble: ["redelivered_per_second", "dead_lettered_per_second"],
    times: ["commit_ms", "sync_ms"],
    connections: ["connections"],
    disk: ["disk_free_bytes"],
    memory: ["resident_bytes", "memory_bytes"],
  };

  async function refresh() {
    const [found, now] = await Promise.all([get("/attention", { limit: FINDINGS }, signal), get("/overview", { limit: 1 }, signal)]);
    put(attention, h("h2", {}, found.length ? "Needs attention" : "All is well"),
      found.length === FINDINGS ? h("p", { class: "empty" }, `The ${FINDINGS} most important; there may be more.`) : null,
      found.length ? findings(found, link) : h("p", { class: "empty" }, "No growing lag, no dead letters, no damage: nothing needs attention."));
    put(totals, facts([
      ["Topics", h("a", { href: "#/topics" }, count(now.topics))],
      ["Subscriptions", h("a", { href: "#/subscriptions" }, count(now.subscriptions))],
      ["Stored", bytes(now.bytes)],
      ["Lag", count(now.lag)],
      ["In flight", count(now.in_flight)],
      ["Dead letters", h("a", { href: "#/dead-letters" }, count(now.dead_letters))],
      now.load && ["Connections", h("a", { href: "#/access" }, count(now.load.connections))],
      now.load && now.load.disk_free_bytes !== null && ["Disk left", bytes(now.load.disk_free_bytes)],
      now.load && ["Memory", `${bytes(now.load.memory_used)} of ${bytes(now.load.memory_limit)}`],
      now.load && ["Running for", duration((now.time - now.load.started) / 1000)],
    ]));
  }

  async function redraw() {
    const history = await get("/history", {}, signal);
    const waiting = history.times.length === 0;
    for (const [name, each] of Object.entries(plots)) each.show(history.times, series[name].map((key) => history.series[key] || []));
    hint.hidden = !waiting;
  }
  const hint = h("p", { class: "empty", hidden: true }, "The first measurements come five seconds after the broker has started.");

  await refresh();
  every(3000, signal, refresh, fail);
  const sees = may("metrics", null, null);
  if (sees) every(5000, signal, redraw, fail);
  return [h("h1", {}, "Overview"), attention, totals,
    sees ? [hint, h("section", { class: "plots", "aria-label": "Plots" }, Object.values(plots).map((each) => each.node))]
      : h("p", { class: "empty" }, "The plots of the whole broker need the right metrics.")];
}

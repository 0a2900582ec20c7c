// One message by its place: what is in it, and what each subscription did with it.

import { get, path } from "./api.js";
import { h, put } from "./dom.js";
import { count, time } from "./format.js";
import { lettersLink, messageLink, subscriptionLink, topicLink } from "./links.js";
import { every } from "./live.js";
import { contents, keyOf } from "./payload.js";
import { badge, facts, table } from "./table.js";

const KINDS = { done: "ok", "in flight": "notice", "dead letter": "critical", "being dead-lettered": "critical", "waiting for a retry": "warning", "waiting for its key": "warning" };

function member(row) {
  if (row.state === "dead letter") return h("a", { href: lettersLink(row.subscription, { letter: row.dead_letter }) }, `dead letter ${row.dead_letter}`);
  if (row.sinks.length) return `written to ${row.sinks.join(", ")}`;
  if (row.member) return `${row.member}, since ${time(row.since)}`;
  return row.due ? `again at ${time(row.due)}` : "–";
}

/** "by shop (token:shop, 10.0.0.5, binary)", as far as it is known. */
function author({ publisher }) {
  if (!publisher) return "";
  const about = [publisher.client_id ? publisher.name : "", publisher.address, publisher.protocol].filter(Boolean);
  return ` by ${publisher.client_id || publisher.name || "a client"} (${about.join(", ")})`;
}

function history(life) {
  const events = [[life.published, life.first_published === null ? `Published${author(life)}` : "Published again, after it was a dead letter"]];
  if (life.first_published !== null) events.push([life.first_published, "First published"]);
  for (const each of life.subscriptions) {
    for (const failure of each.failures) {
      events.push([failure.time, `${each.subscription}: attempt ${failure.attempt} failed with ${failure.member}: ${failure.reason}`]);
    }
    if (each.since) events.push([each.since, `${each.subscription}: attempt ${each.attempts} is with ${each.member}`]);
  }
  return events.sort((one, other) => one[0] - other[0]);
}

export async function message({ signal, title, fail }, topic, partition, offset) {
  title(`${topic} ${partition}/${offset}`);
  const [found] = await get(path("topics", topic, "messages"), { partition, from: offset, limit: 1 }, signal);
  if (!found || found.offset !== Number(offset)) {
    return [h("h1", {}, "Not found"), h("p", { class: "problem" }, `${topic} has no message at ${partition}/${offset} any more, or not yet.`),
      h("p", {}, h("a", { href: topicLink(topic) }, "All messages of the topic"))];
  }
  const life = h("section", { "aria-label": "Life", id: "life" });
  const refresh = async () => {
    const now = await get(path("messages", found.id, "life"), {}, signal);
    put(life, h("h2", {}, "Its life"),
      h("ol", { class: "events" }, history(now).map(([at, text]) => h("li", {}, h("time", {}, time(at)), " ", text))),
      table("What each subscription did with it", [
        { title: "Subscription", cell: (row) => h("a", { href: subscriptionLink(row.subscription, row.topic) }, row.subscription) },
        { title: "State", cell: (row) => badge(row.state, KINDS[row.state]) },
        { title: "Attempts", number: true, cell: (row) => count(Math.max(row.attempts, ...row.failures.map((each) => each.attempt))) },
        { title: "Where", cell: member },
      ], now.subscriptions, { empty: "No subscription gets this message." }));
  };
  every(2000, signal, refresh, () => put(life, h("p", { class: "empty" }, "Its id does not lead back to it, so its life is not known.")));
  const step = (by, text) => h("a", { href: messageLink(topic, partition, Number(offset) + by) }, text);
  return [
    h("h1", {}, h("a", { href: topicLink(topic), class: "up" }, topic), ` ${partition}/${offset}`),
    facts([["Published", time(found.timestamp)], ["Key", keyOf(found) ?? "–"], ["Id", found.id, "wide"]]),
    h("nav", { class: "row", "aria-label": "Neighbours" }, Number(offset) > 0 ? step(-1, "← Previous") : null, step(1, "Next →")),
    h("section", { "aria-label": "Contents" }, contents(found)),
    life,
  ];
}

// One message by its place: what is in it, and what each subscription did with it.

import { get, path } from "./api.js";
import { h, put } from "./dom.js";
import { count, time } from "./format.js";
import { lettersLink, messageLink, subscriptionLink, topicLink } from "./links.js";
import { every } from "./live.js";
import { contents, keyOf } from "./payload.js";
import { badge, facts, table } from "./table.js";

const KINDS = { done: "ok", "in flight": "notice", "dead letter": "critical", "being dead-lettered": "critical", "waiting for a retry": "warning", "waiting for its key": "warning" };

const letter = (row) => h("a", { href: lettersLink(row.subscription, { letter: row.dead_letter }) }, `dead letter ${row.dead_letter}`);

function member(row) {
  if (row.state === "dead letter") return letter(row);
  if (row.redriven) return ["redriven as ", place(row.redriven)];
  if (row.sinks.length) return `written to ${row.sinks.join(", ")}`;
  const last = row.deliveries.at(-1);
  if (row.state === "done" && last?.outcome === "acknowledged") return `acknowledged by ${last.member}`;
  if (row.member) return `${row.member}, since ${time(row.since)}`;
  return row.due ? `again at ${time(row.due)}` : "–";
}

/** "by shop (token:shop, 10.0.0.5, binary)", as far as it is known. */
function author({ publisher }) {
  if (!publisher) return "";
  const about = [publisher.client_id ? publisher.name : "", publisher.address, publisher.protocol].filter(Boolean);
  return ` by ${publisher.client_id || publisher.name || "a client"} (${about.join(", ")})`;
}

const place = (where) => h("a", { href: messageLink(where.topic, where.partition, where.offset) }, `${where.topic} ${where.partition}/${where.offset}`);

/** [time, words]: everything that is known, oldest first. */
function history(life) {
  const events = [];
  if (life.first_published !== null) events.push([life.first_published, ["First published", life.origin ? [" as ", place(life.origin)] : ""]]);
  events.push([life.published, life.first_published === null ? `Published${author(life)}` : "Published again, after it was a dead letter"]);
  for (const each of life.subscriptions) {
    const say = (at, ...words) => events.push([at, [`${each.subscription}: `, ...words]]);
    for (const delivery of each.deliveries) {
      say(delivery.since, `attempt ${delivery.attempt} went to ${delivery.member}`);
      if (delivery.outcome === "acknowledged") say(delivery.until ?? delivery.since, `acknowledged by ${delivery.member}`);
      if (delivery.outcome === "given back") say(delivery.until ?? delivery.since, `${delivery.member} gave it back, or the subscription was moved`);
    }
    for (const failure of each.failures) say(failure.time, `attempt ${failure.attempt} failed with ${failure.member}: ${failure.reason}`);
    if (each.dead_lettered) say(each.dead_lettered, "given up, and kept as ", letter(each));
    if (each.redriven) {
      say(each.redriven.dead_lettered, "given up, and kept as a dead letter");
      say(each.redriven.time, "redriven as ", place(each.redriven));
    }
  }
  return events.map((event, order) => [...event, order]).sort((one, other) => one[0] - other[0] || one[2] - other[2]);
}

export async function message({ signal, title }, topic, partition, offset) {
  title(`${topic} ${partition}/${offset}`);
  const [found] = await get(path("topics", topic, "messages"), { partition, from: offset, limit: 1 }, signal);
  if (!found || found.offset !== Number(offset)) {
    return [h("h1", {}, "Not found"), h("p", { class: "problem" }, `${topic} has no message at ${partition}/${offset} any more, or not yet.`),
      h("p", {}, h("a", { href: topicLink(topic) }, "All messages of the topic"))];
  }
  const life = h("section", { "aria-label": "Life", id: "life" });
  const refresh = async () => {
    const now = await get(path("topics", topic, "messages", partition, offset, "life"), {}, signal);
    put(life, h("h2", {}, "Its life"),
      h("ol", { class: "events" }, history(now).map(([at, text]) => h("li", {}, h("time", {}, time(at)), " ", text))),
      table("What each subscription did with it", [
        { title: "Subscription", cell: (row) => h("a", { href: subscriptionLink(row.subscription, row.topic) }, row.subscription) },
        { title: "State", cell: (row) => badge(row.state, KINDS[row.state]) },
        { title: "Attempts", number: true, cell: (row) => count(Math.max(row.attempts, ...row.failures.map((each) => each.attempt), ...row.deliveries.map((each) => each.attempt))) },
        { title: "Where", cell: member },
      ], now.subscriptions, { empty: "No subscription gets this message." }));
  };
  every(2000, signal, refresh, (error) => put(life, h("p", { class: "problem" }, error.message)));
  const step = (by, text) => h("a", { href: messageLink(topic, partition, Number(offset) + by) }, text);
  return [
    h("h1", {}, h("a", { href: topicLink(topic), class: "up" }, topic), ` ${partition}/${offset}`),
    facts([["Published", time(found.timestamp)], ["Key", keyOf(found) ?? "–"], ["Id", found.id, "wide"]]),
    h("nav", { class: "row", "aria-label": "Neighbours" }, Number(offset) > 0 ? step(-1, "← Previous") : null, step(1, "Next →")),
    h("section", { "aria-label": "Contents" }, contents(found)),
    life,
  ];
}

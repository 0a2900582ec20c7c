// The list of subscriptions, and a form to create one.

import { path, post } from "./api.js";
import { field, h, select } from "./dom.js";
import { count, rate } from "./format.js";
import { lettersLink, subscriptionLink } from "./links.js";
import { listing } from "./listing.js";
import { may } from "./rights.js";
import { badge } from "./table.js";

function state(row) {
  if (row.blocked) return badge("damaged", "critical");
  if (row.paused) return badge("paused", "warning");
  if (row.lag && !row.members) return badge("no members", "warning");
  if (row.verdict !== "ok") return badge(row.verdict, "warning");
  if (!row.lag) return badge("idle", "ok");
  return row.rate ? badge("working", "notice") : badge("not moving", "warning");
}

const COLUMNS = [
  { title: "Subscription", key: "subscription", cell: (row) => h("a", { href: subscriptionLink(row.subscription, row.topic) }, row.subscription) },
  { title: "Topic", key: "topic", cell: (row) => row.topic },
  { title: "State", cell: state },
  { title: "Lag", key: "lag", number: true, cell: (row) => count(row.lag) },
  { title: "Acknowledged/s", key: "rate", number: true, cell: (row) => rate(row.rate) },
  { title: "In flight", key: "in_flight", number: true, cell: (row) => count(row.in_flight) },
  { title: "Retries", number: true, cell: (row) => count(row.waiting_for_retry) },
  { title: "Members", key: "members", number: true, cell: (row) => count(row.members) },
  { title: "Dead letters", number: true, cell: (row) => (row.dead_letters ? h("a", { href: lettersLink(row.subscription) }, count(row.dead_letters)) : "0") },
];

function form() {
  const name = h("input", { type: "text", id: "new-subscription", required: true });
  const topic = h("input", { type: "text", id: "new-pattern", required: true });
  const start = select({}, [["earliest", "the oldest message"], ["latest", "now"]], "earliest");
  return {
    fields: [field("Name", name), field("Topic or pattern", topic, "* is one word, > at the end is the rest"), field("Begin at", start)],
    async make() {
      await post(path("subscribe", topic.value), { group: name.value, start: start.value });
      return `Created subscription ${name.value}.`;
    },
  };
}

export const subscriptions = (page) =>
  listing(page, {
    name: "Subscriptions",
    from: "/tables/subscriptions",
    columns: COLUMNS,
    sort: "lag",
    descending: true,
    by: "name or topic",
    empty: "There are no subscriptions. Create one here, or let a client subscribe.",
    none: "No subscription matches.",
    create: may("consume") && { id: "create-subscription", form, text: "Create a subscription" },
  });

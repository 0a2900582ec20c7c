// The list of subscriptions, and a form to create one.

import { get, path, post } from "./api.js";
import { dialog, field, h, put, select, toast } from "./dom.js";
import { count, rate } from "./format.js";
import { lettersLink, subscriptionLink } from "./links.js";
import { every } from "./live.js";
import { may } from "./rights.js";
import { badge, pager, table } from "./table.js";

const LIMIT = 50;

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

function create(again) {
  const name = h("input", { type: "text", id: "new-subscription", required: true });
  const topic = h("input", { type: "text", id: "new-pattern", required: true });
  const start = select({}, [["earliest", "the oldest message"], ["latest", "now"]], "earliest");
  return dialog("Create a subscription", [field("Name", name), field("Topic or pattern", topic, "* is one word, > at the end is the rest"), field("Begin at", start)],
    [["Create", async () => {
      await post(path("subscribe", topic.value), { group: name.value, start: start.value });
      toast(`Created subscription ${name.value}.`);
      again();
      return true;
    }]]);
}

export async function subscriptions({ signal, query, keep, title }) {
  title("Subscriptions");
  const shown = {
    match: query.get("match") || "",
    sort: query.get("sort") || "lag",
    descending: (query.get("descending") || "true") === "true",
    skip: Number(query.get("skip")) || 0,
  };
  const list = h("div", { id: "list" });
  const search = h("input", { type: "search", id: "filter", "aria-label": "Filter subscriptions by name or topic", placeholder: "Filter by name or topic", value: shown.match });
  let number = 0;

  async function refresh() {
    const mine = ++number;
    const found = await get("/tables/subscriptions", { ...shown, limit: LIMIT }, signal);
    if (mine !== number) return;
    const sorted = { by: shown.sort, descending: shown.descending, set: (sort, descending) => change({ sort, descending, skip: 0 }) };
    put(list, table("Subscriptions", COLUMNS, found.rows, { sorted, empty: shown.match ? "No subscription matches." : "There are no subscriptions." }),
      pager(shown.skip, LIMIT, found.total, (skip) => change({ skip })));
  }
  function change(changes) {
    Object.assign(shown, changes);
    keep({ ...shown, skip: shown.skip || "" });
    refresh().catch(() => {});
  }
  search.addEventListener("input", () => change({ match: search.value.trim(), skip: 0 }));
  await refresh();
  every(3000, signal, refresh);
  return [h("div", { class: "row spread" }, h("h1", {}, "Subscriptions"), h("div", { class: "row" }, search,
    may("consume") ? h("button", { type: "button", class: "primary", onclick: () => create(refresh) }, "Create a subscription") : null)), list];
}

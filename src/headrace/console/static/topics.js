// The list of topics. The broker filters, sorts and cuts it, so 5,000 topics are as quick as five.

import { ask, get, path } from "./api.js";
import { dialog, field, h, put, select, toast } from "./dom.js";
import { bytes, count, rate } from "./format.js";
import { topicLink } from "./links.js";
import { every } from "./live.js";
import { may } from "./rights.js";
import { badge, pager, table } from "./table.js";

const LIMIT = 50;

const COLUMNS = [
  { title: "Topic", key: "topic", cell: (row) => [h("a", { href: topicLink(row.topic) }, row.topic), row.read_only ? badge("read-only", "critical") : null] },
  { title: "Published/s", key: "rate", number: true, cell: (row) => rate(row.rate) },
  { title: "Messages", key: "messages", number: true, cell: (row) => count(row.messages) },
  { title: "Size", key: "bytes", number: true, cell: (row) => bytes(row.bytes) },
  { title: "Backlog", key: "backlog", number: true, cell: (row) => count(row.backlog) },
  { title: "Subscriptions", key: "subscriptions", number: true, cell: (row) => count(row.subscriptions) },
  { title: "Partitions", number: true, cell: (row) => count(row.partitions) },
  { title: "Kept", cell: (row) => (row.retention_hours === null ? "for ever" : `${count(row.retention_hours)} h`) },
];

function create(again) {
  const name = h("input", { type: "text", id: "new-topic", required: true, autocapitalize: "none", spellcheck: "false" });
  const partitions = h("input", { type: "number", min: 1, max: 1000, value: "1" });
  const hours = h("input", { type: "number", min: 1, placeholder: "the broker's default" });
  const durability = select({}, [["", "the broker's default"], ["always", "always: after a sync"], ["interval", "interval"], ["never", "never"]], "");
  return dialog("Create a topic", [field("Name", name), field("Partitions", partitions), field("Keep messages for (hours)", hours), field("Durability", durability)],
    [["Create", async () => {
      const body = { partitions: Number(partitions.value) };
      if (hours.value) body.retention_hours = Number(hours.value);
      if (durability.value) body.durability = durability.value;
      await ask("PUT", path("topics", name.value), { body });
      toast(`Created topic ${name.value}.`);
      again();
      return true;
    }]]);
}

export async function topics({ signal, query, keep, title }) {
  title("Topics");
  const shown = {
    match: query.get("match") || "",
    sort: query.get("sort") || "topic",
    descending: query.get("descending") === "true",
    skip: Number(query.get("skip")) || 0,
  };
  const list = h("div", { id: "list" });
  const search = h("input", { type: "search", id: "filter", "aria-label": "Filter topics by name", placeholder: "Filter by name", value: shown.match });
  let number = 0;

  async function refresh() {
    const mine = ++number;
    const found = await get("/tables/topics", { ...shown, limit: LIMIT }, signal);
    if (mine !== number) return; // a later question has been answered
    const sorted = { by: shown.sort, descending: shown.descending, set: (sort, descending) => change({ sort, descending, skip: 0 }) };
    put(list, table("Topics", COLUMNS, found.rows, { sorted, empty: shown.match ? "No topic has this in its name." : "There are no topics. The first publish creates one." }),
      pager(shown.skip, LIMIT, found.total, (skip) => change({ skip })));
  }
  function change(changes) {
    Object.assign(shown, changes);
    keep({ ...shown, skip: shown.skip || "", descending: shown.descending || "", sort: shown.sort === "topic" ? "" : shown.sort });
    refresh().catch(() => {});
  }
  search.addEventListener("input", () => change({ match: search.value.trim(), skip: 0 }));

  await refresh();
  every(3000, signal, refresh);
  return [h("div", { class: "row spread" }, h("h1", {}, "Topics"), h("div", { class: "row" }, search,
    may("manage") ? h("button", { type: "button", id: "create-topic", class: "primary", onclick: () => create(refresh) }, "Create a topic") : null)), list];
}

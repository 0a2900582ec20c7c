// The list of topics, and a form to create one.

import { ask, path } from "./api.js";
import { field, h, select } from "./dom.js";
import { bytes, count, rate } from "./format.js";
import { topicLink } from "./links.js";
import { listing } from "./listing.js";
import { may } from "./rights.js";
import { badge } from "./table.js";

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

function form() {
  const name = h("input", { type: "text", id: "new-topic", required: true, autocapitalize: "none", spellcheck: "false" });
  const partitions = h("input", { type: "number", min: 1, max: 1000, value: "1" });
  const hours = h("input", { type: "number", min: 1, placeholder: "the broker's default" });
  const durability = select({}, [["", "the broker's default"], ["always", "always: after a sync"], ["interval", "interval"], ["never", "never"]], "");
  return {
    fields: [field("Name", name), field("Partitions", partitions), field("Keep messages for (hours)", hours), field("Durability", durability)],
    async make() {
      const body = { partitions: Number(partitions.value) };
      if (hours.value) body.retention_hours = Number(hours.value);
      if (durability.value) body.durability = durability.value;
      await ask("PUT", path("topics", name.value), { body });
      return `Created topic ${name.value}.`;
    },
  };
}

export const topics = (page) =>
  listing(page, {
    name: "Topics",
    from: "/tables/topics",
    columns: COLUMNS,
    sort: "topic",
    descending: false,
    by: "name",
    empty: "There are no topics. The first publish creates one.",
    none: "No topic has this in its name.",
    create: may("manage") && { id: "create-topic", form, text: "Create a topic" },
  });

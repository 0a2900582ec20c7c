// One topic: its messages, a form to publish, its subscriptions and settings.

import { ask, get, path, remove } from "./api.js";
import { browser } from "./browse.js";
import { confirmed, dialog, field, h, put, toast } from "./dom.js";
import { ago, bytes, count, rate } from "./format.js";
import { subscriptionLink, topicLink } from "./links.js";
import { every } from "./live.js";
import { plot } from "./plots.js";
import { publisher } from "./publish.js";
import { covers, may } from "./rights.js";
import { badge, facts, table } from "./table.js";

const TABS = [["", "Messages"], ["publish", "Publish"], ["details", "Clients and settings"]];

export async function topic(context, name, tab = "") {
  const { signal, title, fail } = context;
  title(name);
  const stats = await get(path("topics", name), {}, signal);
  const numbers = h("div", {});
  const lines = plot("Messages per second", ["published"], rate);

  function describe(now) {
    const broken = now.partitions.filter((each) => each.read_only);
    put(numbers, broken.map((each) => h("p", { class: "problem" }, `Partition ${each.partition} takes no publishes: ${each.read_only}`)), facts([
      ["Messages", count(now.messages)],
      ["Size", bytes(now.bytes)],
      ["Backlog", count(now.backlog)],
      ["Partitions", count(now.partitions.length)],
      ["Durability", now.durability],
      ["Kept", now.settings.retention_hours === null ? "for ever" : `${count(now.settings.retention_hours)} h`],
      ["Created", ago(now.created)],
    ]));
  }
  async function refresh() {
    const [now, history] = await Promise.all([get(path("topics", name), {}, signal), get(path("topics", name, "history"), {}, signal)]);
    describe(now);
    lines.show(history.times, [history.series.published_per_second]);
  }
  describe(stats);
  every(5000, signal, refresh, fail);

  const browses = may("browse", name);
  const publishes = may("publish", name);
  const tabs = TABS.filter(([key]) => key !== "publish" || publishes);
  let content;
  if (tab === "publish" && publishes) content = publisher(name, stats, signal);
  else if (tab === "details") content = await details(name, stats, context);
  else if (browses) content = browser(name, stats, context);
  else content = h("p", { class: "empty" }, "To see payloads, you need the right browse over this topic.");
  return [
    h("h1", {}, h("a", { href: "#/topics", class: "up" }, "Topics"), " ", name),
    numbers,
    h("nav", { class: "tabs", "aria-label": "Views of the topic" }, tabs.map(([key, text]) =>
      h("a", { href: topicLink(name, key), "aria-current": key === tab ? "page" : null }, text))),
    tab === "details" ? lines.node : null,
    content,
  ];
}

async function details(name, stats, { signal, fail }) {
  const groups = h("section", { "aria-label": "Subscriptions" });
  const writers = h("section", { "aria-label": "Publishers", id: "publishers" });
  const clients = h("section", { "aria-label": "Clients" });
  async function refresh() {
    const found = await get("/tables/subscriptions", { topic: name, limit: 200, sort: "lag", descending: true }, signal);
    put(groups, h("h2", {}, "Subscriptions"), table("Subscriptions", [
      { title: "Subscription", cell: (row) => [h("a", { href: subscriptionLink(row.subscription, row.topic) }, row.subscription), row.paused ? badge("paused", "warning") : null] },
      { title: "On", cell: (row) => row.topic },
      { title: "Lag", number: true, cell: (row) => count(row.lag) },
      { title: "Acknowledged/s", number: true, cell: (row) => rate(row.rate) },
      { title: "In flight", number: true, cell: (row) => count(row.in_flight) },
      { title: "Members", number: true, cell: (row) => count(row.members) },
    ], found.rows, { empty: "Nobody has subscribed to this topic." }));
    const published = await get(path("topics", name, "publishers"), { limit: 100 }, signal);
    put(writers, h("h2", {}, "Clients that published to it lately"), table("Publishers", [
      { title: "Client", cell: (row) => row.client_id || "–" },
      { title: "Login", cell: (row) => row.name || "–" },
      { title: "Address", cell: (row) => row.address || "–" },
      { title: "Protocol", cell: (row) => row.protocol },
      { title: "Last", cell: (row) => ago(row.last) },
    ], published, { empty: "Nobody, since the broker started." }));
    const connected = await get("/clients", { limit: 1000 }, signal);
    const here = connected.filter((client) => client.subscriptions.some((each) => covers(each.topic, name)));
    put(clients, h("h2", {}, "Clients that read it now"), table("Clients", [
      { title: "Client", cell: (row) => row.client_id || "–" },
      { title: "Login", cell: (row) => row.name },
      { title: "Address", cell: (row) => row.address },
      { title: "Holds", number: true, cell: (row) => count(row.in_flight) },
    ], here, { empty: "No connection subscribes to it at present." }));
  }
  await refresh();
  every(3000, signal, refresh, fail);
  const partitions = table("Partitions", [
    { title: "Partition", cell: (row) => String(row.partition) },
    { title: "First offset", number: true, cell: (row) => count(row.start_offset) },
    { title: "End offset", number: true, cell: (row) => count(row.end_offset) },
    { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
    { title: "State", cell: (row) => (row.read_only ? badge("read-only", "critical") : "ok") },
  ], stats.partitions);
  const settings = facts(Object.entries(stats.settings).map(([key, value]) => [key, value === null ? "–" : String(value)]));
  const manage = may("manage", name) ? h("div", { class: "row" },
    h("button", { type: "button", class: "plain", onclick: () => change(name, stats) }, "Change settings"),
    h("button", { type: "button", class: "danger", id: "delete-topic", onclick: async () => {
      if (await confirmed(`Delete ${name}?`, `All ${count(stats.messages)} messages of ${name} and the subscriptions on it alone are deleted. This cannot be undone.`, "Delete the topic")) {
        await remove(path("topics", name)).then(() => {
          toast(`Deleted ${name}.`);
          location.hash = "#/topics";
        }, (error) => toast(error.message, "bad"));
      }
    } }, "Delete the topic")) : null;
  return [groups, writers, clients, h("section", { "aria-label": "Partitions" }, h("h2", {}, "Partitions"), partitions),
    h("section", { "aria-label": "Settings" }, h("h2", {}, "Settings"), settings, manage)];
}

function change(name, stats) {
  const hours = h("input", { type: "number", min: 1, value: stats.settings.retention_hours ?? "" });
  const size = h("input", { type: "number", min: 1, value: stats.settings.retention_bytes ?? "" });
  const partitions = h("input", { type: "number", min: stats.partitions.length, value: stats.partitions.length });
  return dialog(`Settings of ${name}`, [field("Keep messages for (hours)", hours, "Empty: for ever"), field("Keep at most (bytes)", size, "Empty: no limit"),
    field("Partitions", partitions, "Partitions can be added, not removed. Keys move to other partitions then.")],
  [["Change", async () => {
    const body = { retention_hours: hours.value ? Number(hours.value) : null, retention_bytes: size.value ? Number(size.value) : null };
    if (Number(partitions.value) !== stats.partitions.length) body.partitions = Number(partitions.value);
    await ask("PATCH", path("topics", name), { body });
    toast("Changed.");
    dispatchEvent(new Event("hashchange"));
    return true;
  }]]);
}

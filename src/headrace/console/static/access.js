// Who am I, what may I do; who is connected; who changed what.

import { ask, get, path } from "./api.js";
import { h, put } from "./dom.js";
import { ago, bytes, count, time } from "./format.js";
import { every } from "./live.js";
import { may, whoAmI } from "./rights.js";
import { badge, facts, table } from "./table.js";

const AUDITED = 100;

async function audit(signal) {
  const stats = await get(path("topics", "__audit"), {}, signal);
  const [{ start_offset: first, end_offset: end }] = stats.partitions;
  const cursor = `0:${Math.max(first, end - AUDITED)}`;
  const found = await ask("GET", path("topics", "__audit", "messages"), { query: { cursor, limit: AUDITED }, signal });
  return found.map((message) => message.data).reverse();
}

function rights(me) {
  if (me.administrator) return h("p", {}, "You may do everything.");
  if (!me.grants.length) return h("p", { class: "empty" }, "You have no rights.");
  return table("Rights", [
    { title: "Rights", cell: (row) => row[0].split(",").map((right) => badge(right)) },
    { title: "Over topics", cell: (row) => h("code", {}, row[1]) },
    { title: "Over names", cell: (row) => h("code", {}, row[2] || ">") },
  ], me.grants.map((grant) => grant.split(":")));
}

export async function access({ signal, title, fail }) {
  title("Access");
  const me = whoAmI();
  const clients = h("section", { "aria-label": "Clients", id: "clients" });
  const trail = h("section", { "aria-label": "Audit trail", id: "audit" });
  const people = h("section", { "aria-label": "Users and tokens" });

  async function refresh() {
    const found = await get("/clients", { limit: 500 }, signal);
    put(clients, h("h2", {}, `Connections (${found.length})`), table("Connections", [
      { title: "Client", cell: (row) => row.client_id || "–" },
      { title: "Login", cell: (row) => row.name },
      { title: "Address", cell: (row) => row.address },
      { title: "Protocol", cell: (row) => row.protocol },
      { title: "Since", cell: (row) => ago(row.connected) },
      { title: "Subscriptions", cell: (row) => row.subscriptions.map((each) => each.subscription || each.topic).join(", ") || "–" },
      { title: "Holds", number: true, cell: (row) => count(row.in_flight) },
      { title: "Not read", number: true, cell: (row) => bytes(row.unsent_bytes) },
    ], found));
  }
  async function audited() {
    let rows;
    try {
      rows = await audit(signal);
    } catch (error) {
      const text = error.status === 404 ? "Nothing was changed since this broker has users, or it has none." : error.message;
      put(trail, h("h2", {}, "Audit trail"), h("p", { class: "empty" }, text));
      return;
    }
    put(trail, h("h2", {}, "Audit trail"), table("Audit trail", [
      { title: "Time", cell: (row) => time(row.time) },
      { title: "Who", cell: (row) => row.who },
      { title: "From", cell: (row) => row.from },
      { title: "Action", cell: (row) => row.action },
      { title: "Target", cell: (row) => row.target || "–" },
      { title: "Outcome", cell: (row) => badge(row.outcome, row.outcome === "ok" ? "ok" : "warning") },
      { title: "Arguments", cell: (row) => h("code", {}, row.arguments && Object.keys(row.arguments).length ? JSON.stringify(row.arguments) : "–") },
    ], rows, { empty: "Nothing yet." }));
  }
  async function listed() {
    const [users, tokens] = await Promise.all([get("/access/users", {}, signal), get("/access/tokens", {}, signal)]);
    put(people, h("h2", {}, "Users"), table("Users", [
      { title: "User", cell: (row) => [row.user, row.disabled ? badge("disabled", "warning") : null] },
      { title: "Grants", cell: (row) => row.grants.map((grant) => h("div", {}, h("code", {}, grant))) },
      { title: "Tokens", cell: (row) => row.tokens.join(", ") || "–" },
    ], users, { empty: "There are no users." }), h("h2", {}, "Tokens"), table("Tokens", [
      { title: "Token", cell: (row) => [row.token, row.expired ? badge("expired", "warning") : null] },
      { title: "User", cell: (row) => row.user || "–" },
      { title: "Grants", cell: (row) => row.grants.map((grant) => h("div", {}, h("code", {}, grant))) },
      { title: "Expires", cell: (row) => (row.expires ? time(row.expires) : "never") },
    ], tokens, { empty: "There are no tokens." }), h("p", { class: "empty" }, "headrace users and headrace tokens change them."));
  }

  await refresh();
  every(3000, signal, refresh, fail);
  if (me.name !== "anyone" && may("browse", "__audit")) every(5000, signal, audited);
  if (may("admin") && me.name !== "anyone") listed().catch(() => {});
  return [h("h1", {}, "Access"),
    h("section", { "aria-label": "You" }, h("h2", {}, "You"),
      me.name === "anyone" ? h("p", {}, "This broker has no access control: everybody who reaches it may do everything. Add the first user with ", h("code", {}, "headrace users add"), " to change that.")
        : facts([["Login", me.name], ["Administrator", me.administrator ? "yes" : "no"]]),
      me.name === "anyone" ? null : rights(me)), clients, trail, people];
}

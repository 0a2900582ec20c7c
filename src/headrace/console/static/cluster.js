// The nodes of a cluster: which slots each of them serves, how far behind its subscriptions are, and draining one.

import { get, path, post } from "./api.js";
import { button, confirmed, h, put, toast } from "./dom.js";
import { count, plural } from "./format.js";
import { every } from "./live.js";
import { may, whoAmI } from "./rights.js";
import { badge, facts, findings, table } from "./table.js";

function state(node) {
  if (!node.reachable) return badge("unreachable", "critical");
  if (node.kafka_away) return badge("Kafka away", "critical");
  if (node.drained) return badge("drained", "warning");
  return node.slots.length ? badge("serving", "ok") : badge("idle", "notice");
}

/** What is wrong, in words. */
function problems(found) {
  const list = [];
  const say = (severity, text) => list.push({ severity, text });
  if (found.missing.length) {
    say("critical", `No node serves ${found.missing.length === 1 ? "slot" : "slots"} ${found.missing.join(", ")}: publishes to their partitions wait, and then fail.`);
  }
  for (const node of found.nodes) {
    if (!node.reachable) say("critical", `${node.node} cannot be reached. If it is gone, the others take its slots within seconds.`);
    else if (node.kafka_away) say("critical", `Kafka does not answer ${node.node}: publishes wait, and then fail.`);
    else if (node.drained) say("notice", `${node.node} is drained: it serves nothing, and forwards requests. Stop it, and start it again.`);
  }
  return list;
}

/** A lane for each node, with a box for each of its slots; the darker, the larger its lag. */
function lanes(found) {
  const most = Math.max(1, ...found.owners.map((slot) => slot.lag));
  const lane = (name, slots, kind) => h("li", { class: kind },
    h("span", { class: "lane-name" }, name, h("small", {}, ` ${plural(slots.length, "slot")}`)),
    h("ul", { class: "slots", "aria-label": `Slots of ${name}` }, slots.map((slot) => {
      const text = `${plural(slot.partitions, "partition")}, lag ${count(slot.lag)}`;
      const part = slot.lag ? Math.max(1, Math.ceil((slot.lag / most) * 4)) : 0;
      return h("li", { class: `slot behind-${part}`, title: `Slot ${slot.slot}: ${kind ? "no node serves it" : text}` },
        slot.slot, h("span", { class: "hidden" }, kind ? "" : ` (${text})`));
    })));
  const orphans = found.owners.filter((slot) => slot.node === null);
  return h("ul", { class: "lanes" },
    found.nodes.map((node) => lane(node.node, found.owners.filter((slot) => slot.node === node.node), null)),
    orphans.length ? lane("no node", orphans, "nobody") : null);
}

export async function cluster({ signal, title, fail }) {
  title("Cluster");
  const heading = h("h1", {}, "Cluster");
  const attention = h("section", { "aria-label": "Needs attention", id: "attention" });
  const totals = h("section", { "aria-label": "Totals" });
  const nodes = h("section", { "aria-label": "Nodes", id: "nodes" });
  const slots = h("section", { "aria-label": "Slots", id: "slots" });

  function drain(node, found) {
    const others = found.nodes.filter((each) => each.reachable && !each.drained && each.node !== node.node);
    if (!whoAmI().administrator || !node.reachable || node.drained || !others.length) return "–";
    return button("Drain", async () => {
      const text = `${plural(node.slots.length, "slot")} will move to ${others.map((each) => each.node).join(", ")}. Clients notice a short pause. `
        + `${node.node} then serves nothing until it is started again; it forwards requests until you stop it.`;
      if (!(await confirmed(`Drain ${node.node}?`, text, "Drain the node"))) return;
      await post(path("cluster", node.node, "drain"));
      toast(`${node.node} is drained: stop it, and start it again when you like.`);
      await refresh();
    }, { class: "danger small", "data-focus": `drain-${node.node}` });
  }

  async function refresh() {
    const found = await get("/cluster", {}, signal);
    const wrong = problems(found);
    const sum = (name) => found.nodes.reduce((total, node) => total + node[name], 0);
    heading.textContent = `Cluster ${found.cluster}`;
    put(attention, h("h2", {}, wrong.length ? "Needs attention" : "All is well"),
      wrong.length ? findings(wrong) : h("p", { class: "empty" }, "Every slot has an owner, and every node can be reached."));
    put(totals, facts([
      ["Nodes", count(found.nodes.length)],
      ["Slots served", `${found.slots - found.missing.length} of ${found.slots}`],
      ["Partitions", count(sum("partitions"))],
      ["Connections", count(sum("connections"))],
      ["Lag", count(sum("lag"))],
    ]));
    put(nodes, h("h2", {}, "Nodes"), table("Nodes", [
      { title: "Node", cell: (row) => h("b", {}, row.node) },
      { title: "State", cell: state },
      { title: "Slots", number: true, cell: (row) => count(row.slots.length) },
      { title: "Partitions", number: true, cell: (row) => count(row.partitions) },
      { title: "Connections", number: true, cell: (row) => count(row.connections) },
      { title: "Lag", number: true, cell: (row) => count(row.lag) },
      { title: "Moves", number: true, cell: (row) => count(row.moves) },
      { title: "Action", cell: (row) => drain(row, found) },
    ], found.nodes));
    put(slots, h("h2", {}, "Slots"), lanes(found),
      h("p", { class: "empty" }, "A slot is a part of the partitions of all topics; its owner stores and delivers their messages. The stronger its colour, the larger its lag."));
  }

  await refresh();
  every(2000, signal, refresh, fail);
  return [h("div", { class: "row spread" }, heading,
    may("metrics", ">", ">") ? h("a", { href: "/metrics", id: "metrics", target: "_blank", rel: "noopener" }, "Metrics of this node") : null),
  attention, totals, nodes, slots];
}

// One subscription: why it is where it is, who holds what, and moving it.

import { ask, get, path, post, remove } from "./api.js";
import { button, confirmed, dialog, field, h, put, select, toast } from "./dom.js";
import { ago, count, plural, rate, time, until } from "./format.js";
import { lettersLink, messageLink, topicLink } from "./links.js";
import { every } from "./live.js";
import { plot } from "./plots.js";
import { mayUse } from "./rights.js";
import { badge, facts, findings, table } from "./table.js";

/** "0/17 for 5 s, attempt 1, deadline in 25 s" */
const held = (each) => h("li", {}, h("a", { href: messageLink(each.topic, each.partition, each.offset) }, `${each.partition}/${each.offset}`),
  ` for ${ago(each.since).replace("\u00a0ago", "")}, attempt ${each.attempt}, deadline ${until(each.deadline)}`);

const STATES = { stuck: "critical", slow: "warning", working: "notice", idle: "ok" };

export async function subscription(context, name) {
  const { signal, query, title, fail } = context;
  title(name);
  const where = { topic: query.get("topic") || "" };
  const address = (...words) => path("subscriptions", name, ...words);
  const lag = plot("Lag", ["messages not done"], count, { floor: 10 });
  const speed = plot("Messages per second", ["delivered", "acknowledged"], rate);
  const why = h("section", { "aria-label": "Why", id: "why" });
  const numbers = h("section", { "aria-label": "Numbers" });
  const members = h("section", { "aria-label": "Members", id: "members" });
  const places = h("section", { "aria-label": "Positions" });
  const actions = h("div", { class: "row", id: "actions" });
  let stats;

  async function refresh() {
    const [now, history, explained] = await Promise.all([
      get(address(), where, signal), get(address("history"), where, signal), get(address("explain"), where, signal)]);
    stats = now;
    lag.show(history.times, [history.series.lag]);
    speed.show(history.times, [history.series.delivered_per_second, history.series.acked_per_second]);
    const oldest = explained.oldest;
    put(why, h("h2", {}, now.lag ? "Why is it behind? " : "State ", badge(explained.state, STATES[explained.state]), explained.verdict === "ok" ? null : badge(explained.verdict, "warning")), findings(explained.findings),
      oldest ? h("p", {}, "The oldest message that is not done is ",
        h("a", { href: messageLink(oldest.topic, oldest.partition, oldest.offset) }, `${oldest.topic} ${oldest.partition}/${oldest.offset}`),
        `, published ${ago(oldest.timestamp)}: ${oldest.state}.`) : null);
    put(numbers, facts([
      ["Topic", h("a", { href: topicLink(now.topic) }, now.topic)],
      ["Lag", count(now.lag)], ["In flight", count(now.in_flight)], ["Waiting for a retry", count(now.waiting_for_retry)],
      ["Delivered", count(now.delivered)], ["Acknowledged", count(now.acked)], ["Failed", count(now.nacked + now.timeouts)],
      ["Dead letters", now.dead_lettered ? h("a", { href: lettersLink(name) }, count(now.dead_lettered)) : "0"],
    ]));
    put(members, h("h2", {}, `Members (${explained.members_total})`), table("Members", [
      { title: "Client", cell: (row) => [row.name, row.stalled ? badge("stalled", "warning") : null, row.reads ? null : badge("does not read", "warning")] },
      { title: "Address", cell: (row) => row.address || "–" },
      { title: "Joined", cell: (row) => (row.joined ? ago(row.joined) : "has left") },
      { title: "Holds", number: true, cell: (row) => `${count(row.in_flight)} of ${count(row.prefetch)}` },
      { title: "What", cell: (row) => (row.held.length ? h("ul", { class: "held" }, row.held.map(held),
        row.in_flight > row.held.length ? h("li", {}, `and ${count(row.in_flight - row.held.length)} more`) : null) : "–") },
    ], explained.members, { empty: "No member is connected." }),
    explained.retries.length ? [h("h2", {}, `Waiting for a retry (${count(explained.retries_total)})`), table("Retries", [
      { title: "Message", cell: (row) => h("a", { href: messageLink(row.topic, row.partition, row.offset) }, `${row.topic} ${row.partition}/${row.offset}`) },
      { title: "Failed", number: true, cell: (row) => plural(row.attempts, "time") },
      { title: "Again", cell: (row) => (row.due ? `${until(row.due)} (${time(row.due)})` : "as soon as a member has room") },
    ], explained.retries)] : null);
    put(places, h("h2", {}, "Positions"), table("Positions", [
      { title: "Partition", cell: (row) => `${row.topic} ${row.partition}` },
      { title: "Position", number: true, cell: (row) => count(row.position) },
      { title: "End", number: true, cell: (row) => count(row.end_offset) },
      { title: "Lag", number: true, cell: (row) => count(row.lag) },
      { title: "State", cell: (row) => (row.blocked ? badge(row.blocked, "critical") : "ok") },
    ], now.partitions.slice(0, 100)));
    offer();
  }

  function offer() {
    const managed = mayUse("manage", stats);
    put(actions,
      managed ? button(stats.paused ? "Resume" : "Pause", async () => {
        await ask("POST", address(stats.paused ? "resume" : "pause"), { body: where.topic ? { topic: where.topic } : {} });
        toast(stats.paused ? "Resumed." : "Paused: nothing is delivered.");
        await refresh();
      }, { id: "pause", "data-focus": "pause" }) : null,
      mayUse("consume", stats) ? button("Seek", () => seek(), { id: "seek", "data-focus": "seek" }) : null,
      mayUse("browse", stats) ? h("a", { class: "button", href: lettersLink(name) }, "Dead letters") : null,
      managed ? button("Delete", async () => {
        if (!(await confirmed(`Delete ${name}?`, `The position of ${name} is lost: ${plural(stats.lag, "message")} will not be delivered. This cannot be undone.`, "Delete the subscription"))) return;
        await remove(address(), where);
        toast(`Deleted ${name}.`);
        location.hash = "#/subscriptions";
      }, { class: "danger", "data-focus": "delete" }) : null);
  }

  function seek() {
    const to = select({ id: "seek-to" }, [["earliest", "the oldest message"], ["latest", "the end: skip everything"], ["time", "a time"], ["offset", "an offset"]], "earliest");
    const place = h("input", { id: "seek-place", type: "text" });
    const placeField = field("Place", place);
    placeField.hidden = true;
    const partition = h("input", { type: "number", min: 0, placeholder: "all" });
    const preview = h("div", { role: "status", id: "seek-preview" });
    const target = () => ({
      to: to.value === "time" ? new Date(place.value).toISOString() : to.value === "offset" ? place.value : to.value,
      ...(where.topic ? { topic: where.topic } : {}),
      ...(partition.value === "" ? {} : { partition: Number(partition.value) }),
    });
    let number = 0;
    async function show() {
      const mine = ++number;
      try {
        if (!placeField.hidden && !place.value) return put(preview, h("p", { class: "empty" }, "Say where."));
        const found = await get(address("seek"), target(), signal);
        if (mine !== number) return; // something else was chosen meanwhile
        put(preview, h("p", {}, h("b", {}, plural(found.again, "message")), " would be delivered again, ", h("b", {}, plural(found.skipped, "message")), " would be skipped."),
          h("p", {}, `The lag would be ${count(found.lag_after)} instead of ${count(found.lag)}.`,
            found.in_flight ? ` ${plural(found.in_flight, "delivery").replace("deliverys", "deliveries")} that members hold become stale.` : ""));
      } catch (error) {
        if (mine === number) put(preview, h("p", { class: "problem" }, error.message));
      }
    }
    to.addEventListener("change", () => {
      placeField.hidden = !["time", "offset"].includes(to.value);
      place.type = to.value === "time" ? "datetime-local" : "number";
      show();
    });
    place.addEventListener("input", show);
    partition.addEventListener("input", show);
    show();
    return dialog(`Move ${name}`, [field("To", to), placeField, field("Partition", partition), preview], [["Seek", async () => {
      const given = target();
      await post(address("seek"), { ...given, to: to.value === "offset" ? Number(given.to) : given.to });
      toast("Moved.");
      await refresh();
      return true;
    }]]);
  }

  await refresh();
  every(2000, signal, refresh, fail);
  return [h("div", { class: "row spread" }, h("h1", {}, h("a", { href: "#/subscriptions", class: "up" }, "Subscriptions"), ` ${name}`), actions),
    why, numbers, h("section", { class: "plots", "aria-label": "Plots" }, lag.node, speed.node), members, places,
    h("section", { "aria-label": "Settings" }, h("h2", {}, "Settings"), facts(Object.entries(stats.settings).map(([key, value]) => [key, value === null ? "–" : String(value)])))];
}

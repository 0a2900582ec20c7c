// The messages of a topic, without consuming any: by offset, time, partition; live; searched; exported.
//
// Pages follow the broker's cursor (partition:offset,…), which is sent as a header: that of a thousand partitions is too
// long for an address. The live tail is the same question again each second, so it pauses and resumes where it was; where
// messages come faster than anybody reads, it leaves some out and says so. A search is many requests, each over a stretch of the topic: the
// broker serves others in between, and stopping costs nothing.

import { ask, get, path } from "./api.js";
import { download, field, h, put, select } from "./dom.js";
import { count, plural } from "./format.js";
import { every } from "./live.js";
import { line } from "./payload.js";

const PAGE = 50;
const SLICE = 500;
const LIVE_MAX = 500;
const FOUND_MAX = 200;
const AT_ONCE = 6;
const LOOK_EVERY = 10;

/** The cursor from which the last messages of each partition follow; fewer of each if there are many partitions. */
function last(stats, partition) {
  const chosen = stats.partitions.filter((each) => partition === "" || each.partition === Number(partition));
  const share = Math.max(Math.ceil(1000 / Math.max(chosen.length, 1)), 1);
  return chosen.map((each) => `${each.partition}:${Math.max(each.start_offset, each.end_offset - Math.min(share, PAGE))}`).join(",");
}

/** partition -> offset */
const positions = (cursor) => new Map(cursor.split(",").map((place) => place.split(":").map(Number)));

export function browser(topic, stats, { signal, query, keep }) {
  const shown = {
    from: query.get("from") || "last",
    place: query.get("place") || "",
    partition: query.get("partition") || "",
    until: query.get("until") || "",
    find: query.get("find") || "",
    kind: query.get("kind") || "text",
  };
  let messages = [];
  let cursor = null;
  let stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());
  const list = h("div", { class: "messages", id: "messages" });
  const below = h("div", { class: "row" });
  const status = h("p", { class: "status", role: "status" });
  const address = path("topics", topic, "messages");

  async function page({ cursor: at, ...values }, limit = PAGE) {
    const query = { ...values, limit };
    if (shown.partition !== "") query.partition = shown.partition;
    const headers = at === undefined ? {} : { "X-Cursor": at };
    const found = await ask("GET", address, { query, headers, signal: stop.signal, full: true });
    cursor = found.headers.get("X-Cursor");
    return found.document;
  }
  const start = () => (shown.from === "last" ? { cursor: last(stats, shown.partition) }
    : { from: shown.from === "earliest" ? "earliest" : shown.from === "time" && shown.place ? new Date(shown.place).toISOString() : shown.place || "earliest" });

  function draw(newest = false) {
    const order = newest ? [...messages].reverse() : messages;
    put(list, order.length ? order.map(line) : h("p", { class: "empty" }, "No messages here."));
  }
  function quiet() {
    stop.abort();
    stop = new AbortController();
    live.setAttribute("aria-pressed", "false");
    live.textContent = "Live";
    cancel.hidden = true;
    progress.hidden = true;
  }

  async function load() {
    quiet();
    stats = await get(path("topics", topic), {}, stop.signal);
    messages = await page(start());
    if (shown.from === "last") {
      // An answer is bounded in bytes: go on to the end, and keep the newest of all partitions.
      for (let rounds = 0, next = messages; next.length && rounds < 20; rounds++) {
        next = await page({ cursor }, SLICE);
        messages = messages.concat(next).slice(-PAGE);
      }
    }
    status.textContent = messages.length ? `${plural(messages.length, "message")}${shown.from === "last" ? ", the newest first" : ""}` : "";
    draw(shown.from === "last");
    put(below, shown.from !== "last" && messages.length === PAGE ? more : null);
  }
  const more = h("button", { type: "button", class: "plain", id: "more", onclick: () => guarded(async () => {
    const next = await page({ cursor });
    messages = messages.concat(next);
    status.textContent = plural(messages.length, "message");
    list.append(...next.map(line));
    if (next.length < PAGE) more.remove();
  }) }, "Show more");

  // --- live ---
  const live = h("button", { type: "button", id: "live", "aria-pressed": "false", onclick: () => guarded(toggle) }, "Live");
  async function toggle() {
    if (live.getAttribute("aria-pressed") === "true") {
      quiet();
      status.textContent += ", paused";
      live.textContent = "Resume";
      return;
    }
    const resumed = live.textContent === "Resume" && cursor;
    if (!resumed) {
      shown.from = "last";
      from.value = "last";
      await load();
    }
    stop.abort();
    stop = new AbortController();
    live.setAttribute("aria-pressed", "true");
    live.textContent = "Pause";
    put(below);
    let looks = 0;
    let leftOut = 0;
    every(1000, stop.signal, async () => {
      let next;
      try {
        next = await page({ cursor }, SLICE);
        if (next.length === SLICE || ++looks % LOOK_EVERY === 0) leftOut += await catchUp();
      } catch (error) {
        if (error.code !== "offset_out_of_range") throw error;
        stats = await get(path("topics", topic), {}, stop.signal); // retention was faster, or it is another topic now
        next = await page({ cursor: last(stats, shown.partition) }, SLICE);
      }
      messages = messages.concat(next).slice(-LIVE_MAX);
      if (next.length) {
        list.querySelector(".empty")?.remove();
        list.prepend(...[...next].reverse().map(line));
        while (list.children.length > LIVE_MAX) list.lastChild.remove();
      }
      status.textContent = `Live: ${plural(messages.length, "message")}, the newest first${leftOut ? `; ${count(leftOut)} came too fast and are left out` : ""}`;
    }, (error) => {
      quiet();
      status.textContent = `${status.textContent}. It has ended: ${error.message}`;
    });
  }

  /** If the cursor is far behind the end, move it there; returns how many messages that leaves out. */
  async function catchUp() {
    stats = await get(path("topics", topic), {}, stop.signal);
    const at = positions(cursor);
    const end = positions(last(stats, shown.partition));
    let between = 0;
    for (const [partition, offset] of end) between += Math.max(0, offset - (at.get(partition) ?? offset));
    if (between <= LIVE_MAX) return 0;
    cursor = [...end].map(([partition, offset]) => `${partition}:${Math.max(offset, at.get(partition) ?? 0)}`).join(",");
    return between;
  }

  // --- searching ---
  const progress = h("progress", { hidden: true, max: 1, "aria-label": "Progress of the search" });
  const cancel = h("button", { type: "button", id: "cancel-search", class: "plain", hidden: true, onclick: () => {
    const text = status.textContent;
    quiet();
    status.textContent = `${text} Stopped.`;
  } }, "Stop the search");
  async function search() {
    quiet();
    messages = [];
    put(list);
    put(below);
    cancel.hidden = progress.hidden = false;
    const mine = stop.signal;
    let looked = 0;
    const until = shown.until ? new Date(shown.until).toISOString() : "";
    let at = { start: shown.from === "last" ? "earliest" : start().from, partition: shown.partition };
    let headers = {};
    const read = async (place) => {
      try {
        const [message] = await get(address, { partition: place.partition, from: place.offset, limit: 1 }, mine);
        return message?.offset === place.offset ? [message] : [];
      } catch (error) {
        if (error.code === "offset_out_of_range") return []; // retention was faster
        throw error;
      }
    };
    while (!mine.aborted) {
      const query = { wanted: shown.find, kind: shown.kind, until, limit: FOUND_MAX - messages.length, ...at };
      const step = await ask("GET", path("topics", topic, "search"), { query, headers, signal: mine });
      for (let first = 0; first < step.found.length; first += AT_ONCE) {
        const found = (await Promise.all(step.found.slice(first, first + AT_ONCE).map(read))).flat();
        messages.push(...found);
        list.append(...found.map(line));
      }
      looked += step.scanned;
      const total = looked + step.left;
      progress.value = total ? looked / total : 1;
      status.textContent = `${plural(messages.length, "message")} found in ${count(looked)} of ${count(total)}.`;
      if (!step.left) break;
      if (messages.length >= FOUND_MAX) {
        status.textContent += " There may be more: narrow the search.";
        break;
      }
      at = {};
      headers = { "X-Cursor": step.next };
    }
    if (mine.aborted) return;
    cancel.hidden = progress.hidden = true;
    if (!messages.length) put(list, h("p", { class: "empty" }, "Nothing found."));
  }

  async function guarded(work) {
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      quiet();
      put(list, h("p", { class: "problem" }, error.message));
    }
  }
  const run = () => {
    keep({ from: shown.from === "last" ? "" : shown.from, place: shown.place, partition: shown.partition, find: shown.find, until: shown.find ? shown.until : "", kind: shown.find ? shown.kind : "" });
    return guarded(shown.find ? search : load);
  };

  // --- controls ---
  const place = h("input", { type: "text", id: "place", value: shown.place });
  const placeField = field("Place", place);
  const dress = () => {
    placeField.hidden = !["offset", "time"].includes(shown.from);
    place.type = shown.from === "time" ? "datetime-local" : "number";
    if (shown.from === "time") place.step = 1;
    placeField.firstChild.textContent = shown.from === "time" ? "Time" : "Offset";
  };
  const from = select({ id: "from", onchange: () => {
    shown.from = from.value;
    shown.place = place.value = "";
    dress();
    if (shown.from === "offset" && partition.value === "" && stats.partitions.length > 1) partition.value = shown.partition = "0";
  } }, [["last", "the newest"], ["earliest", "the oldest"], ["offset", "an offset"], ["time", "a time"]], shown.from);
  const partition = select({ id: "partition", onchange: () => (shown.partition = partition.value) },
    [["", "all"], ...stats.partitions.map((each) => [String(each.partition), String(each.partition)])], shown.partition);
  const find = h("input", { type: "search", id: "find", value: shown.find, placeholder: "anything" });
  const until = h("input", { type: "datetime-local", id: "until", step: 1, value: shown.until });
  const untilField = field("Up to", until);
  const range = () => (untilField.hidden = !find.value.trim());
  find.addEventListener("input", range);
  range();
  const kind = select({ id: "kind", onchange: () => {
    shown.kind = kind.value;
    find.placeholder = { text: "anything", key: "a key", header: "name=value", json: "items.0.price=12" }[kind.value];
  } }, [["text", "text"], ["key", "key"], ["header", "header"], ["json", "JSON path"]], shown.kind);
  const form = h("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    shown.place = place.value;
    shown.find = find.value.trim();
    shown.until = until.value;
    run();
  } }, field("From", from), placeField, field("Partition", partition), field("Search in", kind), field("For", find), untilField,
  h("div", { class: "row" }, h("button", { class: "primary", id: "show" }, "Show"), live,
    h("button", { type: "button", class: "plain", id: "export", onclick: () => download(`${topic}.jsonl`, messages.map((each) => JSON.stringify(each)).join("\n") + "\n") }, "Export")));
  dress();
  run();
  return h("section", { "aria-label": "Messages" }, form, h("div", { class: "row" }, status, progress, cancel), list, below);
}

// Dead letters: look, correct, publish again, discard.

import { ask, exactly, get, path, post, remove } from "./api.js";
import { button, confirmed, dialog, download, field, h, put, toast } from "./dom.js";
import { ago, count, plural, time } from "./format.js";
import { lettersLink, messageLink } from "./links.js";
import { every } from "./live.js";
import { contents, digits, fromDigits, glance, shown } from "./payload.js";
import { redriving } from "./redrive.js";
import { redrives } from "./redrives.js";
import { may } from "./rights.js";
import { table } from "./table.js";

const LIMIT = 100;

export async function deadLetters({ signal, title, fail }) {
  title("Dead letters");
  const list = h("div", { id: "list" });
  async function refresh() {
    const found = await get("/dead-letters", {}, signal);
    found.sort((one, other) => other.letters - one.letters || one.topic.localeCompare(other.topic));
    put(list, table("Dead letters", [
      { title: "Subscription or topic", cell: (row) => h("a", { href: lettersLink(row.topic.replace(/\.dlq$/, "")) }, row.topic.replace(/\.dlq$/, "")) },
      { title: "Kept in", cell: (row) => row.topic },
      { title: "Letters", number: true, cell: (row) => count(row.letters) },
    ], found, { empty: "No message was given up. What a subscription cannot process after max_deliveries attempts appears here." }));
  }
  await refresh();
  every(3000, signal, refresh, fail);
  return [h("h1", {}, "Dead letters"), list];
}

export async function letters(context, name) {
  const { signal, query, keep, title } = context;
  title(`Dead letters of ${name}`);
  const address = (...words) => path("dead-letters", name, ...words);
  const chosen = new Set();
  let found = [];
  let beyond = false; // there are more
  let shownLetter = query.get("letter");
  const list = h("div", { class: "messages", id: "letters" });
  const { section, refresh } = redrives(name, signal, load);
  const tools = h("div", { class: "row", id: "tools" });
  const more = h("div", { class: "row" });
  const filter = { reason: query.get("reason") || "", topic: query.get("topic") || "" };
  const manages = (letter) => may("manage", letter.message.topic, letter.subscription);
  const after = (limit) => get(address(), { ...filter, limit, after: found.at(-1)?.offset ?? -1 }, signal);

  /** The next letters. An answer is bounded in bytes too, so only another question tells whether that was all. */
  async function next() {
    found = found.concat(await after(LIMIT));
    beyond = found.length > 0 && (await after(1)).length > 0;
  }
  async function load() {
    found = [];
    await next();
    if (shownLetter !== null && beyond && !found.some((letter) => String(letter.offset) === shownLetter)) {
      // A link to one that is further behind: begin there.
      const linked = await get(address(), { ...filter, limit: LIMIT, after: Number(shownLetter) - 1 }, signal);
      if (String(linked[0]?.offset) === shownLetter) found = linked;
    }
    for (const offset of [...chosen]) if (!found.some((letter) => letter.offset === offset)) chosen.delete(offset);
    draw();
  }
  function draw() {
    put(list, found.length ? found.map(line) : h("p", { class: "empty" }, filter.reason || filter.topic ? "No dead letter matches." : "There are no dead letters."));
    put(more, beyond ? button("Show more", async () => {
      await next();
      draw();
    }, { class: "plain", id: "more" }) : null);
    offer();
  }
  function offer() {
    const some = [...chosen];
    const all = beyond ? `${plural(found.length, "letter")} shown, there are more` : plural(found.length, "letter");
    put(tools, h("span", { role: "status" }, some.length ? `${plural(some.length, "letter")} selected` : all),
      found.some(manages) ? [
        button(some.length ? "Redrive selected" : "Redrive", () => redriving(name, { offsets: some, ...filter }, signal, redriven), { class: "primary", id: "redrive", "data-focus": "redrive" }),
        button(some.length ? "Purge selected" : "Purge all", () => purge(some), { class: "danger", id: "purge", "data-focus": "purge" })] : null,
      h("button", { type: "button", class: "plain", "data-focus": "export", onclick: () => download(`${name}.dlq.jsonl`, found.map((letter) => JSON.stringify(letter)).join("\n") + "\n") }, "Export"));
  }
  async function purge(offsets) {
    const text = offsets.length ? `${plural(offsets.length, "letter")} will be gone.` : `All dead letters of ${name} will be gone, also those that are not shown or do not match the filter.`;
    if (!(await confirmed("Purge dead letters?", `${text} This cannot be undone.`, "Purge"))) return;
    if (offsets.length) for (const offset of offsets) await remove(address(String(offset)));
    else await remove(address());
    chosen.clear();
    toast("Purged.");
    await load();
  }

  function line(letter) {
    const origin = letter.message;
    const body = h("div", { class: "message-body" });
    const box = h("input", { type: "checkbox", "aria-label": `Select letter ${letter.offset}`, checked: chosen.has(letter.offset), onchange: () => {
      if (box.checked) chosen.add(letter.offset);
      else chosen.delete(letter.offset);
      offer();
    } });
    const node = h("details", { class: "message letter", open: String(letter.offset) === shownLetter },
      h("summary", { "data-focus": `letter-${letter.offset}` }, h("span", { class: "place" }, String(letter.offset)),
        h("span", { class: "when" }, ago(letter.timestamp)), h("span", { class: "reason" }, letter.reason),
        h("span", { class: "attempts" }, plural(letter.attempts, "attempt")), h("span", { class: "glance" }, glance(origin))), body);
    const open = () => {
      if (!node.open || body.firstChild) return;
      put(body, h("p", {}, "From ", h("a", { href: messageLink(origin.topic, origin.partition, origin.offset) }, `${origin.topic} ${origin.partition}/${origin.offset}`),
        `, published ${time(origin.timestamp)}; given up by ${letter.subscription} ${time(letter.timestamp)} after ${plural(letter.attempts, "attempt")}: `, h("b", {}, letter.reason)),
      contents(origin), manages(letter) ? h("div", { class: "row" },
        button("Edit", () => edit(letter), { "data-focus": `edit-${letter.offset}` }),
        button("Redrive", () => redriving(name, { offsets: [letter.offset] }, signal, redriven), { "data-focus": `redrive-${letter.offset}` }),
        button("Purge", () => purge([letter.offset]), { class: "danger", "data-focus": `purge-${letter.offset}` })) : null);
    };
    node.addEventListener("toggle", open);
    open();
    return h("div", { class: "chosen" }, manages(letter) ? box : null, node);
  }

  async function redriven() {
    await load();
    await refresh();
  }
  async function edit(letter) {
    const { kind, text } = shown(letter.message);
    const isBinary = kind === "binary";
    const data = h("textarea", { id: "edit-data", rows: 14, spellcheck: "false", value: isBinary ? digits(letter.message.data) : text });
    const headers = h("textarea", { id: "edit-headers", rows: 4, spellcheck: "false", value: JSON.stringify(letter.message.headers, null, 2) });
    return dialog(`Edit letter ${letter.offset}`, [field({ JSON: "Payload (JSON)", binary: "Payload (hexadecimal)" }[kind] || "Payload", data), field("Headers (JSON)", headers)], [["Save", async () => {
      const body = { headers: JSON.parse(headers.value) };
      if (kind === "no value" && !data.value) delete body.data;
      else if (isBinary) Object.assign(body, { data: fromDigits(data.value), encoding: "base64" });
      else body.data = kind === "JSON" ? exactly(data.value) : data.value;
      const saved = await ask("PUT", address(String(letter.offset)), { body });
      shownLetter = String(saved.offset);
      toast(`Saved as letter ${saved.offset}.`);
      await load();
      return true;
    }]]);
  }

  const reason = h("input", { type: "search", id: "reason", value: filter.reason, placeholder: "a part of it" });
  const topic = h("input", { type: "text", id: "origin", value: filter.topic });
  const form = h("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    Object.assign(filter, { reason: reason.value.trim(), topic: topic.value.trim() });
    keep(filter);
    load().catch((error) => toast(error.message, "bad"));
  } }, field("Reason", reason), field("Topic", topic), h("div", { class: "row" }, h("button", { class: "plain" }, "Filter")));
  await load();
  return [h("h1", {}, h("a", { href: "#/dead-letters", class: "up" }, "Dead letters"), ` ${name}`), form, section, tools, list, more];
}

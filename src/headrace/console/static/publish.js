// The form that publishes. What was typed stays, also when another page was open in between.

import { ask, path } from "./api.js";
import { busy, field, h, put, select } from "./dom.js";
import { time } from "./format.js";
import { messageLink } from "./links.js";

const kept = new Map();
const NAME = /^[\w.-]+$/;

/** Text for a header of HTTP: a character for each of its bytes. */
const utf8 = (text) => Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");

function headersIn(text) {
  const found = {};
  for (const row of text.split("\n").map((each) => each.trim()).filter(Boolean)) {
    const [name, ...rest] = row.split(":");
    if (!rest.length) throw new Error(`A header is "name: value", not "${row}".`);
    if (!NAME.test(name.trim())) throw new Error(`A name of a header has letters, digits, - _ and ., which "${name.trim()}" has not.`);
    found[`X-Header-${name.trim()}`] = utf8(rest.join(":").trim());
  }
  return found;
}

export function publisher(topic, stats, signal) {
  const values = kept.get(topic) || { kind: "json", data: '{\n  "hello": "world"\n}', key: "", headers: "", delay: "", to: "", partition: "" };
  kept.set(topic, values);
  const bind = (node, name) => {
    node.value = values[name];
    node.addEventListener("input", () => (values[name] = node.value));
    return node;
  };
  const result = h("div", { role: "status" });
  const send = h("button", { class: "primary", id: "publish" }, "Publish");
  const targets = [["", "all subscriptions"], ...stats.subscriptions.map((name) => [name, name])];
  const form = h("form", { class: "publish", onsubmit: async (event) => {
    event.preventDefault();
    await busy(send, async () => {
      try {
        if (values.kind === "json") JSON.parse(values.data);
        const receipt = await ask("POST", path("publish", topic), {
          raw: values.data,
          headers: { "Content-Type": values.kind === "json" ? "application/json" : "text/plain", ...headersIn(values.headers) },
          query: { key: values.key, delay: values.delay, to: values.to, partition: values.partition },
          signal,
        });
        put(result, h("p", { class: "good" }, receipt.scheduled
          ? `Scheduled; its id is ${receipt.id}.`
          : ["Published at ", time(receipt.timestamp), ": ", h("a", { href: messageLink(topic, receipt.partition, receipt.offset) }, `${receipt.partition}/${receipt.offset}`)]));
      } catch (error) {
        const text = error instanceof SyntaxError ? `The payload is not JSON: ${error.message}` : error.message;
        put(result, h("p", { class: "problem" }, text));
      }
    });
  } },
  field("Content", bind(select({ id: "content" }, [["json", "JSON"], ["text", "text"]], values.kind), "kind")),
  field("Payload", bind(h("textarea", { id: "payload", rows: 10, spellcheck: "false" }), "data")),
  field("Key", bind(h("input", { type: "text", id: "key" }), "key"), "The same key, the same partition and order"),
  field("Headers", bind(h("textarea", { id: "headers", rows: 3, spellcheck: "false" }), "headers"), "name: value, one on each line; names are kept in small letters"),
  field("Delay (seconds)", bind(h("input", { type: "number", id: "delay", min: 0, step: "any" }), "delay"), "Empty: at once"),
  field("To", bind(select({ id: "to" }, targets, values.to), "to")),
  field("Partition", bind(h("input", { type: "number", id: "at", min: 0, max: stats.partitions.length - 1 }), "partition"), "Empty: by the key, or in turn"),
  h("div", { class: "row" }, send), result);
  return form;
}

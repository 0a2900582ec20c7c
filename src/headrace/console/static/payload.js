// One message: a line that opens, and what is in it. JSON is indented, bytes become hex, all of it is text.

import { h, put, toast } from "./dom.js";
import { bytes, time } from "./format.js";
import { messageLink } from "./links.js";

const SHOWN_CHARS = 200_000;

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

function hex(content) {
  const lines = [];
  for (let at = 0; at < content.length && lines.length < 4096; at += 16) {
    const part = [...content.subarray(at, at + 16)];
    const codes = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const chars = part.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${codes.padEnd(47)}  ${chars}`);
  }
  return lines.join("\n");
}

/** Bytes as pairs of digits to edit, 16 on a line. */
export function digits(base64) {
  const pairs = [...bytesOf(base64)].map((byte) => byte.toString(16).padStart(2, "0"));
  return Array.from({ length: Math.ceil(pairs.length / 16) }, (_, row) => pairs.slice(16 * row, 16 * row + 16).join(" ")).join("\n");
}

/** The same back, as base64. */
export function fromDigits(text) {
  const plain = text.replace(/\s+/g, "");
  if (!/^([0-9a-f]{2})*$/i.test(plain)) throw new Error("The payload must be pairs of hexadecimal digits, such as 00 7f ff.");
  let chars = "";
  for (let at = 0; at < plain.length; at += 2) chars += String.fromCharCode(parseInt(plain.slice(at, at + 2), 16));
  return btoa(chars);
}

/** A null value: what the key stood for is gone. */
const isTombstone = (message) => message.data === null && "kafka-tombstone" in (message.headers || {});

/** {kind, text, size}: the payload for people. */
export function shown(message) {
  if (isTombstone(message)) return { kind: "no value", text: "", size: 0 };
  if (message.encoding === "base64") {
    const content = bytesOf(message.data);
    return { kind: "binary", text: hex(content), size: content.length };
  }
  if (typeof message.data === "string") return { kind: "text", text: message.data, size: new Blob([message.data]).size };
  const text = JSON.stringify(message.data, null, 2);
  return { kind: "JSON", text, size: JSON.stringify(message.data).length };
}

/** The first characters, on one line. */
export function glance(message) {
  if (isTombstone(message)) return "no value (a tombstone)";
  if (message.encoding === "base64") return `${bytesOf(message.data).length} bytes of binary data`;
  const text = typeof message.data === "string" ? message.data : JSON.stringify(message.data);
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}

export const keyOf = (message) => message.key ?? (message.key64 ? `base64:${message.key64}` : null);

/** What is in a message: headers, payload. */
export function contents(message) {
  const { kind, text, size } = shown(message);
  const headers = Object.entries(message.headers || {});
  return [
    headers.length ? h("dl", { class: "headers" }, headers.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null,
    kind === "no value" ? h("p", { class: "empty" }, "No value: a tombstone. What its key stood for is gone.") : [h("div", { class: "row spread" }, h("small", {}, `${kind}, ${bytes(size)}`),
      h("button", { type: "button", class: "plain small", onclick: async () => {
        await navigator.clipboard.writeText(text).then(() => toast("Copied."), () => toast("The browser does not allow it.", "bad"));
      } }, "Copy")),
    h("pre", { class: "payload", tabindex: "0", "aria-label": "Payload" }, text.slice(0, SHOWN_CHARS))],
    text.length > SHOWN_CHARS ? h("p", { class: "empty" }, "Only the beginning is shown.") : null,
  ];
}

/** A line of a list of messages. Its contents are made when it is opened. */
export function line(message) {
  const body = h("div", { class: "message-body" });
  const key = keyOf(message);
  const node = h("details", { class: "message" },
    h("summary", { "data-focus": `${message.partition}/${message.offset}` },
      h("span", { class: "place" }, `${message.partition}/${message.offset}`),
      h("span", { class: "when" }, time(message.timestamp)),
      key === null ? null : h("span", { class: "key" }, key),
      h("span", { class: "glance" }, glance(message))), body);
  node.addEventListener("toggle", () => {
    if (node.open && !body.firstChild) {
      put(body, contents(message), h("p", {}, h("a", { href: messageLink(message.topic, message.partition, message.offset) }, "Link, and its life")));
    }
  });
  return node;
}

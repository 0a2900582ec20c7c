// Requests to the broker. Every action of the console is a request of the public HTTP API.
//
// The broker may restart under an open page: then requests fail, a banner says so, and we look once a second
// whether it is back. Events of `state`: "offline", "online" (it was offline before), "signedout".

import { every } from "./live.js";

export const state = new EventTarget();
let offline = false;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Numbers that JavaScript cannot hold stay as they were written, where the browser can do that. */
function exact(key, value, context) {
  if (typeof value === "number" && context?.source && JSON.rawJSON && String(value) !== context.source) {
    const plain = Number.isSafeInteger(value) || /[.eE]/.test(context.source);
    return plain ? value : JSON.rawJSON(context.source);
  }
  return value;
}

/** JSON that somebody has written, with numbers as they stand there. */
export const exactly = (text) => JSON.parse(text, exact);

export const path = (...words) => "/" + words.map(encodeURIComponent).join("/");

/** Ask the broker. `query` leaves out what is empty; `raw` is a body that is no JSON; `full` returns the headers too. */
export async function ask(method, address, { query, body, raw, headers, signal, full } = {}) {
  const given = Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const target = given.length ? `${address}?${new URLSearchParams(given)}` : address;
  const init = { method, signal, headers: { "X-Headrace-Console": "1", "X-Client-Id": "console", ...headers }, cache: "no-store" };
  if (raw !== undefined) init.body = raw;
  else if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers["Content-Type"] = "application/json";
  }
  let answer, text;
  try {
    answer = await fetch(target, init);
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new ApiError(0, "offline", "The broker does not answer.");
  }
  found();
  let document;
  try {
    document = text ? JSON.parse(text, exact) : null;
  } catch {
    document = null;
  }
  if (answer.ok) return full ? { document, headers: answer.headers } : document;
  const problem = document?.error || { code: "unknown", message: `The broker answered ${answer.status}.` };
  if (answer.status === 401 && !address.startsWith("/console/")) state.dispatchEvent(new Event("signedout"));
  const sentence = problem.message.charAt(0).toUpperCase() + problem.message.slice(1);
  throw new ApiError(answer.status, problem.code, sentence);
}

export const get = (address, query, signal) => ask("GET", address, { query, signal });
export const post = (address, body = {}, signal) => ask("POST", address, { body, signal });
export const remove = (address, query) => ask("DELETE", address, { query });

function lost() {
  if (offline) return;
  offline = true;
  state.dispatchEvent(new Event("offline"));
  const stop = new AbortController();
  state.addEventListener("online", () => stop.abort(), { once: true });
  every(1000, stop.signal, () => get("/health/live", {}, stop.signal));
}

function found() {
  if (!offline) return;
  offline = false;
  state.dispatchEvent(new Event("online"));
}

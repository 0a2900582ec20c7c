// Publishing dead letters again: which, where to, how fast, changed how. The preview comes first.

import { path, post } from "./api.js";
import { dialog, field, h, put, select, toast } from "./dom.js";
import { plural } from "./format.js";
import { tell } from "./redrives.js";

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

export function redriving(name, { offsets = [], reason = "", topic = "" }, signal, done) {
  const to = select({ id: "redrive-to" }, [["subscription", `only ${name}`], ["topic", "all subscriptions of the topic"], ["elsewhere", "another topic"]], "subscription");
  const destination = h("input", { type: "text", id: "destination" });
  const destinationField = field("Topic", destination);
  destinationField.hidden = true;
  const rate = h("input", { type: "number", id: "rate", min: 0.001, step: "any", placeholder: "as fast as possible" });
  const limit = h("input", { type: "number", id: "limit", min: 1, placeholder: "all" });
  const transform = h("textarea", { id: "transform", rows: 5, spellcheck: "false", placeholder: '{"currency": "EUR"} or [{"op": "remove", "path": "/debug"}]' });
  const preview = h("div", { role: "status", id: "redrive-preview" });

  function which() {
    const body = {};
    if (offsets.length) body.offsets = offsets;
    if (reason) body.reason = reason;
    if (topic) body.topic = topic;
    if (limit.value) body.limit = Number(limit.value);
    if (to.value === "elsewhere" && destination.value) body.destination = destination.value.trim();
    if (transform.value.trim()) body.transform = JSON.parse(transform.value);
    return body;
  }
  let number = 0;
  async function show() {
    const mine = ++number;
    try {
      const found = await post(path("dead-letters", name, "preview"), which(), signal);
      if (mine !== number) return;
      const changed = Boolean(transform.value.trim());
      put(preview, h("p", {}, h("b", {}, plural(found.matching, "letter")), found.complete ? "" : " or more", " would be published",
        found.failing ? h("span", { class: "bad" }, `; ${plural(found.failing, "letter")} cannot be`) : "", "."),
      found.samples.slice(0, 3).map((sample) => h("div", { class: "sample" },
        h("small", {}, `Letter ${sample.offset} to ${sample.topic}`),
        sample.error ? h("p", { class: "problem" }, sample.error) : null,
        h("div", { class: changed ? "before-after" : null }, changed ? h("pre", { tabindex: "0", "aria-label": "Before" }, pretty(sample.before)) : null,
          sample.after === null ? null : h("pre", { tabindex: "0", "aria-label": changed ? "After" : "Payload" }, pretty(sample.after))))));
    } catch (error) {
      if (mine === number) put(preview, h("p", { class: "problem" }, error instanceof SyntaxError ? `The transform is not JSON: ${error.message}` : error.message));
    }
  }
  for (const node of [to, destination, limit, transform]) node.addEventListener("input", () => {
    destinationField.hidden = to.value !== "elsewhere";
    show();
  });
  show();
  return dialog(`Redrive dead letters of ${name}`, [
    field("To", to), destinationField, field("At most per second", rate), field("How many", limit),
    field("Transform", transform, "Optional: a JSON Merge Patch (an object) or a JSON Patch (a list). Each payload must be JSON."),
    h("h3", {}, "Preview"), preview,
  ], [["Redrive", async () => {
    if (to.value === "elsewhere" && !destination.value.trim()) throw new Error("Say which topic.");
    const body = { ...which(), to: to.value === "elsewhere" ? "topic" : to.value };
    if (rate.value) body.rate = Number(rate.value);
    // It runs in the broker, also when this page is left. What takes longer than this, the page behind shows.
    const found = await post(path("dead-letters", name, "redrive"), { ...body, wait: 1 });
    if (found.state === "running") toast("The redrive runs in the broker.");
    else tell(found);
    await done();
    return true;
  }]]);
}

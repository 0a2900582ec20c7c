// Messages that wait for their time: cancel one, or publish it now.

import { get, path, post, remove } from "./api.js";
import { button, confirmed, h, put, toast } from "./dom.js";
import { time, until } from "./format.js";
import { topicLink } from "./links.js";
import { every } from "./live.js";
import { may } from "./rights.js";
import { table } from "./table.js";

export async function scheduled({ signal, query, keep, title, fail }) {
  title("Scheduled");
  let topic = query.get("topic") || "";
  const list = h("div", { id: "list" });
  const filter = h("input", { type: "search", "aria-label": "Only of this topic", placeholder: "Topic", value: topic });

  async function refresh() {
    const found = await get("/scheduled", { topic, limit: 500 }, signal);
    put(list, table("Scheduled messages", [
      { title: "Due", cell: (row) => `${until(row.deliver_at)} (${time(row.deliver_at)})` },
      { title: "Topic", cell: (row) => h("a", { href: topicLink(row.topic) }, row.topic) },
      { title: "Id", cell: (row) => h("code", {}, row.id) },
      { title: "Actions", cell: (row) => (may("manage", row.topic) ? h("div", { class: "row" },
        button("Publish now", async () => {
          await post(path("scheduled", row.id, "publish"));
          toast("Published.");
          await refresh();
        }, { class: "plain small", "data-focus": `now-${row.id}` }),
        button("Cancel", async () => {
          if (!(await confirmed("Cancel this message?", `It will not be published to ${row.topic}.`, "Cancel the message"))) return;
          await remove(path("scheduled", row.id));
          toast("Cancelled.");
          await refresh();
        }, { class: "danger small", "data-focus": `cancel-${row.id}` })) : "–") },
    ], found, { empty: "No message waits for its time. Publish one with a delay, and it appears here." }),
    found.length === 500 ? h("p", { class: "empty" }, "Only the next 500 are shown.") : null);
  }
  filter.addEventListener("change", () => {
    topic = filter.value.trim();
    keep({ topic });
    refresh().catch((error) => toast(error.message, "bad"));
  });
  await refresh();
  every(3000, signal, refresh, fail);
  return [h("div", { class: "row spread" }, h("h1", {}, "Scheduled"), filter), list];
}

// Spark pipelines, as they report about themselves.

import { get, path, post } from "./api.js";
import { button, confirmed, h, put, toast } from "./dom.js";
import { ago, bytes, count, duration, ms, rate } from "./format.js";
import { every } from "./live.js";
import { may } from "./rights.js";
import { badge, table } from "./table.js";

const KINDS = { running: "ok", failed: "critical", stopped: "notice", finished: "notice" };
const or = (value, show) => (value === null || value === undefined ? "–" : show(value));

function one(pipeline, refresh) {
  const runs = pipeline.state === "running";
  return h("section", { "aria-label": pipeline.name },
    h("div", { class: "row spread" }, h("h2", {}, pipeline.name, " ", badge(pipeline.stale ? "silent" : pipeline.state, pipeline.stale ? "warning" : KINDS[pipeline.state]),
      pipeline.verdict === "ok" ? null : badge(pipeline.verdict, "warning"), pipeline.stopping && runs ? badge("stopping", "warning") : null),
    runs && !pipeline.stopping && may("manage", null, pipeline.name) ? button("Stop", async () => {
      if (!(await confirmed(`Stop ${pipeline.name}?`, "It stops after the batch that it works on. Starting it again continues there.", "Stop the pipeline"))) return;
      await post(path("pipelines", pipeline.name, "stop"));
      toast("It will stop at its next report.");
      await refresh();
    }, { class: "danger", "data-focus": `stop-${pipeline.name}` }) : null),
    h("p", {}, `Started ${ago(pipeline.started_at)}, last report ${ago(pipeline.reported_at)}.`),
    table(`Queries of ${pipeline.name}`, [
      { title: "Query", cell: (row) => row.name },
      { title: "In/s", number: true, cell: (row) => or(row.input_rows_per_second, rate) },
      { title: "Done/s", number: true, cell: (row) => or(row.processed_rows_per_second, rate) },
      { title: "Lag", number: true, cell: (row) => or(row.lag, count) },
      { title: "Oldest unread", number: true, cell: (row) => or(row.lag_seconds, duration) },
      { title: "Batch", number: true, cell: (row) => or(row.batch_id, count) },
      { title: "Time of a batch", number: true, cell: (row) => or(row.trigger_ms, ms) },
      { title: "Rows", number: true, cell: (row) => or(row.input_rows_total, count) },
      { title: "Watermark", cell: (row) => or(row.watermark, ago) },
      { title: "State", number: true, cell: (row) => or(row.state_rows, (rows) => `${count(rows)} rows, ${bytes(row.state_bytes ?? 0)}`) },
      { title: "Given up", number: true, cell: (row) => or(row.dead_letters, count) },
      { title: "Last progress", cell: (row) => or(row.last_progress_at, ago) },
      { title: "Sink", cell: (row) => row.sink || "–" },
    ], pipeline.queries, { empty: "It reports no queries." }),
    pipeline.queries.filter((query) => query.error).map((query) => h("pre", { class: "problem", tabindex: "0" }, `${query.name}: ${query.error}`)));
}

export async function pipelines({ signal, title, fail }) {
  title("Pipelines");
  const list = h("div", { id: "list" });
  async function refresh() {
    const found = await get("/pipelines", {}, signal);
    put(list, found.length ? found.map((each) => one(each, refresh)) : h("p", { class: "empty" }, "No pipeline reports to this broker. headrace pipeline run starts one."));
  }
  await refresh();
  every(3000, signal, refresh, fail);
  return [h("h1", {}, "Pipelines"), list];
}

// A page with a long list. The broker filters, sorts and cuts it, so 5,000 rows are as quick as five.

import { get } from "./api.js";
import { dialog, h, put, toast } from "./dom.js";
import { every } from "./live.js";
import { pager, table } from "./table.js";

const LIMIT = 50;

/**
 * The list at `from`, with a filter and, if `create` is given, a button. `sort` and `descending` say how it is sorted
 * until somebody chooses; `empty` is what stands there without rows, and `none` if no row matches the filter. `create.form()`
 * gives the fields of a dialog, and `make`, which creates something and returns the sentence that says so.
 */
export async function listing({ signal, query, keep, title, fail }, { name, from, columns, sort, descending, by, empty, none, create }) {
  title(name);
  const shown = {
    match: query.get("match") || "",
    sort: query.get("sort") || sort,
    descending: (query.get("descending") || String(descending)) === "true",
    skip: Number(query.get("skip")) || 0,
  };
  const list = h("div", { id: "list" });
  const search = h("input", { type: "search", id: "filter", "aria-label": `Filter ${name.toLowerCase()} by ${by}`, placeholder: `Filter by ${by}`, value: shown.match });
  let number = 0;

  async function refresh() {
    const mine = ++number;
    const found = await get(from, { ...shown, limit: LIMIT }, signal);
    if (mine !== number) return; // a later question has been answered
    const sorted = { by: shown.sort, descending: shown.descending, set: (sort, descending) => change({ sort, descending, skip: 0 }) };
    put(list, table(name, columns, found.rows, { sorted, empty: shown.match ? none : empty }),
      pager(shown.skip, LIMIT, found.total, (skip) => change({ skip })));
  }
  function change(changes) {
    Object.assign(shown, changes);
    keep({
      ...shown,
      sort: shown.sort === sort ? "" : shown.sort,
      descending: shown.descending === descending ? "" : shown.descending,
      skip: shown.skip || "",
    });
    refresh().catch(() => {});
  }
  function open() {
    const { fields, make } = create.form();
    return dialog(create.text, fields, [["Create", async () => {
      toast(await make());
      refresh().catch(() => {});
      return true;
    }]]);
  }
  search.addEventListener("input", () => change({ match: search.value.trim(), skip: 0 }));
  await refresh();
  every(3000, signal, refresh, fail);
  return [h("div", { class: "row spread" }, h("h1", {}, name), h("div", { class: "row" }, search,
    create ? h("button", { type: "button", id: create.id, class: "primary", onclick: open }, create.text) : null)), list];
}

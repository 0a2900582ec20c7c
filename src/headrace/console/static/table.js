// Tables. On a small screen each row becomes a card, with the heading before each value.

import { h } from "./dom.js";

/** columns: {title, cell(row), key (sortable), number}. `sorted`: {by, descending, set(by, descending)}. */
export function table(caption, columns, rows, { sorted, empty = "Nothing here.", rowClass } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const heads = columns.map((column) => {
    if (!column.key || !sorted) return h("th", { scope: "col", class: column.number ? "number" : null }, column.title);
    const on = sorted.by === column.key;
    const down = on ? !sorted.descending : Boolean(column.number);
    const sign = on ? (sorted.descending ? " ▼" : " ▲") : "";
    return h("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": on ? (sorted.descending ? "descending" : "ascending") : null },
      h("button", { type: "button", class: "sort", "data-focus": `sort-${column.key}`, onclick: () => sorted.set(column.key, down) }, column.title + sign));
  });
  return h("div", { class: "table", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, heads)),
      h("tbody", {}, rows.map((row) => h("tr", { class: rowClass ? rowClass(row) : null },
        columns.map((column) => h("td", { class: column.number ? "number" : null, "data-label": column.title }, column.cell(row))))))));
}

/** Previous and next, and what is shown of how many. */
export function pager(skip, limit, total, go) {
  if (total <= limit && !skip) return null;
  const last = Math.min(skip + limit, total);
  return h("nav", { class: "row pager", "aria-label": "Pages" },
    h("button", { type: "button", class: "plain", disabled: skip === 0, "data-focus": "previous", onclick: () => go(Math.max(0, skip - limit)) }, "Previous"),
    h("span", {}, `${total ? skip + 1 : 0}–${last} of ${total.toLocaleString("en")}`),
    h("button", { type: "button", class: "plain", disabled: last >= total, "data-focus": "next", onclick: () => go(skip + limit) }, "Next"));
}

/** A small coloured word. */
export const badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);

/** Facts as a list of names and values. */
export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value, kind]) => h("div", { class: kind }, h("dt", {}, name), h("dd", {}, value))));

/** Sentences with their severity, the way `attention` and `explain_subscription` return them. */
export const findings = (list, link) =>
  h("ul", { class: "findings" }, list.map((finding) => h("li", { class: finding.severity },
    badge(finding.severity, finding.severity), h("span", {}, finding.text), link ? link(finding) : null)));

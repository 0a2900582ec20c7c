// Elements. Text is always set as text: nothing in the console ever parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "indeterminate") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element: h("a", {href: "#/"}, "Overview"). Children that are null or false are left out. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for drawings. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

const nameOf = (node) => node.getAttribute("data-focus") || node.getAttribute("href") || node.id || node.getAttribute("name");

/** Replace the children. If one of them had the focus, its successor gets it. */
export function put(node, ...children) {
  const active = node.contains(document.activeElement) && document.activeElement !== node ? document.activeElement : null;
  const name = active && nameOf(active);
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  if (!name) return node;
  for (const each of node.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")) {
    if (nameOf(each) === name) {
      each.focus({ preventScroll: true });
      break;
    }
  }
  return node;
}

let toastNumber = 0;

/** A sentence at the edge of the screen, read aloud, that goes away by itself. */
export function toast(text, kind = "ok") {
  const node = h("div", { class: `toast ${kind}`, id: `toast-${++toastNumber}` }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), kind === "ok" ? 4000 : 9000);
}

/** A label above a field. */
export function field(label, control, hint) {
  return h("label", { class: "field" }, h("span", {}, label), control, hint ? h("small", {}, hint) : null);
}

export function select(props, options, value) {
  return h("select", props, options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
}

/** A button that runs one action at a time and shows what went wrong. */
export function button(text, action, props = {}) {
  const node = h("button", { type: "button", ...props }, text);
  node.addEventListener("click", () => busy(node, action));
  return node;
}

export async function busy(node, action) {
  if (node.getAttribute("aria-busy") === "true") return;
  node.setAttribute("aria-busy", "true");
  try {
    await action();
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, "bad");
  } finally {
    node.removeAttribute("aria-busy");
  }
}

/** A question in front of the page. Resolves with what `answer` returns, or null if it was closed. */
export function dialog(title, content, actions) {
  return new Promise((resolve) => {
    const close = (result) => {
      box.close();
      box.remove();
      resolve(result);
    };
    const heading = h("h2", { id: "dialog-title" }, title);
    const buttons = actions.map(([text, answer, kind]) => {
      const node = button(text, async () => {
        const result = await answer();
        if (result !== undefined) close(result);
      }, { class: kind || "primary" });
      return node;
    });
    const box = h("dialog", { "aria-labelledby": "dialog-title" }, heading, h("div", { class: "dialog-body" }, content),
      h("div", { class: "row end" }, button("Close", () => close(null), { class: "plain" }), buttons));
    box.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(null);
    });
    document.body.append(box);
    box.showModal();
  });
}

/** The page behind them is left. */
export function closeDialogs() {
  for (const box of document.querySelectorAll("dialog")) box.dispatchEvent(new Event("cancel", { cancelable: true }));
}

/** Ask before something is done that cannot be undone. */
export async function confirmed(title, text, action) {
  return (await dialog(title, h("p", {}, text), [[action, () => true, "danger"]])) === true;
}

/** Let the browser save a text as a file. */
export function download(name, text, type = "application/x-ndjson") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// The form that logs in. The secret is sent once; the browser keeps a cookie that scripts cannot read.

import { ask } from "./api.js";
import { busy, field, h, put } from "./dom.js";

export function login(done) {
  const token = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false" });
  const user = h("input", { type: "text", id: "user", autocomplete: "username", autocapitalize: "none", spellcheck: "false" });
  const password = h("input", { type: "password", id: "password", autocomplete: "current-password" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const fields = h("div", {});
  let byToken = true;
  const other = h("button", { type: "button", class: "plain", id: "other-login", onclick: () => switchTo(!byToken) });
  const send = h("button", { class: "primary" }, "Sign in");

  function switchTo(value) {
    byToken = value;
    put(fields, byToken ? field("Token", token) : [field("User", user), field("Password", password)]);
    other.textContent = byToken ? "Use a user and a password" : "Use a token";
    (byToken ? token : user).focus();
  }

  async function submit(event) {
    event.preventDefault();
    problem.hidden = true;
    await busy(send, async () => {
      const body = byToken ? { token: token.value } : { user: user.value, password: password.value };
      try {
        await ask("POST", "/console/session", { body });
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
        (byToken ? token : password).select();
        return;
      }
      token.value = password.value = "";
      done();
    });
  }

  switchTo(true);
  return h("main", { id: "login" }, h("h1", {}, "Headrace"), h("form", { onsubmit: submit }, fields, problem,
    h("div", { class: "row" }, send, other)));
}

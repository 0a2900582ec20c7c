"""Logging in with a cookie: what is sent, what it is good for, and when it ends."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.console import sessions
from headrace.console.pages import POLICY, Pages, pages
from headrace.errors import NotFound
from headrace.testing import RunningServer, running_server
from headrace.wire.http import Request
from tests.server.http_rig import Answer, Http, RawHttp

TOKEN = "a-token-for-the-tests-of-the-console"
OURS = {"X-Headrace-Console": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(token=TOKEN, memory=True) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[Http]:
    with closing(Http(server.http_address)) as connection:
        yield connection


def log_in(http: Http, body: Any = None) -> Answer:
    return http.ask("POST", "/console/session", {"token": TOKEN} if body is None else body)


def cookie_of(answer: Answer) -> dict[str, str]:
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


# --- the files --------------------------------------------------------------------------------------
def test_the_page_is_served_to_anybody_with_strict_headers(http: Http) -> None:
    """Without a login, because it is where one logs in; no inline script, no other site."""
    answer = http.get("/")
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert b"<script>" not in answer.body
    assert b"style=" not in answer.body
    again = http.get("/", {"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_files_are_cached_for_ever_under_their_hash(http: Http) -> None:
    """Another version is another address; what the index names is there."""
    version = pages().version
    answer = http.get(f"/console/{version}/app.js")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert sum(line.lower().startswith("cache-control") for line in _head(http, version)) == 1
    assert f"/console/{version}/style.css".encode() in http.get("/").body
    for path in (
        f"/console/{version}/nothing.js",
        "/console/0000/app.js",
        f"/console/{version}/..%2Fpages.py",
    ):
        assert http.get(path).status == 404


def test_any_changed_byte_changes_the_hash() -> None:
    """Also if bytes move from one file to another."""
    files = {"index.html": b"VERSION", "a.js": b"ab", "b.js": b"c"}
    one, other = Pages(files), Pages({**files, "a.js": b"a", "b.js": b"bc"})
    assert one.version != other.version
    with pytest.raises(NotFound, match="load / again"):
        one.file(other.version, "a.js")


def _head(http: Http, version: str) -> list[str]:
    """The lines of the head, as they came."""
    with RawHttp(http._connection.sock.getpeername()) as raw:
        raw.send(f"GET /console/{version}/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return raw.answer().lines


# --- logging in -------------------------------------------------------------------------------------
def test_a_login_sets_a_strict_cookie(http: Http, server: RunningServer) -> None:
    """HttpOnly, SameSite=Strict, with the port in its name; Secure behind a proxy that ends TLS."""
    answer = log_in(http)
    assert answer.json["administrator"] is True
    text = answer.headers["set-cookie"]
    assert text.startswith(f"headrace-{server.http_address[1]}=")
    assert "HttpOnly; SameSite=Strict" in text
    assert "Secure" not in text
    assert answer.headers["cache-control"] == "no-store"
    proxied = http.ask("POST", "/console/session", {"token": TOKEN}, {"X-Forwarded-Proto": "https"})
    assert proxied.headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"token": "wrong"}, 401, "unauthenticated"),
        ({"user": "ann", "password": "x"}, 401, "unauthenticated"),
        ({}, 400, "missing_argument"),
        ({"token": TOKEN, "user": "ann"}, 400, "missing_argument"),
        ({"token": 5}, 400, "invalid_argument"),
        ({"secret": "x"}, 400, "unknown_argument"),
    ],
)
def test_a_bad_login_gets_no_cookie(http: Http, body: Any, status: int, code: str) -> None:
    """And an error that says why."""
    answer = log_in(http, body)
    assert (answer.status, answer.code) == (status, code)
    assert "set-cookie" not in answer.headers


def test_guessing_is_slowed_down_as_for_every_login(server: RunningServer) -> None:
    """The failures are counted where all failures are."""
    before = server.server.hub.logins.failed
    with closing(Http(server.http_address)) as http:
        for _ in range(3):
            log_in(http, {"token": "guess"})
    assert server.server.hub.logins.failed == before + 3


# --- the cookie -------------------------------------------------------------------------------------
def test_the_cookie_counts_in_requests_of_the_console_only(http: Http) -> None:
    """A form or a script of another page cannot use it, also not of another port."""
    cookie = cookie_of(log_in(http))
    host = "{}:{}".format(*http._connection.sock.getpeername())
    assert http.get("/access/whoami", {**cookie, **OURS}).json["name"] == "token"
    same = {**cookie, "Sec-Fetch-Site": "same-origin"}
    assert http.get("/access/whoami", same).status == 200
    refused = [
        ("GET", cookie),
        ("GET", {**cookie, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", **OURS}),
        ("PUT", same),
        ("PUT", {**same, "Origin": f"http://{host}"}),
    ]
    for method, headers in refused:
        path = "/access/whoami" if method == "GET" else "/topics/t"
        answer = http.ask(method, path, None if method == "GET" else {}, headers)
        assert (answer.status, answer.code) == (401, "not_the_console"), headers
    answer = http.ask("PUT", "/topics/t", {}, {**same, **OURS, "Origin": f"http://{host}"})
    assert answer.status in (200, 201)


def test_an_allowed_origin_cannot_use_the_cookie() -> None:
    """``allowed_origins`` lets a page use the API with a token of its own, not with the user's cookie."""
    page = "http://127.0.0.1:3000"
    with (
        running_server(token=TOKEN, memory=True, allowed_origins=[page]) as server,
        closing(Http(server.http_address)) as http,
    ):
        cookie = cookie_of(log_in(http))
        answer = http.get("/access/whoami", {**cookie, **OURS, "Origin": page})
        assert (answer.status, answer.code) == (401, "not_the_console")


@pytest.mark.parametrize(
    "foreign",
    [
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_another_page_logs_nobody_in_or_out(foreign: dict[str, str]) -> None:
    """Whatever ``allowed_origins`` says: a user in the session of somebody else would give things away."""
    with (
        running_server(token=TOKEN, memory=True, allowed_origins=["*"]) as server,
        closing(Http(server.http_address)) as http,
    ):
        mine = cookie_of(log_in(http))
        answer = http.ask("POST", "/console/session", {"token": TOKEN}, foreign)
        assert (answer.status, answer.code) == (401, "not_the_console")
        assert "set-cookie" not in answer.headers
        assert http.ask("DELETE", "/console/session", None, {**mine, **foreign}).status == 401
        assert http.get("/access/whoami", {**mine, **OURS}).status == 200


def test_a_login_takes_no_cookie_over(http: Http, server: RunningServer) -> None:
    """A value that somebody else has set is no session; a session that came along ends."""
    name = f"headrace-{server.http_address[1]}"
    planted = {"Cookie": f"{name}=planted"}
    first = http.ask("POST", "/console/session", {"token": TOKEN}, planted)
    assert "planted" not in first.headers["set-cookie"]
    assert http.get("/access/whoami", {**planted, **OURS}).code == "login_ended"
    old = cookie_of(first)
    new = cookie_of(http.ask("POST", "/console/session", {"token": TOKEN}, old))
    assert http.get("/access/whoami", {**old, **OURS}).code == "login_ended"
    assert http.get("/access/whoami", {**new, **OURS}).status == 200


def test_two_cookies_are_no_session(http: Http) -> None:
    """Another port of the host can set one for a longer path, which browsers send first."""
    mine, other = cookie_of(log_in(http)), cookie_of(log_in(http))
    both = {"Cookie": f"{other['Cookie']}; {mine['Cookie']}"}
    answer = http.get("/access/whoami", {**both, **OURS})
    assert (answer.status, answer.code) == (401, "login_ended")


def test_logging_out_ends_the_session_everywhere(http: Http) -> None:
    """Also for a request whose head was admitted before, byte for byte."""
    cookie = cookie_of(log_in(http))
    for _ in range(3):
        assert http.get("/access/whoami", {**cookie, **OURS}).status == 200
    answer = http.ask("DELETE", "/console/session", None, cookie)
    assert "Max-Age=0" in answer.headers["set-cookie"]
    answer = http.get("/access/whoami", {**cookie, **OURS})
    assert (answer.status, answer.code) == (401, "login_ended")


def test_a_broker_without_access_control_needs_no_login() -> None:
    """Then there is no cookie either."""
    with running_server(memory=True) as server, closing(Http(server.http_address)) as http:
        answer = log_in(http, {"token": "whatever"})
        assert answer.json["name"] == "anyone"
        assert "set-cookie" not in answer.headers


# --- bounds -----------------------------------------------------------------------------------------
def test_sessions_are_bounded_and_expire(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each principal has a few; the oldest gives way. After its time a session is nobody's."""
    table = server.server.hub.sessions
    first = cookie_of(log_in(http))
    for _ in range(sessions.PER_PRINCIPAL_MAX):
        last = cookie_of(log_in(http))
    assert len(table) == sessions.PER_PRINCIPAL_MAX
    assert http.get("/access/whoami", {**first, **OURS}).status == 401
    assert http.get("/access/whoami", {**last, **OURS}).status == 200
    real = table._time
    monkeypatch.setattr(table, "_time", lambda: real() + sessions.SESSION_S + 1)
    server.call(table._tick)
    assert len(table) == 0
    answer = http.get("/access/whoami", {**last, **OURS})
    assert (answer.status, answer.code) == (401, "login_ended")


def test_the_name_of_the_cookie_is_bound_to_the_host_under_tls() -> None:
    """__Host- cookies cannot be set by another name or a plain connection."""
    table = sessions.ConsoleSessions(None, lambda: 0.0, lambda *args: None)  # type: ignore[arg-type]
    table.served(8443, tls=True)
    text = table.header("secret", Request())
    assert text.startswith("__Host-headrace-8443=secret; Path=/;")
    assert text.endswith("; Secure")

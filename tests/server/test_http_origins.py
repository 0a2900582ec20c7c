"""Who may use the HTTP port: tokens, web pages, and names of this machine."""

from collections.abc import Iterator

import pytest

from headrace.errors import Forbidden
from headrace.server.origins import Origins
from headrace.testing import RunningServer, running_server
from headrace.wire.http import Request
from tests.server.http_rig import JSON, Answer, Events, Http, RawHttp, http_of, raw_request

APP = "https://app.example.com"
EVIL = "https://evil.example.com"
HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec_websocket_version": "13",
}


@pytest.fixture
def open_server() -> Iterator[RunningServer]:
    """One that a web page may use."""
    with running_server(memory=True, allowed_origins=[APP, "http://localhost:3000"]) as server:
        yield server


@pytest.fixture
def closed_server() -> Iterator[RunningServer]:
    """One with a token."""
    with running_server(memory=True, token="sécret") as server:
        yield server


def upgrade(server: RunningServer, path: str = "/ws", **headers: str) -> Answer:
    with RawHttp(server.http_address) as raw:
        raw.request("GET", path, **{**HANDSHAKE, **headers})
        return raw.answer()


def cors_of(answer: Answer) -> dict[str, str]:
    return {
        n: v for n, v in answer.headers.items() if n.startswith("access-control") or n == "vary"
    }


# --- tokens ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/topics"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("POST", "/publish/orders"),
        ("GET", "/consume/orders"),
        ("DELETE", "/topics/orders"),
        ("GET", "/stream/orders"),
        ("GET", "/ws"),
    ],
)
def test_with_a_token_everything_needs_it(
    closed_server: RunningServer, method: str, path: str
) -> None:
    """Missing, wrong or said in another way: 401, and how to do it."""
    for header in (None, "Bearer wrong", "Bearer ", "Basic s%C3%A9cret", "sécret", "Bearersécret"):
        http = http_of(closed_server)
        answer = http.ask(method, path, None, {} if header is None else {"Authorization": header})
        assert (answer.status, answer.code) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        http.close()
    http = http_of(closed_server, "sécret")
    assert http.ask("GET", "/topics").status == 200
    http.close()


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/openapi.json"])
def test_health_needs_no_token(closed_server: RunningServer, path: str) -> None:
    """Whoever watches over the broker has none."""
    http = http_of(closed_server)
    assert http.get(path).status == 200
    http.close()


def test_a_token_in_the_address_where_a_browser_can_do_no_better(
    closed_server: RunningServer,
) -> None:
    """For WebSockets and event streams, and nowhere else."""
    token = "s%C3%A9cret"
    assert upgrade(closed_server, f"/ws?token={token}").status == 101
    assert upgrade(closed_server, "/ws?token=wrong").status == 401
    with Events(closed_server.http_address, f"/stream/orders?token={token}") as events:
        assert events.head.status == 200
    http = http_of(closed_server)
    for path in (f"/topics?token={token}", f"/consume/orders?token={token}", "/ws?token="):
        assert http.get(path).status == 401
    http.close()


def test_a_token_is_not_in_the_log(
    closed_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a right one nor a wrong one, wherever it was sent."""
    with caplog.at_level("DEBUG"):
        upgrade(closed_server, "/ws?token=s%C3%A9cret")
        upgrade(closed_server, "/ws?token=wr0ng")
        http = http_of(closed_server, "sécret")
        http.ask("POST", "/publish/orders", "{", JSON)
        http.close()
    assert "cret" not in caplog.text
    assert "wr0ng" not in caplog.text


# --- web pages ------------------------------------------------------------------------------------
def test_without_being_told_no_other_page_may_use_the_broker(
    server: RunningServer, http: Http
) -> None:
    """A browser would send these for any page; none of them does anything, or is let read anything."""
    http.publish("orders", "precious")
    for method, path, body in (
        ("POST", "/publish/orders", "smuggled"),
        ("GET", "/consume/orders", None),
        ("DELETE", "/topics/orders", None),
        ("GET", "/topics", None),
        ("GET", "/stream/orders", None),
        ("OPTIONS", "/publish/orders", None),
    ):
        answer = http.ask(method, path, body, {"Origin": EVIL, "Content-Type": "text/plain"})
        assert (answer.status, answer.code) == (403, "origin_not_allowed")
        assert cors_of(answer) == {}
    assert http.consume("orders")["data"] == "precious"
    assert http.consume("orders") is None


def test_what_a_foreign_page_embeds_or_links_to(http: Http) -> None:
    """An image or a script has no Origin, but says that it is for another site; a link may lead here."""
    http.publish("orders", "precious")
    cross = {"Sec-Fetch-Site": "cross-site"}
    image, link = {**cross, "Sec-Fetch-Mode": "no-cors"}, {**cross, "Sec-Fetch-Mode": "navigate"}
    assert http.get("/consume/orders", image).code == "origin_not_allowed"
    assert http.get("/consume/orders", link).code == "origin_not_allowed"
    assert http.get("/topics", image).status == 403
    assert http.get("/consume/orders", {**image, "Sec-Fetch-Site": "same-site"}).status == 403
    assert http.get("/topics", link).status == 200
    assert http.get("/topics", {"Sec-Fetch-Site": "same-origin"}).status == 200
    assert http.get("/topics", {"Sec-Fetch-Site": "none"}).status == 200
    assert http.consume("orders")["data"] == "precious"


def test_the_brokers_own_pages_may(server: RunningServer, http: Http) -> None:
    """The same origin needs no permission, and no headers about it."""
    host, port = server.http_address
    own = {"Origin": f"http://{host}:{port}", "Host": f"{host}:{port}"}
    answer = http.ask("POST", "/publish/orders", "1", {**JSON, **own})
    assert (answer.status, cors_of(answer)) == (200, {})
    assert upgrade(server, host=own["Host"], origin=own["Origin"]).status == 101


@pytest.mark.parametrize("path", ["/ws", "/ws/", "//ws", "/%77s", "/ws?x=1"])
def test_a_websocket_from_elsewhere_is_refused(server: RunningServer, path: str) -> None:
    """In whatever way the address is written; a program without an origin is not concerned."""
    assert upgrade(server, path, origin=EVIL).status == 403
    assert upgrade(server, path, origin="null").status == 403
    assert upgrade(server).status == 101


def test_listed_pages_may_do_everything(open_server: RunningServer) -> None:
    """Each answer says so, errors included; others are refused as before."""
    http = http_of(open_server)
    expected = {
        "access-control-allow-origin": APP,
        "access-control-expose-headers": "Retry-After, Headrace-Created",
        "vary": "Origin",
    }
    for method, path, body, status in (
        ("POST", "/publish/orders", "1", 200),
        ("POST", "/publish/orders?key=k", "1", 200),
        ("POST", "/publish/orders", "{", 400),
        ("GET", "/consume/orders", None, 200),
        ("GET", "/topics", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/metrics", None, 200),
    ):
        answer = http.ask(method, path, body, {**JSON, "Origin": APP})
        assert (answer.status, cors_of(answer)) == (status, expected)
    assert http.get("/topics", {"Origin": EVIL}).status == 403
    assert http.get("/topics", {"Origin": "https://app.example.com.evil.com"}).status == 403
    assert cors_of(http.get("/topics")) == {}
    assert upgrade(open_server, origin=APP).status == 101
    assert upgrade(open_server, origin=EVIL).status == 403
    http.close()


def test_a_listed_page_may_ask_first(open_server: RunningServer) -> None:
    """The preflight is answered for what exists, without a token."""
    http = http_of(open_server)
    ask = {
        "Origin": APP,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-header-a",
    }
    answer = http.ask("OPTIONS", "/publish/orders", None, ask)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == ask["Access-Control-Request-Headers"]
    assert http.ask("OPTIONS", "/nowhere", None, ask).status == 404
    http.close()


def test_an_event_stream_for_a_listed_page(open_server: RunningServer) -> None:
    """A browser's EventSource needs the header, too."""
    with Events(open_server.http_address, "/stream/orders", origin=APP) as events:
        assert cors_of(events.head)["access-control-allow-origin"] == APP


def test_a_refusal_before_the_body_can_be_read_by_a_listed_page() -> None:
    """A page that has forgotten its token is told so, not left in the dark."""
    with running_server(memory=True, token="secret", allowed_origins=[APP]) as server:
        http = http_of(server)
        answer = http.ask("POST", "/publish/orders", "1", {**JSON, "Origin": APP})
        assert answer.status == 401
        assert cors_of(answer)["access-control-allow-origin"] == APP
        ask = {"Origin": APP, "Access-Control-Request-Method": "POST"}
        assert http.ask("OPTIONS", "/publish/orders", None, ask).status == 204
        http.close()


def test_a_star_is_for_every_page() -> None:
    """Where somebody has decided that."""
    with running_server(memory=True, allowed_origins="*") as server:
        http = http_of(server)
        answer = http.get("/topics", {"Origin": EVIL})
        assert cors_of(answer)["access-control-allow-origin"] == EVIL
        assert upgrade(server, origin=EVIL).status == 101
        http.close()


# --- names of this machine ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("localhost:8080", True),
        ("LOCALHOST:8080", True),
        ("localhost.:8080", True),
        ("broker.localhost:8080", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("192.168.1.7:8080", True),
        ("evil.example.com:8080", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.evil.com:8080", False),
        ("evil.com:127.0.0.1", False),
    ],
)
def test_a_name_that_others_can_give_is_not_known(
    server: RunningServer, http: Http, host: str, known: bool
) -> None:
    """Else a page of evil.example.com, whose address becomes 127.0.0.1, would be one of our own."""
    answer = http.get("/topics", {"Host": host})
    assert answer.status == (200 if known else 403)
    own = http.get("/topics", {"Host": host, "Origin": f"http://{host}"})
    assert own.status == answer.status
    if not known:
        assert answer.code == "host_not_allowed"
        assert upgrade(server, host=host, origin=f"http://{host}").status == 403


def test_a_name_can_be_made_known() -> None:
    """By listing it; and with a token any name will do, because no page has the token."""
    request = Request()
    request.words = ["topics"]
    request.headers = {"host": "broker.example.com:8080"}
    with pytest.raises(Forbidden):
        Origins(None, local_only=True).admit(request)
    Origins(["http://broker.example.com:8080"], local_only=True).admit(request)
    Origins(["*"], local_only=True).admit(request)
    Origins(None).admit(request)
    with running_server(memory=True, token="secret") as server:
        http = http_of(server, "secret")
        assert http.get("/topics", {"Host": "broker.example.com"}).status == 200
        http.close()


def test_the_old_protocol_has_no_host(raw: RawHttp) -> None:
    """HTTP/1.0 is spoken by scripts, not by browsers."""
    raw.send("GET /topics HTTP/1.0\r\n\r\n")
    assert raw.answer().status == 200
    assert raw.is_ended()
    assert b"Host: localhost" in raw_request("GET", "/")

"""HTTP itself: kept and pipelined connections, bodies, bounds, and how a connection ends."""

import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headrace.server import connection as one_connection
from headrace.server import flow
from headrace.server.connection import Connection
from headrace.server.http import HttpSession
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Http, RawHttp, each_byte, http_of, raw_request

PUBLISH = raw_request("POST", "/publish/orders", b'{"a":1}')
HEALTH = raw_request("GET", "/health/live")


def connections(server: RunningServer) -> list[Connection]:
    return server.call(lambda: list(server.server.hub.connections))  # type: ignore[arg-type]


def waits(connection: Connection) -> bool:
    """Whether it has requests that have not begun."""
    session = connection.session
    return isinstance(session, HttpSession) and bool(session._requests._waiting)


# --- kept -----------------------------------------------------------------------------------------
def test_a_connection_is_kept(server: RunningServer, raw: RawHttp) -> None:
    """Request after request, also after errors, on one connection."""
    for _ in range(3):
        raw.send(HEALTH)
        assert raw.answer().status == 200
        raw.send(raw_request("GET", "/nowhere"))
        assert raw.answer().status == 404
        raw.send(raw_request("POST", "/publish/orders", b"{"))
        assert raw.answer().status == 400
        raw.send(PUBLISH)
        assert raw.answer().status == 200
    assert server.call(lambda: server.server.hub.accepted) == 1


@pytest.mark.parametrize(
    ("head", "kept", "says"),
    [
        ("HTTP/1.1\r\nHost: localhost", True, None),
        ("HTTP/1.1\r\nHost: localhost\r\nConnection: close", False, "close"),
        ("HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive", True, None),
        ("HTTP/1.0", False, "close"),
        ("HTTP/1.0\r\nHost: localhost", False, "close"),
        ("HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive", True, "keep-alive"),
    ],
)
@pytest.mark.parametrize("path", ["/health/live", "/topics", "/nowhere"])
def test_it_ends_when_it_was_said_so(
    raw: RawHttp, path: str, head: str, kept: bool, says: str | None
) -> None:
    """And the answer says so: for an answer at once, a later one, and an error."""
    raw.send(f"GET {path} {head}\r\n\r\n")
    assert raw.answer().headers.get("connection") == says
    if kept:
        raw.send(HEALTH)
        assert raw.answer().status == 200
    else:
        assert raw.is_ended()


def test_a_publish_that_is_the_last_is_answered(raw: RawHttp) -> None:
    """Behind all before it, and then the connection ends; what comes behind it is not read."""
    last = raw_request("POST", "/publish/orders", b'"last"', connection="close")
    raw.send(PUBLISH * 5, last, PUBLISH * 5)
    assert [raw.answer().json["offset"] for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    assert raw.is_ended()


def test_a_head_request_has_the_head_of_the_answer(raw: RawHttp) -> None:
    """The same lines, the length of what is not sent, and nothing behind them."""
    raw.send(PUBLISH)
    raw.answer()
    for path in ("/topics", "/topics/orders/stats", "/metrics", "/openapi.json", "/nowhere"):
        raw.send(raw_request("GET", path))
        full = raw.answer()
        raw.send(raw_request("HEAD", path))
        head = raw.answer(to_head=True)
        assert head.status == full.status
        assert head.headers["content-type"] == full.headers["content-type"]
        if path != "/metrics":
            assert head.headers["content-length"] == full.headers["content-length"]
    raw.send(HEALTH)
    assert raw.answer().status == 200


# --- pipelined ------------------------------------------------------------------------------------
def test_a_thousand_requests_in_one_write(raw: RawHttp) -> None:
    """Answered in order, each with its own."""
    raw.send(
        *(raw_request("POST", f"/publish/t{number % 7}", b"%d" % number) for number in range(1000))
    )
    answers = [raw.answer() for _ in range(1000)]
    assert [a.json["topic"] for a in answers] == [f"t{number % 7}" for number in range(1000)]
    assert [a.json["offset"] for a in answers] == [number // 7 for number in range(1000)]


@pytest.mark.parametrize("durable", [True, False])
def test_all_kinds_of_requests_in_one_write(durable: bool) -> None:
    """What depends on what came before sees it: publish, consume, publish, list, error, …"""
    with running_server(memory=not durable) as server, RawHttp(server.http_address) as raw:
        for number in range(200):
            raw.send(
                raw_request("POST", "/publish/orders", b"%d" % number),
                raw_request("POST", "/publish/orders?key=k", b"%d" % number),
                raw_request("GET", "/consume/orders/batch"),
                raw_request("GET", "/nowhere"),
                raw_request("POST", "/publish/orders", b"{"),
                HEALTH,
                raw_request("GET", "/consume/orders"),
            )
        for number in range(200):
            assert raw.answer().json["offset"] == 2 * number
            assert raw.answer().json["offset"] == 2 * number + 1
            assert [m["data"] for m in raw.answer().json] == [number, number]
            assert raw.answer().status == 404
            assert raw.answer().code == "invalid_json"
            assert raw.answer().json == {"status": "ok"}
            assert raw.answer().status == 204


def test_thousands_that_are_refused_at_once(raw: RawHttp) -> None:
    """Behind one that takes its time: each is answered, and none of them inside another."""
    raw.send(raw_request("PUT", "/topics/orders", b'{"max_queue_size":1}'))
    assert raw.answer().status == 201
    raw.send(PUBLISH)
    assert raw.answer().status == 200
    raw.send(raw_request("GET", "/topics"), PUBLISH * 3000, raw_request("GET", "/topics"))
    assert raw.answer().json[0]["messages"] == 1
    assert {raw.answer().status for _ in range(3000)} == {429}
    assert raw.answer().status == 200


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_requests_in_small_pieces(raw: RawHttp, size: int) -> None:
    """However the network cuts them."""
    stream = PUBLISH + raw_request("GET", "/consume/orders") + HEALTH
    pieces = each_byte(stream) if size == 1 else _cut(stream, size)
    for piece in pieces:
        raw.send(piece)
    assert raw.answer().json["offset"] == 0
    assert raw.answer().json["data"] == {"a": 1}
    assert raw.answer().json == {"status": "ok"}


def _cut(stream: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]


# --- bodies ---------------------------------------------------------------------------------------
def test_a_chunked_body(raw: RawHttp) -> None:
    """In pieces of any size, in any number of writes."""
    raw.send(
        "POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for chunk in (b'{"a"', b":", b"[1,2,3]", b"}"):
        raw.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    raw.send(b"0\r\n\r\n", raw_request("GET", "/consume/orders"))
    assert raw.answer().status == 200
    assert raw.answer().json["data"] == {"a": [1, 2, 3]}


def asking(body: bytes, **headers: str) -> tuple[bytes, bytes]:
    """The head of a publish that asks before it sends its body, and the body."""
    whole = raw_request("POST", "/publish/orders", body, expect="100-continue", **headers)
    head, _, _ = whole.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def test_who_asks_before_sending_is_told_to_go_on(raw: RawHttp) -> None:
    """Then comes the body, then the answer."""
    head, body = asking(b'{"a":1}')
    raw.send(head)
    assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(body)
    assert raw.answer().status == 200


def test_who_asks_behind_others_is_told_when_these_are_answered(raw: RawHttp) -> None:
    """The word comes behind their answers, and it comes."""
    head, body = asking(b'{"a":1}')
    raw.send(PUBLISH * 3, raw_request("GET", "/topics"), head)
    assert [raw.answer().status for _ in range(4)] == [200] * 4
    assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(body)
    assert raw.answer().json["offset"] == 3


def test_who_asks_for_too_much_is_told_no(raw: RawHttp) -> None:
    """Before anything was sent."""
    head, _ = asking(b"x")
    raw.send(head.replace(b"Content-Length: 1\r\n", b"Content-Length: 999999999\r\n"))
    answer = raw.answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert raw.is_ended()


def test_who_sends_too_much_hears_it_all_the_same(
    raw: RawHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is not lost in a reset, however long the client goes on sending before it looks."""
    raw.send("POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
    piece = b"x" * (1 << 16)
    for _ in range(200):
        raw.send(piece)
    answer = raw.answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


def test_who_never_stops_sending_is_dropped(
    server: RunningServer, raw: RawHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its answer it has a moment, not more."""
    monkeypatch.setattr(one_connection, "LINGER_S", 0.1)
    raw.send("POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
    assert raw.answer().status == 413
    with contextlib.suppress(OSError):  # a reset, or a broken pipe
        while True:
            raw.send(b"x" * 1000)
    server.wait_until(lambda: not server.server.hub.connections)


def test_without_a_token_no_body_is_kept() -> None:
    """The refusal comes before the body, however large that is meant to be."""
    with running_server(memory=True, token="secret") as server:
        with RawHttp(server.http_address) as raw:
            head, _ = asking(b"x")
            raw.send(head.replace(b"Content-Length: 1\r\n", b"Content-Length: 50000000\r\n"))
            answer = raw.answer()
            assert (answer.status, answer.code) == (401, "unauthenticated")
            assert raw.is_ended()
        with RawHttp(server.http_address) as raw:
            head, body = asking(b"1", authorization="Bearer secret")
            raw.send(head)
            assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.send(body)
            assert raw.answer().status == 200


# --- what is not HTTP -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raw_bytes", "status", "code"),
    [
        (b"rubbish\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414, "uri_too_long"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000, 431, "headers_too_large"),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n"
            + b"".join(b"X%d: a\r\n" % n for n in range(300)),
            431,
            "headers_too_large",
        ),
        (
            b"POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"zz\r\n{}\r\n0\r\n\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nX-Header-A: a\rX-Header-B: b\r\n\r\n",
            400,
            "bad_request",
        ),
    ],
)
def test_what_cannot_be_read_is_answered_and_ends_the_connection(
    server: RunningServer, raw: RawHttp, raw_bytes: bytes, status: int, code: str
) -> None:
    """Behind the answers to what was before it; nothing of it is done."""
    raw.send(PUBLISH, raw_bytes)
    assert raw.answer().status == 200
    if status == 431 and len(raw_bytes) > 70_000:
        for _ in range(3):
            raw.send(b"a" * 50_000)
    answer = raw.answer()
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["connection"] == "close"
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.is_ended()
    assert server.call(lambda: server.engine.topics.find("orders").end_offsets()) == [1]


def test_a_body_that_is_broken_off_is_not_published(server: RunningServer, http: Http) -> None:
    """Half a message is none, whether its length was announced or not."""
    heads = ("Content-Length: 100", "Transfer-Encoding: chunked")
    for head in heads:
        with RawHttp(server.http_address) as raw:
            raw.send(
                f"POST /publish/orders HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n", b'5\r\n"abc"'
            )
    server.wait_until(lambda: len(server.server.hub.connections) == 0)
    assert http.ok("GET", "/topics") == []


def test_an_offer_of_http_2_with_a_body(raw: RawHttp) -> None:
    """As Java's client and ``curl --http2`` make it: declined, and everything goes on."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMA"}
    for offset in range(2):
        raw.send(raw_request("POST", "/publish/orders", b'{"a":1}', **offer))
        assert raw.answer().json["offset"] == offset
    raw.send(raw_request("GET", "/topics", **offer))
    assert raw.answer().json[0]["messages"] == 2


def test_an_absolute_address_and_one_in_percent(raw: RawHttp) -> None:
    """As proxies send it, and as careful clients write it."""
    raw.send("POST http://broker:8080/publish/user%2Eevents HTTP/1.1\r\nHost: localhost\r\n")
    raw.send("Content-Length: 2\r\n\r\n{}")
    assert raw.answer().json["topic"] == "user.events"
    raw.send(raw_request("GET", "/consume/user.events%2Fbatch"))
    assert raw.answer().code == "invalid_topic"
    raw.send("OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.answer().status == 204


# --- cost -----------------------------------------------------------------------------------------
def test_who_does_not_read_gets_nothing_put_together(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty answers of a megabyte are asked for at once; only what is read is made."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 1000)
    with RawHttp(server.http_address, receive_bytes=256 << 10) as raw:
        raw.send(raw_request("GET", "/topics/orders/messages?limit=1000") * 40)
        wait_until(lambda: len(connections(server)) == 2)
        (slow,) = [c for c in connections(server) if not c.outbox.writable or waits(c)]
        size = server.call(lambda: slow._transport.get_write_buffer_size())
        assert size < 4 << 20
        for _ in range(40):
            assert len(raw.answer().json) == 1000


def test_who_takes_nothing_is_dropped(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, with what was kept for it."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    monkeypatch.setattr(flow, "STALLED_S", 0.3)
    http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 1000)
    with RawHttp(server.http_address, receive_bytes=16 << 10) as raw:
        raw.send(raw_request("GET", "/topics/orders/messages?limit=1000") * 300)
        server.wait_until(lambda: len(server.server.hub.connections) == 1)


def test_a_mistake_of_ours_is_one_answer(
    server: RunningServer, http: Http, raw: RawHttp, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """500 for who asked, wherever it happened; the connection and the others go on."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    http.publish("orders", 1)
    monkeypatch.setattr("headrace.server.health_routes.readiness", fail)
    monkeypatch.setattr("headrace.server.routes.fetch_page", fail)
    monkeypatch.setattr("headrace.server.routes.browse", fail)
    monkeypatch.setattr("headrace.broker.administration.Administration.list_topics", fail)
    raw.send(PUBLISH, raw_request("GET", "/health"), raw_request("GET", "/topics"), PUBLISH)
    raw.send(raw_request("GET", "/topics/orders/messages"), HEALTH)
    assert raw.answer().status == 200
    assert (raw.answer().code, raw.answer().code) == ("bug", "bug")
    assert raw.answer().status == 200
    broken = raw.answer()
    assert (broken.status, broken.code) == (500, "bug")
    assert "ZeroDivision" not in broken.body.decode()
    assert raw.answer().status == 200
    assert "a mistake" in caplog.text


# --- stopping -------------------------------------------------------------------------------------
def test_what_is_under_way_is_answered_before_a_stop() -> None:
    """All publishes that had been read; then the connection ends."""
    with running_server() as server, RawHttp(server.http_address) as raw:
        raw.send(PUBLISH)
        assert raw.answer().status == 200
        raw.send(PUBLISH * 100)
        (connection,) = connections(server)
        server.wait_until(lambda: connection.outbox.unanswered > 0 or _end(server) == 101)
        server.stop()
        answered = 0
        while raw.buffer or raw._more():
            assert raw.answer().json["offset"] == answered + 1
            answered += 1
        server.start()
        assert server.call(lambda: _end(server)) == answered + 1


def _end(server: RunningServer) -> int:
    return server.engine.topics.find("orders").end_offsets()[0]


def test_a_stop_does_not_wait_for_idle_connections() -> None:
    """Nobody is asked to hang up first."""
    with running_server(memory=True) as server:
        idle = [RawHttp(server.http_address) for _ in range(5)]
        half = RawHttp(server.http_address)
        half.send("POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        kept = http_of(server)
        kept.publish("orders", 1)
        before = time.monotonic()
        server.stop()
        assert time.monotonic() - before < 3
        for raw in (*idle, half):
            assert raw.is_ended()
            raw.close()
        kept.close()


# --- TLS ------------------------------------------------------------------------------------------
def test_https_and_secure_websockets(tmp_path: Path) -> None:
    """The same over TLS: pipelined, refused and answered, taken over, stopped in good order."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=cert)
    with running_server(memory=True, tls_cert=str(cert), tls_key=str(key)) as server:
        with RawHttp(server.http_address) as raw:
            raw.socket = context.wrap_socket(raw.socket, server_hostname="localhost")
            raw.send(PUBLISH * 100)
            assert [raw.answer().json["offset"] for _ in range(100)] == [*range(100)]
            raw.send("POST /publish/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999")
            raw.send("\r\n\r\n", b"x" * 100_000)
            assert raw.answer().status == 413
        host, port = server.http_address
        with connect(
            f"wss://localhost:{port}/ws", ssl=context, sock=_dial(host, port), open_timeout=60
        ) as client:
            client.send('{"type": "publish", "topic": "orders", "data": 1, "messageId": 1}')
            assert '"offset":100' in str(client.recv(10))
            server.stop()
            with pytest.raises(ConnectionClosed):
                client.recv(10)
            assert client.close_code == 1001


def _dial(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), 10)

"""WebSockets below the commands: handshake, frames, pings, closing, and what a connection may cost."""

import base64
import contextlib
import itertools
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headrace.server import connection as one_connection
from headrace.server import flow, websocket
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Http, RawHttp, http_of, raw_request
from tests.server.http_websocket import (
    ACCEPT,
    BINARY,
    CLOSE,
    CONT,
    KEY,
    PING,
    PONG,
    TEXT,
    WebSocket,
    frame,
    text,
)

PUBLISH = {"type": "publish", "topic": "orders", "data": 1, "messageId": "m"}
UPGRADE = {
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
    "sec_websocket_key": KEY,
    "sec_websocket_version": "13",
}


@pytest.fixture
def ws(server: RunningServer) -> Iterator[WebSocket]:
    """A connection."""
    with WebSocket(server.http_address) as connection:
        yield connection


def connections(server: RunningServer) -> list[Any]:
    return server.call(lambda: list(server.server.hub.connections))


# --- the handshake --------------------------------------------------------------------------------
def test_no_compression_is_agreed_on(server: RunningServer) -> None:
    """However it is asked for: there is nothing to bomb."""
    offer = "permessage-deflate; client_max_window_bits, x-webkit-deflate-frame"
    with WebSocket(server.http_address, sec_websocket_extensions=offer) as ws:
        assert "sec-websocket-extensions" not in ws.head.headers
        ws.raw.send(frame(TEXT, b"\xaaV*\xa9,HU\xb2R*\xc8\xccKW\xaa\x05\x00", reserved=4))
        assert ws.closed()[0] == 1002


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 101),
        ({"upgrade": "WebSocket"}, 101),
        ({"cookie": "x" * 20_000}, 101),
        ({"sec_websocket_protocol": "mqtt"}, 101),
        ({"upgrade": None}, 426),
        ({"upgrade": "h2c"}, 426),
        ({"connection": "keep-alive"}, 426),
        ({"sec_websocket_version": "8"}, 426),
        ({"sec_websocket_version": None}, 400),
        ({"sec_websocket_key": None}, 400),
        ({"sec_websocket_key": "short"}, 400),
    ],
)
def test_the_handshake(raw: RawHttp, changes: dict[str, str | None], status: int) -> None:
    """What a browser sends is taken, also with much around it; what is not proper is refused."""
    headers = {**UPGRADE, **changes}
    raw.request("GET", "/ws", **{name: v for name, v in headers.items() if v is not None})
    answer = raw.answer()
    assert answer.status == status
    if status == 101:
        assert answer.headers["sec-websocket-accept"] == ACCEPT
        assert "sec-websocket-protocol" not in answer.headers
    else:
        assert answer.code in ("not_a_websocket", "bad_request")
    if status == 426:
        assert answer.headers["upgrade"] == "websocket"
        assert answer.headers["sec-websocket-version"] == "13"


def test_after_a_refused_handshake_the_connection_is_not_deaf(server: RunningServer) -> None:
    """It goes on, or it ends and says so."""
    for changes in ({"sec_websocket_version": "8"}, {"upgrade": "h2c"}):
        with RawHttp(server.http_address) as raw:
            raw.request("GET", "/ws", **{**UPGRADE, **changes})
            answer = raw.answer()
            assert answer.status == 426
            if answer.headers.get("connection") == "close":
                assert raw.is_ended()
            else:
                raw.request("GET", "/health/live")
                assert raw.answer().status == 200


def test_frames_that_come_with_the_handshake(raw: RawHttp, http: Http) -> None:
    """In one write, behind other requests: nothing is lost between the protocols."""
    commands = b"".join(text({**PUBLISH, "messageId": number}) for number in range(3))
    raw.send(
        raw_request("POST", "/publish/orders", b"0") * 3,
        raw_request("GET", "/ws", **UPGRADE),
        commands,
    )
    assert [raw.answer().status for _ in range(3)] == [200] * 3
    assert raw.answer().status == 101
    for number in range(3):
        assert json.loads(raw.exactly(2 + raw_size(raw))[2:])["messageId"] == number
    assert http.ok("GET", "/topics/orders")["messages"] == 6


def raw_size(raw: RawHttp) -> int:
    """The size of the frame that comes next, a small one."""
    while len(raw.buffer) < 4:
        assert raw._more()
    if raw.buffer[1] < 126:
        return raw.buffer[1]
    size = int.from_bytes(raw.buffer[2:4], "big")
    raw.buffer = raw.buffer[2:]
    return size


# --- frames ---------------------------------------------------------------------------------------
def test_frames_in_any_pieces(ws: WebSocket) -> None:
    """Byte by byte, many in one write, and with pings in between."""
    for byte in text(PUBLISH):
        ws.raw.send(bytes([byte]))
    assert ws.read()["offset"] == 0
    ws.raw.send(text(PUBLISH) * 50)
    assert [ws.read()["offset"] for _ in range(50)] == [*range(1, 51)]


def test_a_command_in_fragments(ws: WebSocket) -> None:
    """However many, also empty ones, and with control frames between them."""
    raw = json.dumps({**PUBLISH, "data": "é" * 100}).encode()
    pieces = [raw[at : at + 7] for at in range(0, len(raw), 7)]
    ws.raw.send(frame(TEXT, b"", fin=False))
    for piece in pieces:
        ws.raw.send(frame(CONT, piece, fin=False), frame(PING, b"still there?"))
        assert ws.frame() == (PONG, b"still there?")
        ws.raw.send(frame(CONT, b"", fin=False) * 3)
    ws.raw.send(frame(CONT))
    assert ws.read()["type"] == "published"
    assert ws.ok("ping")["type"] == "pong"


def test_pings_are_answered(ws: WebSocket) -> None:
    """With what they brought; pongs that nobody asked for are fine."""
    ws.raw.send(frame(PING, b"hello"), frame(PONG, b"unasked"), frame(PING))
    assert ws.frame() == (PONG, b"hello")
    assert ws.frame() == (PONG, b"")


@pytest.mark.parametrize(
    ("raw_bytes", "code"),
    [
        (frame(BINARY, b"{}"), 1003),
        (frame(BINARY, b"{", fin=False) + frame(CONT, b"}"), 1003),
        (frame(TEXT, b'{"type": "\xff"}'), 1007),
        (frame(TEXT, b'"\xed\xa0\x80"'), 1007),
        (frame(TEXT, b"\xc3", fin=False) + frame(CONT, b"\x28"), 1007),
        (frame(TEXT, b"x" * (2 << 20)), 1009),
        (frame(TEXT, b"x" * (1 << 20), fin=False) + frame(CONT, b"x" * (1 << 20)), 1009),
        (b"\x81\xff\x00\x00\x00\x7f\xff\xff\xff\xff", 1009),
        (frame(TEXT, b"{}", masked=False), 1002),
        (frame(TEXT, b"{}", reserved=1), 1002),
        (frame(0x3, b"{}"), 1002),
        (frame(CONT, b"{}"), 1002),
        (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(CLOSE, b"\x00"), 1002),
        (frame(CLOSE, struct.pack(">H", 999)), 1002),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
    ],
)
def test_what_is_not_as_it_must_be_ends_the_connection(
    server: RunningServer, ws: WebSocket, raw_bytes: bytes, code: int
) -> None:
    """With the code that says why; what was before it is done, what comes behind it is not."""
    ws.ok("publish", topic="orders", data=0)
    ws.raw.send(raw_bytes, text(PUBLISH))
    assert ws.closed()[0] == code
    ws.raw.socket.shutdown(socket.SHUT_WR)
    assert ws.raw.is_ended()
    assert server.call(lambda: server.engine.topics.find("orders").end_offsets()) == [1]
    server.wait_until(lambda: not server.server.hub.connections)


def test_the_reason_arrives_although_the_client_goes_on_sending(
    server: RunningServer, ws: WebSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not lost in a reset; but there is an end to it."""
    monkeypatch.setattr(one_connection, "LINGER_S", 0.5)
    ws.raw.send(frame(TEXT, b"x" * (8 << 20)))
    assert ws.closed()[0] == 1009
    server.wait_until(lambda: not server.server.hub.connections)


def test_the_largest_message_fits(ws: WebSocket, http: Http) -> None:
    """As JSON and as base64, which is longer."""
    size = 1 << 20
    assert ws.ok("publish", topic="orders", data="x" * (size - 2))["offset"] == 0
    data = base64.b64encode(bytes(size)).decode()
    assert ws.ok("publish", topic="orders", data=data, encoding="base64")["offset"] == 1
    assert ws.ask("publish", topic="orders", data="x" * (size - 1))["code"] == "message_too_large"


def test_fragments_without_end_cost_a_bounded_buffer(server: RunningServer, ws: WebSocket) -> None:
    """A million empty ones are nothing, and small ones are as long as they are."""
    ws.raw.send(frame(TEXT, b"", fin=False))
    ws.raw.send(frame(CONT, b"", fin=False) * 20_000)
    ws.raw.send(frame(CONT, b"x", fin=False) * 20_000)
    ws.raw.send(frame(PING, b"now"))
    assert ws.frame() == (PONG, b"now")
    (connection,) = connections(server)
    assert server.call(lambda: len(connection.session._partial)) == 20_000


@given(data=st.binary(max_size=200))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_the_server_goes_on(server: RunningServer, data: bytes) -> None:
    """Any bytes behind a handshake end at most their own connection."""
    with WebSocket(server.http_address) as ws:
        ws.raw.send(data)
        ws.raw.socket.shutdown(socket.SHUT_WR)
        while ws.raw._more():
            pass
    with WebSocket(server.http_address) as ws:
        assert ws.ok("ping")["type"] == "pong"


# --- closing --------------------------------------------------------------------------------------
def test_a_client_that_closes_gets_its_close_frame_back(
    server: RunningServer, ws: WebSocket
) -> None:
    """And then the connection ends, with all that belonged to it."""
    ws.ok("subscribe", topic="orders")
    ws.ok("subscribe", topic="orders", group="billing")
    ws.raw.send(frame(CLOSE, struct.pack(">H", 1000) + b"done"))
    assert ws.closed() == (1000, "done")
    assert ws.raw.is_ended()
    server.wait_until(lambda: not server.server.hub.connections)
    assert server.call(lambda: len(server.engine._followers)) == 0
    assert server.call(lambda: len(server.engine.subscription("billing").members)) == 0


def test_nothing_comes_behind_the_close_frame(ws: WebSocket, http: Http) -> None:
    """No delivery and no answer, although some are on their way."""
    ws.ok("subscribe", topic="orders")
    ws.raw.send(text(PUBLISH) * 100, frame(CLOSE, struct.pack(">H", 1000)), text(PUBLISH))
    ws.closed()
    assert ws.raw.is_ended()


def test_nothing_comes_behind_the_close_frame_on_a_busy_broker(
    monkeypatch: pytest.MonkeyPatch, server: RunningServer
) -> None:
    """The frames before and after it run in different turns of the loop, and messages are stored in between."""
    asked = itertools.count()
    monkeypatch.setattr(server.engine.pace, "is_past", lambda _deadline: next(asked) % 2 == 1)
    stray = frame(CLOSE, struct.pack(">H", 1000)), text(PUBLISH)
    for _ in range(6):
        with WebSocket(server.http_address) as busy:
            busy.ok("subscribe", topic="orders")
            busy.ok("subscribe", topic=">")
            busy.raw.send(text(PUBLISH) * 30, *stray)
            busy.closed()
            assert busy.raw.is_ended()


def test_a_library_and_we_part_in_good_order(server: RunningServer) -> None:
    """As a well-behaved client sees it."""
    host, port = server.http_address
    with connect(f"ws://{host}:{port}/ws") as client:
        client.send(json.dumps(PUBLISH))
        assert json.loads(client.recv(10))["type"] == "published"
        client.close(1001, "leaving")
        assert (client.close_code, client.close_reason) == (1001, "leaving")


def test_a_stop_says_1001(monkeypatch: pytest.MonkeyPatch) -> None:
    """After what is under way was answered, without waiting for clients that do not answer."""
    monkeypatch.setattr(one_connection, "LINGER_S", 0.3)
    with running_server() as server:
        host, port = server.http_address
        silent = WebSocket(server.http_address)
        silent.ok("subscribe", topic="orders")
        with connect(f"ws://{host}:{port}/ws") as client:
            client.send(json.dumps({"type": "subscribe", "topic": "orders", "group": "g"}))
            client.send(json.dumps({**PUBLISH, "messageId": "before"}))
            found = [json.loads(client.recv(10)) for _ in range(2)]
            assert {item["type"] for item in found} == {"published", "message"}
            client.send(json.dumps([{**PUBLISH, "messageId": n} for n in range(500)]))
            before = time.monotonic()
            server.stop()
            assert time.monotonic() - before < 4.5
            answered = 0
            with contextlib.suppress(ConnectionClosed):
                while True:
                    answered += json.loads(client.recv(10))["type"] == "published"
            assert client.close_code == 1001
            assert "stopping" in (client.close_reason or "")
        assert silent.closed()[0] == 1001
        silent.close()
        server.start()
        ends = server.call(lambda: server.engine.topics.find("orders").end_offsets())
        assert ends == [answered + 1], "who was answered is stored, and who is stored was answered"


# --- peers that are gone --------------------------------------------------------------------------
def test_a_peer_that_does_not_answer_is_dropped(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pings without a pong; what it held goes to others."""
    monkeypatch.setattr(websocket, "PING_S", 0.1)
    dead = WebSocket(server.http_address)
    dead.ok("subscribe", topic="orders", group="billing", ack="manual")
    http.publish("orders", 1)
    dead.message()
    with WebSocket(server.http_address) as alive:
        alive.ok("subscribe", topic="orders", group="billing", ack="manual")
        again = alive.message()
        assert (again["data"], again["retryCount"]) == (1, 1)
        server.wait_until(lambda: len(server.server.hub.connections) == 2)
    dead.close()


def test_a_peer_that_answers_is_kept(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has nothing to say."""
    monkeypatch.setattr(websocket, "PING_S", 0.05)
    with WebSocket(server.http_address) as ws:
        for _ in range(6):
            opcode, payload = ws.frame()
            assert opcode == PING
            ws.raw.send(frame(PONG, payload))
        assert ws.ok("ping")["type"] == "pong"


# --- cost -----------------------------------------------------------------------------------------
def test_a_slow_subscriber_costs_a_bounded_buffer_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is behind in the log, not in memory; others get everything meanwhile."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    monkeypatch.setattr(flow, "STALLED_S", 1.0)
    with running_server(durability="never") as server:
        http = http_of(server)
        slow = WebSocket(server.http_address, receive_bytes=16 << 10)
        slow.ok("subscribe", topic="orders")
        (stalled,) = [c for c in connections(server) if c.protocol == "websocket"]
        with WebSocket(server.http_address) as quick:
            quick.ok("subscribe", topic="orders")
            for _ in range(20):
                http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 500)
                assert len(quick.messages(500)) == 500
                size = server.call(lambda: stalled.outbox._transport.get_write_buffer_size())
                assert size < 3 << 20
            wait_until(lambda: stalled not in connections(server))
        slow.close()
        http.close()


def test_a_slow_subscriber_that_reads_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, without a gap."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    with running_server(durability="never") as server:
        http = http_of(server)
        with WebSocket(server.http_address, receive_bytes=64 << 10) as ws:
            ws.ok("subscribe", topic="orders")
            for _ in range(4):
                http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 500)
            assert [ws.message()["offset"] for _ in range(2000)] == [*range(2000)]
        http.close()


def test_a_flood_of_publishes_is_slowed_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is stored, only so much is read; then everything is, in order."""
    monkeypatch.setattr(flow, "UNANSWERED_BYTES_HIGH", 256 << 10)
    monkeypatch.setattr(flow, "UNANSWERED_BYTES_LOW", 64 << 10)
    with running_server() as server, WebSocket(server.http_address) as ws:
        ws.ok("publish", topic="orders", data=0)
        workers = server.engine.workers
        held: list[Any] = []
        submit = workers.submit
        workers.submit = lambda work, done: held.append((work, done))  # type: ignore[method-assign]
        data = text({"type": "publish", "topic": "orders", "data": "x" * 1000})
        ws.raw.socket.settimeout(0.3)
        count = 0
        with contextlib.suppress(TimeoutError):
            while count < 64_000:
                ws.raw.socket.sendall(data)
                count += 1
        assert count < 32_000, "it was never slowed"
        (connection,) = connections(server)
        assert server.call(lambda: connection.outbox.unanswered_bytes) < (256 << 10) + (1 << 20)

        def release() -> None:
            workers.submit = submit  # type: ignore[method-assign]
            for work, done in held:
                submit(work, done)

        server.call(release)
        ends = server.engine.topics.find("orders").end_offsets
        server.wait_until(lambda: ends()[0] >= count + 1)


def test_many_connections_at_once(server: RunningServer, http: Http) -> None:
    """Three hundred, each with its own subscription; all gone when they are closed."""
    sockets = [WebSocket(server.http_address) for _ in range(300)]
    for number, ws in enumerate(sockets):
        ws.ok("subscribe", topic=f"t.{number % 10}")
    for number in range(10):
        http.publish(f"t.{number}", number)
    assert [ws.message()["data"] for ws in sockets] == [number % 10 for number in range(300)]
    for ws in sockets:
        ws.close()
    server.wait_until(lambda: len(server.server.hub.connections) == 1)
    assert server.call(lambda: len(server.engine._followers)) == 0

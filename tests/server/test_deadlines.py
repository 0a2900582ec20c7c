"""Peers that are too slow lose their connection: silent ones, dripping heads, dripping bodies, idle ones.

The server's clock is not waited for: ``later`` looks at the deadlines as if time had passed.
"""

import pytest

from headrace.errors import Closed
from headrace.server.connection import Connection
from headrace.testing import RunningServer, running_server
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Events, RawHttp, each_byte, raw_request
from tests.server.http_websocket import WebSocket

PUBLISH = raw_request("POST", "/publish/orders", b'{"a":1}')
HEALTH = raw_request("GET", "/health/live")
HEAD_S, IDLE_S, RATE = 20.0, 75.0, 1024


def connections(server: RunningServer) -> list[Connection]:
    return server.call(lambda: list(server.server.hub.connections))


class Time:
    """Of the server's deadlines; it passes when it is told to."""

    def __init__(self, server: RunningServer):
        self._server = server
        self._passed = 0.0

        def stop() -> None:
            assert server.server.deadlines is not None
            server.server.deadlines.close()  # it looks only when this class tells it to

        server.call(stop)
        self.passes(0.0)

    def passes(self, seconds: float) -> None:
        self._passed += seconds

        def look() -> None:
            server = self._server.server
            assert server.deadlines is not None
            server.deadlines.check(server.deadlines._loop.time() + self._passed)

        self._server.call(look)


def heard(server: RunningServer, count: int) -> None:
    """Wait until so many connections have sent something that the server has read."""
    server.wait_until(
        lambda: sum(c.session is not None for c in server.server.hub.connections) == count
    )


def test_a_silent_connection_is_closed(server: RunningServer) -> None:
    """On both ports, without a word; on the TCP port a person may think for longer."""
    time = Time(server)
    http, text = RawHttp(server.http_address), TextSocket(server.address)
    server.wait_until(lambda: len(server.server.hub.connections) == 2)
    time.passes(HEAD_S - 2)
    assert len(connections(server)) == 2
    time.passes(4)
    assert http.is_ended()
    assert text.ask("PING") == ["PONG"]
    time.passes(10 * IDLE_S)  # who has said something sensible may be silent
    assert text.ask("PING") == ["PONG"]
    silent = TextSocket(server.address)
    server.wait_until(lambda: len(server.server.hub.connections) == 2)
    silent.send(b"PUB ord")
    heard(server, 2)
    time.passes(IDLE_S + 2)
    with pytest.raises((Closed, OSError)):
        silent.line()
    assert server.call(lambda: server.server.hub.overdue) == 2
    for each in (http, text, silent):
        each.close()


def test_a_head_that_drips_is_closed_however_often_a_byte_comes(server: RunningServer) -> None:
    """The whole head has one deadline, from its first byte; 408 says so."""
    time = Time(server)
    with RawHttp(server.http_address) as raw:
        for byte in each_byte(PUBLISH[: int(HEAD_S) + 1]):
            raw.send(byte)
            heard(server, 1)
            time.passes(1.0)
        answer = raw.answer()
        assert (answer.status, answer.code) == (408, "request_stalled")
        assert raw.is_ended()


def test_the_second_request_has_a_deadline_of_its_own(server: RunningServer) -> None:
    """Half a request behind a whole one; the time of the first one is not counted."""
    time = Time(server)
    with RawHttp(server.http_address) as raw:
        raw.send(PUBLISH)
        assert raw.answer().status == 200
        time.passes(HEAD_S)
        raw.send(PUBLISH[:-1])
        server.wait_until(lambda: server.server.hub.connections and _is_inside(server))
        time.passes(1)
        time.passes(HEAD_S - 2)
        raw.send(PUBLISH[-1:])
        assert raw.answer().status == 200
        raw.send(PUBLISH[:-1])
        server.wait_until(lambda: _is_inside(server))
        time.passes(1)
        time.passes(HEAD_S + 2)
        assert raw.answer().code == "request_stalled"


def _is_inside(server: RunningServer) -> bool:
    (connection,) = server.server.hub.connections
    return connection.session._http.is_inside  # type: ignore[union-attr]


def test_a_body_must_come_at_a_rate(server: RunningServer) -> None:
    """A large body has the time that it needs at the least rate; one that drips has not."""
    time = Time(server)
    size = 100 * RATE
    with RawHttp(server.http_address) as fair, RawHttp(server.http_address) as drip:
        head = raw_request("POST", "/publish/orders", b"x" * size, content_type="text/plain")
        for raw in (fair, drip):
            raw.send(head[: len(head) - size])
        for second in range(40):
            fair.send(b"x" * RATE)
            if second < HEAD_S:
                drip.send(b"x")
            bodies = (second + 1) * RATE

            def fed(bodies: int = bodies) -> bool:
                return bodies in [
                    c.session._http.buffered  # type: ignore[union-attr]
                    for c in server.server.hub.connections
                    if c.session is not None
                ]

            server.wait_until(fed)
            time.passes(1.0)
        answer = drip.answer()
        assert (answer.status, answer.code) == (408, "request_stalled")
        fair.send(b"x" * (size - 40 * RATE))
        assert fair.answer().status == 200


def test_a_kept_connection_ends_when_it_is_idle(server: RunningServer) -> None:
    """And not while it is used, or waits for an answer."""
    time = Time(server)
    idle, used, waiting = (RawHttp(server.http_address) for _ in range(3))
    for raw in (idle, used, waiting):
        raw.send(HEALTH)
        assert raw.answer().status == 200
    waiting.send(raw_request("GET", "/consume/orders?wait=60000"))
    server.wait_until(lambda: any(c.outbox.busy for c in server.server.hub.connections))
    time.passes(1)
    for _ in range(4):
        used.send(HEALTH)
        assert used.answer().status == 200
        time.passes(IDLE_S / 2)
    assert idle.is_ended()
    assert len(connections(server)) == 2
    used.send(PUBLISH)
    assert used.answer().status == 200
    assert waiting.answer().status == 200
    for raw in (idle, used, waiting):
        raw.close()


def test_streams_and_websockets_are_not_idle(server: RunningServer) -> None:
    """They have pings of their own."""
    time = Time(server)
    with Events(server.http_address, "/stream/orders") as events:
        socket = WebSocket(server.http_address)
        assert socket.ask("ping")["type"] == "pong"
        events.begin()
        assert not server.call(lambda: server.server.hub.watched)
        time.passes(10 * IDLE_S)
        assert len(connections(server)) == 2
        assert socket.ask("ping")["type"] == "pong"
        socket.close()


def test_the_clock_of_the_server_closes_them() -> None:
    """Nobody has to look: the server does, once a second."""
    with running_server(memory=True, head_timeout=0.1, idle_timeout=0.1) as server:
        silent, half, kept = (RawHttp(server.http_address) for _ in range(3))
        half.send(PUBLISH[:20])
        kept.send(HEALTH)
        assert kept.answer().status == 200
        assert half.answer().code == "request_stalled"
        for raw in (silent, half, kept):
            assert raw.is_ended()
            raw.close()


def test_a_look_at_all_connections_is_cheap(server: RunningServer) -> None:
    """Only those are looked at that have a deadline."""
    inside = [TextSocket(server.address) for _ in range(20)]
    assert all(text.ask("PING") == ["PONG"] for text in inside)
    assert server.call(lambda: len(server.server.hub.watched)) == 0
    with RawHttp(server.http_address) as raw:
        raw.send(HEALTH)
        raw.answer()
        assert server.call(lambda: len(server.server.hub.watched)) == 1
    server.wait_until(lambda: not server.server.hub.watched)
    for text in inside:
        text.close()

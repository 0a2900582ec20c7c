"""Connections as such: how many, how long, and what happens when they break."""

import socket
import struct

import pytest

from headrace.errors import Closed, HeadraceError
from headrace.server import connection as connections
from headrace.server.keep_alive import KEEPALIVE
from headrace.testing import RunningServer, running_server, server_process, wait_until
from tests.contract.raw_binary import (
    CREATE_SUBSCRIPTION,
    HEARTBEAT,
    PUBLISH,
    SUBSCRIBE,
    FrameSocket,
    frame,
)
from tests.contract.raw_text import TextSocket


def test_connections_are_counted(server: RunningServer) -> None:
    """Those that are open, those that ever were, and which protocol they speak."""
    hub = server.server.hub
    text, frames = TextSocket(server.address), FrameSocket(server.address)
    text.ask("PING")
    frames.ask(HEARTBEAT)
    protocols = server.call(lambda: sorted(c.protocol for c in hub.connections))
    assert protocols == ["binary", "text"]
    assert server.call(lambda: (hub.accepted, hub.refused)) == (2, 0)
    text.close()
    server.wait_until(lambda: len(hub.connections) == 1)
    frames.close()
    server.wait_until(lambda: not hub.connections)
    assert server.call(lambda: hub.accepted) == 2


def test_more_connections_than_allowed_are_refused_and_others_go_on() -> None:
    """The one too many is closed at once; when somebody leaves there is room again."""
    with running_server(memory=True, max_connections=3) as server:
        hub = server.server.hub
        inside = [TextSocket(server.address) for _ in range(3)]
        for text in inside:
            assert text.ask("PING") == ["PONG"]
        outside = TextSocket(server.address)
        with pytest.raises((Closed, OSError)):
            outside.ask("PING")
        outside.close()
        assert server.call(lambda: (hub.accepted, hub.refused)) == (3, 1)
        assert all(text.ask("PING") == ["PONG"] for text in inside)
        inside.pop().close()
        server.wait_until(lambda: len(hub.connections) == 2)
        again = TextSocket(server.address)
        assert again.ask("PING") == ["PONG"]
        for text in [*inside, again]:
            text.close()


@pytest.mark.parametrize(
    ("first", "protocol"),
    [(b"P", "text"), (b"p", "text"), (b"\r", "text"), (b"\n", "text"), (b" ", "text"),
     (b"\t", "text"), (b"\0", "binary"), (b"\x07", "binary"), (b"\xff", "binary"), (b"1", "binary")],
)  # fmt: skip
def test_the_first_byte_tells_the_protocol(
    server: RunningServer, first: bytes, protocol: str
) -> None:
    """Letters and blanks are text, all else is the length of a frame."""
    with socket.create_connection(server.address, 10) as plain:
        plain.sendall(first)
        hub = server.server.hub
        server.wait_until(lambda: [c.protocol for c in hub.connections] == [protocol])


def test_a_peer_that_dies_silently_is_looked_for(server: RunningServer) -> None:
    """TCP keep-alive is on, with times that find it within half a minute."""
    text = TextSocket(server.address)
    text.ask("PING")
    (connection,) = server.server.hub.connections
    sock = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    assert server.call(sock.getsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for name, value in KEEPALIVE:
        option = getattr(socket, name)
        assert server.call(sock.getsockopt, socket.IPPROTO_TCP, option) == value
    text.close()


def test_a_peer_that_sent_heartbeats_and_stops_is_dropped() -> None:
    """A half-open connection is found even where TCP says nothing; its messages go to others."""
    with running_server(memory=True, heartbeat_interval=0.8) as server, server.client() as client:
        silent = FrameSocket(server.address)
        silent.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
        silent.ask(SUBSCRIBE, {"subscription": "billing", "ack": "manual"})
        silent.ask(HEARTBEAT)
        client.publish("orders", b"x")
        assert silent.next_arrival().body == b"x"
        other = client.subscription("billing", "orders")
        message = other.get(10)
        assert (message.value, message.attempt) == (b"x", 2)
        with pytest.raises((Closed, OSError)):
            silent.read()
        silent.close()


def test_a_peer_that_keeps_sending_heartbeats_stays() -> None:
    """And is told how long the broker's patience is."""
    with running_server(memory=True, heartbeat_interval=1.0) as server:
        frames = FrameSocket(server.address)
        for _ in range(5):
            answer = frames.ask(HEARTBEAT)
            assert answer.properties["interval"] == "1"
            with pytest.raises(Exception, match="no frame in time"):
                frames.read(timeout=0.5)
        frames.close()


def test_a_client_keeps_up_with_an_impatient_broker() -> None:
    """Its own interval of 30 s would be too long; it listens to what the broker says."""
    with running_server(memory=True, heartbeat_interval=0.3) as server, server.client() as client:
        client.topics()
        inbox = client.subscribe("orders")
        with pytest.raises(Exception, match="no message"):
            inbox.get(timeout=2.5)
        assert client._core.link.reconnects == 0


def test_a_peer_that_never_sent_a_heartbeat_may_be_silent() -> None:
    """Somebody with netcat thinks for a while."""
    with running_server(memory=True, heartbeat_interval=0.2) as server:
        text = TextSocket(server.address)
        with pytest.raises(Exception, match="no answer in time"):
            text.line(timeout=0.6)
        assert text.ask("PING") == ["PONG"]
        text.close()


def test_a_connection_that_breaks_gives_its_messages_back(server: RunningServer) -> None:
    """At once, with the attempt counted: it may have died of one of them."""
    with server.client() as client:
        dying = TextSocket(server.address)
        assert dying.ask("SUB orders group=billing")[0] == "OK"
        client.publish("orders", b"x")
        assert dying.delivery(10).attempt == 1
        linger = struct.pack("ii", 1, 0)
        dying._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # a reset, no goodbye
        dying.close()
        message = client.subscription("billing", "orders").get(10)
        assert (message.value, message.attempt) == (b"x", 2)


def test_a_connection_that_breaks_in_the_middle_of_a_command_stores_nothing_of_it(
    server: RunningServer,
) -> None:
    """Half a payload is no message; what was whole before it is."""
    for opening in (
        b"PUB orders 2\r\nhiPUB orders 100\r\nhalf",
        frame(PUBLISH, 1, {"topic": "orders"}, b"hi")
        + frame(PUBLISH, 2, {"topic": "orders"}, b"x" * 100)[:90],
    ):
        plain = socket.create_connection(server.address, 10)
        plain.sendall(opening)
        assert plain.recv(4096)
        plain.close()
    server.wait_until(lambda: not server.server.hub.connections)
    with server.client() as client:
        assert [message.value for message in client.fetch("orders")] == [b"hi", b"hi"]


def test_a_broken_connection_ends_its_waiting_fetches(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been half-closed, so it has a while for its answer; then nothing of it is left."""
    monkeypatch.setattr(connections, "HALF_CLOSED_S", 0.2)
    text = TextSocket(server.address)
    text.ask("CREATE orders")
    text.send(b"FETCH orders 0 wait=60000\r\n")
    partition = server.call(lambda: server.engine.partition("orders"))
    server.wait_until(lambda: len(partition.watchers) == 1)
    text.close()
    server.wait_until(lambda: not partition.watchers)


def test_a_thousand_idle_connections_cost_little() -> None:
    """Well below 50 KB each, and one more is served as quickly as the first."""
    with server_process(memory=True) as server:
        first = TextSocket(server.address)
        assert first.ask("PING") == ["PONG"]
        before = server.rss_bytes()
        idle = [socket.create_connection(server.address, 20) for _ in range(1000)]
        for plain in idle:
            plain.sendall(b"PING\r\n")
        for plain in idle:
            assert plain.recv(100) == b"PONG\r\n"
        each = (server.rss_bytes() - before) / len(idle)
        assert each < 50_000, f"{each:.0f} bytes for each idle connection"
        assert first.ask("PING") == ["PONG"]
        for plain in [*idle, first]:
            plain.close()


def test_a_mistake_of_ours_ends_one_connection_and_no_other(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that nobody expected is logged; everybody else goes on."""
    other = TextSocket(server.address)
    assert other.ask("PING") == ["PONG"]
    unlucky = TextSocket(server.address)
    assert unlucky.ask("PING") == ["PONG"]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    connections = server.call(lambda: list(server.server.hub.connections))
    mine = unlucky._socket.getsockname()
    (connection,) = [c for c in connections if c.peer == f"{mine[0]}:{mine[1]}"]
    monkeypatch.setattr(connection.session, "feed", broken)
    with pytest.raises((Closed, OSError)):
        unlucky.ask("PING")
    assert other.ask("PING") == ["PONG"]
    for text in (other, unlucky):
        text.close()


def test_a_bug_in_a_command_is_an_answer(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In every protocol: the command fails with the code ``bug``, the connection goes on."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    text, frames = TextSocket(server.address), FrameSocket(server.address)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.server.members.Memberships.follow", broken)
        patch.setattr("headrace.broker.publishing.Publishing._parts", broken)
        for command, payload in (("SUB orders", b""), ("PUB orders 2 key=k", b"hi")):
            with pytest.raises(HeadraceError) as caught:
                text.ask(command, payload)
            assert caught.value.code == "bug"
        for kind, properties in ((SUBSCRIBE, {}), (PUBLISH, {"key": "k"})):
            with pytest.raises(HeadraceError) as caught:
                frames.ask(kind, {"topic": "orders", **properties}, b"hi")
            assert caught.value.code == "bug"
    assert "a bug" in caplog.text
    assert text.ask("PUB orders 2", b"hi") == ["OK", "0"]
    assert frames.ask(PUBLISH, {"topic": "orders"}, b"hi").properties["offset"] == "1"
    text.close()
    frames.close()


def test_connections_that_come_and_go_leave_nothing_behind(server: RunningServer) -> None:
    """Neither followers nor members nor watchers."""
    for _ in range(30):
        text = TextSocket(server.address)
        assert text.ask("SUB orders")[0] == "OK"
        assert text.ask("SUB orders group=billing") == ["OK"]
        text.close()
    partition = server.call(lambda: server.engine.partition("orders"))
    server.wait_until(lambda: not server.server.hub.connections)
    wait_until(lambda: server.call(lambda: len(partition.watchers)) == 1)
    subscription = server.call(lambda: server.engine.subscription("billing"))
    assert server.call(lambda: len(subscription.members)) == 0
    assert server.call(lambda: len(server.engine._followers)) == 0

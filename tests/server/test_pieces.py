"""What comes at once is read in pieces: wherever these end, and whenever reading stops, the answers are the same."""

import contextlib
import re
import socket
from collections.abc import Callable
from random import Random

import pytest

from headrace.broker.pace import Pace
from headrace.clock import Clock
from headrace.server import connection
from headrace.server.connection import MUCH_BYTES, PIECE_BYTES
from headrace.server.flow import Outbox, RequestQueue
from headrace.testing import RunningServer, running_server
from headrace.wire import binary
from headrace.wire.binary import Type
from tests.contract.raw_binary import FrameSocket
from tests.contract.raw_text import TextSocket
from tests.fakes import FakeLoop
from tests.server.test_flow import FakeTransport, WorkClock, connection_of

COUNT = 6
HOST = b"HTTP/1.1\r\nHost: localhost\r\n"


def text() -> bytes:
    """Publishes, fetches, mistakes and pings, with both kinds of line ends."""
    commands = [b"PING\r\n"]
    for number in range(COUNT):
        commands += [
            b"PUB orders 1\r\n%d\r\n" % number,
            b"PUB orders 3 key=k\nabc",
            b"\n\r\nFETCH orders %d\r\n" % number,
            b"NOSUCH\n",
            b"TOPICS\r\n",
        ]
    return b"".join([*commands, b"QUIT\r\n"])


def http() -> bytes:
    """Bodies with a length and in chunks, and requests without."""
    requests = []
    for number in range(COUNT):
        requests += [
            b"POST /publish/orders %bContent-Length: 1\r\n\r\n%d" % (HOST, number),
            b"POST /publish/orders %bTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n" % HOST,
            b"GET /topics/orders/messages?partition=0&limit=1&from=%d %b\r\n" % (number, HOST),
        ]  # fmt: skip
    return b"".join([*requests, b"GET /health/live %bConnection: close\r\n\r\n" % HOST])


def answers(server: RunningServer, address: tuple[str, int], data: bytes, halves: bool) -> bytes:
    """All that the server says until it closes, without what differs each time."""
    heard = b""
    with socket.create_connection(address, 20) as plain:
        plain.sendall(data)
        if halves:
            plain.shutdown(socket.SHUT_WR)
        while part := plain.recv(1 << 16):
            heard += part
    heard = re.sub(rb"Date: [^\r]*", b"", heard)
    return re.sub(rb'"(id|timestamp)":"[^"]*"', b"", heard)


def test_a_websocket_that_has_much_to_do_is_not_read() -> None:
    """Also if its handshake waited for an earlier answer: who takes a connection over says whether it is read."""
    transport, loop = FakeTransport(), FakeLoop()
    outbox = Outbox(transport, loop)  # type: ignore[arg-type]

    def take_over(request: str) -> None:
        queue.leave()
        outbox.hold(True)

    queue = RequestQueue(outbox, take_over, Pace(loop, Clock()))
    slot = outbox.reserve()
    queue.add("handshake", depends=True)
    slot.fill(b"answer")
    loop.run_until_idle()
    assert not transport.reading
    outbox.hold(False)
    assert transport.reading


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 50])
@pytest.mark.parametrize("stream", [text, http])
def test_pieces_of_every_size(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[], bytes], size: int, halves: bool
) -> None:
    """Also if the client sends nothing more afterwards. Each time a piece may be the last one of its turn."""
    data, random = stream(), Random(size)
    found = []
    for piece_bytes in (len(data) + 1, size):
        monkeypatch.setattr(connection, "PIECE_BYTES", piece_bytes)
        with running_server(memory=True, events_interval=0) as server:
            if piece_bytes == size:
                server.engine.pace.is_past = lambda deadline: random.random() < 0.5  # type: ignore[method-assign]
            address = server.address if stream is text else server.http_address
            found.append(answers(server, address, data, halves))
    assert found[0] == found[1]
    assert found[0].count(b"PONG" if stream is text else b"200 OK") > 0


# --- in one turn of the loop, and in later ones ----------------------------------------------------
def test_a_socket_whose_data_takes_long_is_not_read_again_at_once() -> None:
    """The loop reads one socket up to 32 times before it turns to the next."""
    with running_server() as server, contextlib.closing(FrameSocket(server.address)) as frames:
        paused: list[bool] = []
        frames.send(binary.encode(Type.PUBLISH, 1, {"topic": "slow"}, b"x"))
        assert frames.read().sequence == 1
        server.call(_make_slow, server, paused)
        frame = binary.encode(Type.PUBLISH, 2, {"topic": "slow"}, bytes(PIECE_BYTES))
        server.call(connection_of(server).data_received, frame)
        assert frames.read().sequence == 2
    assert paused[:2] == [True, False]


def test_much_data_that_came_at_once_is_read_in_pieces() -> None:
    """A read of a socket may bring 40,000 commands: the others come in between, and every one is answered."""
    count = 4 * PIECE_BYTES // len(b"PING\r\n")
    with running_server() as server, contextlib.closing(TextSocket(server.address)) as text:
        assert text.ask("PING") == ["PONG"]
        connection, clock, sizes = connection_of(server), WorkClock(), []

        def receive() -> None:
            assert connection.session is not None
            feed = connection.session.feed

            def slow(data: bytes) -> None:
                sizes.append(len(data))
                clock.now += 1.0
                feed(data)

            connection.session.feed = slow  # type: ignore[method-assign]
            server.engine.pace.seconds = clock.seconds
            connection.data_received(b"PING\r\n" * count)
            assert sizes == [PIECE_BYTES], "one piece in this turn"
            assert not connection.outbox.reading

        server.call(receive)
        assert [text.line() for _ in range(count)] == [["PONG"]] * count
        server.wait_until(lambda: connection.outbox.reading)
    assert sum(sizes) == count * len(b"PING\r\n")
    assert max(sizes) == PIECE_BYTES


def test_data_that_came_at_once_waits_while_the_client_does_not_read() -> None:
    """It is not even parsed: commands take far more memory than their bytes."""
    with running_server() as server, contextlib.closing(TextSocket(server.address)) as text:
        assert text.ask("PING") == ["PONG"]
        connection = connection_of(server)

        def receive() -> None:
            connection.pause_writing()
            connection.data_received(b"PING\r\n" * PIECE_BYTES)
            connection.data_received(b"PUB news 1\r\nx")
            left = 5 * PIECE_BYTES + len(b"PUB news 1\r\nx")
            assert (len(connection._rest), connection.outbox.requests.size) == (left, left)

        server.call(receive)
        server.call(connection.resume_writing)
        assert [text.line() for _ in range(PIECE_BYTES)] == [["PONG"]] * PIECE_BYTES
        assert text.line() == ["OK", "0"]
        server.call(receive)
        server.call(connection.abort)
        server.wait_until(lambda: not server.server.hub.connections)
        assert connection.outbox.requests.size == 0
        assert connection._rest == b""


def test_what_comes_from_all_connections_shares_a_turn() -> None:
    """Many clients that flood do not make a turn of the loop long. A client that sends little is read at once."""
    count = (MUCH_BYTES + 100) // len(b"PING\r\n")
    with running_server() as server, contextlib.ExitStack() as stack:
        texts = [stack.enter_context(contextlib.closing(TextSocket(server.address))) for _ in "123"]
        for text in texts:
            assert text.ask("PING") == ["PONG"]
        clock = WorkClock()

        def receive() -> None:
            fed = []
            server.engine.pace.seconds = clock.seconds
            for connection in server.server.hub.connections:
                assert connection.session is not None

                def slow(
                    data: bytes, feed: Callable[[bytes], None] = connection.session.feed
                ) -> None:
                    clock.now += 1.0
                    fed.append(len(data))
                    feed(data)

                connection.session.feed = slow  # type: ignore[method-assign]
            first, second, third = server.server.hub.connections
            first.data_received(b"PING\r\n" * count)
            second.data_received(b"PING\r\n" * count)
            third.data_received(b"PING\r\n")
            assert fed == [6 * count, 6]

        server.call(receive)
        for text in texts[:2]:
            assert [text.line() for _ in range(count)] == [["PONG"]] * count
        assert texts[2].line() == ["PONG"]


def _make_slow(server: RunningServer, paused: list[bool]) -> None:
    """Let each publish of the only connection take a second, by the clock of the pace."""
    clock, publish = WorkClock(), server.engine.publish

    def slow(*given: object) -> None:
        clock.now += 1.0
        publish(*given)  # type: ignore[arg-type]

    server.engine.pace.seconds = clock.seconds
    server.engine.publish = slow  # type: ignore[assignment]
    (connection,) = server.server.hub.connections
    soon = server.engine.pace.soon

    def noted(work: Callable[[], object], *, late: bool = False) -> None:
        paused.append(not connection.outbox.reading)

        def then() -> None:
            work()
            paused.append(not connection.outbox.reading)

        soon(then)

    server.engine.pace.soon = noted  # type: ignore[method-assign]

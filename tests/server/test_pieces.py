"""What comes at once is read in pieces: wherever these end, and whenever reading stops, the answers are the same."""

import re
import socket
from collections.abc import Callable
from random import Random

import pytest

from headrace.broker.pace import Pace
from headrace.clock import Clock
from headrace.server import connection
from headrace.server.flow import Outbox, RequestQueue
from headrace.testing import RunningServer, running_server
from tests.fakes import FakeLoop
from tests.server.test_flow import FakeTransport

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

"""Single messages that arrive together are stored together, and nobody can tell but by the speed."""

import json
import socket
from collections.abc import Iterator

import pytest

from headrace.testing import RunningServer, running_server


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A server with a directory of its own."""
    with running_server() as server:
        yield server


def post(topic: str, body: bytes, *headers: str, query: str = "") -> bytes:
    lines = [
        f"POST /publish/{topic}{query} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    def __init__(self, server: RunningServer):
        self._socket = socket.create_connection(server.http_address)
        self._socket.settimeout(10)
        self._file = self._socket.makefile("rb")

    def send(self, *requests: bytes) -> None:
        self._socket.sendall(b"".join(requests))

    def answer(self) -> tuple[int, dict[str, object]]:
        status = int(self._file.readline().split()[1])
        length = 0
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.partition(b": ")
            length = int(value) if name.lower() == b"content-length" else length
        return status, json.loads(self._file.read(length))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def test_each_publisher_gets_the_receipt_of_its_own_message(server: RunningServer) -> None:
    """Many connections at once: every message once, each at the offset that its publisher was told."""
    connections = [Connection(server) for _ in range(20)]
    told: dict[int, bytes] = {}
    for turn in range(5):
        bodies = [b'{"turn": %d, "who": %2d}' % (turn, who) for who in range(20)]
        for connection, body in zip(connections, bodies, strict=True):
            connection.send(post("t", body))
        for connection, body in zip(connections, bodies, strict=True):
            status, receipt = connection.answer()
            assert status == 200
            told[int(str(receipt["offset"]))] = body
    for connection in connections:
        connection.close()
    with server.client() as client:
        stored = {m.offset: m.value for m in client.fetch("t", 0, limit=1000)}
        found = {str(client.find(m.id).id) for m in client.fetch("t", 0, limit=1000)}
    assert stored == told
    assert len(stored) == len(found) == 100


def test_what_is_pipelined_is_stored_in_its_order(server: RunningServer) -> None:
    """A message with a key does not overtake those without, which are gathered."""
    connection = Connection(server)
    requests = [
        post("t", b"%d" % number, query="?key=k" if number % 3 == 2 else "") for number in range(30)
    ]
    connection.send(*requests[:1])
    assert connection.answer()[0] == 200  # from now on the head is known
    for request in requests[1:]:
        connection.send(request)
    offsets = [connection.answer()[1]["offset"] for _ in requests[1:]]
    connection.close()
    assert offsets == list(range(1, 30))
    with server.client() as client:
        assert client.fetch_values("t", 0) == [b"%d" % number for number in range(30)]


def test_a_bad_body_among_good_ones_is_refused_alone(server: RunningServer) -> None:
    """The same head, another body: each is looked at."""
    connection = Connection(server)
    statuses = []
    for body in (b'{"a": 1}', b'{"a": 2}', b'{"a"; 3}', b'{"a": 4}'):
        connection.send(post("t", body))
        status, _ = connection.answer()
        statuses.append(status)
    assert statuses == [200, 200, 400, 200]
    connection.close()
    with server.client() as client:
        assert len(client.fetch("t", 0)) == 3


def test_a_queue_limit_counts_each_message_by_itself(server: RunningServer) -> None:
    """Where there is room for three, three of five that come together are stored."""
    with server.client() as client:
        client.create_topic("t", max_queue_size=3)
        client.create_subscription("g", "t")
    connections = [Connection(server) for _ in range(5)]
    for connection in connections:
        connection.send(post("t", b"1"))
    statuses = sorted(connection.answer()[0] for connection in connections)
    for connection in connections:
        connection.close()
    assert statuses == [200, 200, 200, 429, 429]


def test_a_topic_that_is_deleted_is_made_anew(server: RunningServer) -> None:
    """A known head names a topic, not what the topic was when the head was learned."""
    connection = Connection(server)
    with server.client() as client:
        for _ in range(2):
            for offset in range(3):
                connection.send(post("t", b"1"))
                assert connection.answer()[1]["offset"] == offset
            client.delete_topic("t")
    connection.close()

"""The ports of a node that still reads Kafka."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.testing import RunningServer, running_server, wait_until
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Type


@pytest.fixture
def starting() -> Iterator[RunningServer]:
    """A server that says that it reads Kafka; ``finish`` ends that."""
    with running_server(memory=True) as server:
        core = server.server
        core.node = SimpleNamespace(progress=lambda: "reading Kafka, 40 %")  # type: ignore[assignment]
        core._starting = True
        yield server
        finish(server)


def finish(server: RunningServer) -> None:
    server.server._starting, server.server.node = False, None


def get(server: RunningServer, path: str, method: str = "GET", body: Any = None) -> Any:
    connection = HTTPConnection(*server.http_address, timeout=10)
    with closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}"), answer.headers


def spoken(server: RunningServer, data: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=10) as client:
        client.sendall(data)
        found = b""
        while more := client.recv(65536):
            found += more
    return found


def test_health_says_how_far_it_is(starting: RunningServer) -> None:
    """The process lives, and is not ready."""
    assert get(starting, "/health/live")[:2] == (200, {"status": "ok"})
    for path in ("/health", "/health/ready?x=1"):
        status, document, _ = get(starting, path)
        assert (status, document["reasons"]) == (503, ["reading Kafka, 40 %"])


def test_every_protocol_gets_a_retryable_error(starting: RunningServer) -> None:
    """A request over HTTP, a command and a frame are each answered in their own way, and nothing is done."""
    status, document, headers = get(starting, "/publish/orders", "POST", b"x" * 500_000)
    assert (status, document["error"]["code"], headers["Retry-After"]) == (503, "starting", "1")
    assert "reading Kafka, 40 %" in document["error"]["message"]
    assert spoken(starting, b"PUB orders 1\r\n").startswith(b"ERR starting the node is not ready")
    [frame] = BinaryParser().feed(spoken(starting, binary.encode(Type.HEARTBEAT, 7, {})))
    assert (frame.sequence, frame.properties["code"]) == (7, "starting")
    assert frame.properties["retryable"] == "true"
    assert spoken(starting, b"\x00" * 100) == b""  # rubbish
    finish(starting)
    assert get(starting, "/health/ready")[0] == 200
    assert get(starting, "/topics/orders")[0] == 404


def test_a_client_comes_again_until_it_is_ready(starting: RunningServer) -> None:
    """A new one hears why it cannot connect; one that was connected before notices nothing but a pause."""
    with pytest.raises(HeadraceError) as refused, starting.client() as client:
        client.publish("orders", b"one")
    assert (refused.value.code, refused.value.retryable) == ("starting", True)
    core, node = starting.server, starting.server.node
    finish(starting)
    with starting.client() as client:
        client.publish("orders", b"one")
        core._starting, core.node = True, node
        before = core.hub.accepted
        starting.call(lambda: [each.abort() for each in tuple(core.hub.connections)])
        stored = []
        thread = threading.Thread(target=lambda: stored.append(client.publish("orders", b"two")))
        thread.start()
        wait_until(lambda: core.hub.accepted > before + 1)
        assert stored == []
        finish(starting)
        thread.join(30)
        assert stored[0].offset == 1


def test_an_early_connection_never_becomes_one_that_may_do_something(
    starting: RunningServer,
) -> None:
    """Who connected during the start, before users were known, is answered so and closed, also if it speaks later."""
    with socket.create_connection(starting.address, timeout=10) as client:
        hub = starting.server.hub
        wait_until(lambda: len(hub.early) == 1)
        assert not starting.call(lambda: hub.connections)
        finish(starting)
        client.sendall(b"PUB orders 1\r\nx\r\n")
        assert client.recv(1000).startswith(b"ERR starting")
        assert client.recv(1000) == b""
    wait_until(lambda: not hub.early)

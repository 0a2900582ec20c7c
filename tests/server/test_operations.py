"""Answers of operations: long lists in pieces, the same JSON."""

import http.client
import json
import socket
from typing import Any

import pytest

from headrace.server import flow, operations
from headrace.testing import RunningServer, running_server

COUNT = 300


def test_a_long_list_is_never_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No write joins more than a piece, on each protocol, and what arrives is the same as in one piece."""
    monkeypatch.setattr(operations, "PIECE_BYTES", 4096)
    monkeypatch.setattr(flow, "PIECE_BYTES_MIN", 512)
    joined: list[int] = []
    write = flow.Outbox.write

    def counted(self: flow.Outbox, data: bytes) -> None:
        joined.append(len(data))
        write(self, data)

    with running_server(memory=True) as server:
        _subscribe(server)
        monkeypatch.setattr(flow.Outbox, "write", counted)
        names = [f"group-{number:05d}" for number in range(COUNT)]
        for read in (_http, _http_after_another, _binary):
            assert sorted(each["name"] for each in read(server)) == names
    assert joined
    assert max(joined) < 2 * 4096


def _subscribe(server: RunningServer) -> None:
    def subscribe() -> None:
        for number in range(COUNT):
            server.engine.subscribe(f"group-{number:05d}", "orders")

    server.call(subscribe)


def _http(server: RunningServer) -> Any:
    connection = http.client.HTTPConnection(*server.http_address, timeout=30)
    connection.request("HEAD", "/subscriptions")
    answer = connection.getresponse()
    size = answer.headers["Content-Length"]
    answer.read()
    connection.request("GET", "/subscriptions")
    answer = connection.getresponse()
    content = answer.read()
    assert len(content) == int(size or 0) == int(answer.headers["Content-Length"] or 0)
    connection.close()
    return json.loads(content)


def _http_after_another(server: RunningServer) -> Any:
    """Two requests in one packet: the list waits for the answer before it."""
    host, port = server.http_address
    head = f"HTTP/1.1\r\nHost: {host}:{port}\r\n"
    with socket.create_connection((host, port), timeout=30) as peer:
        last = f"GET /subscriptions {head}Connection: close\r\n\r\n"
        peer.sendall(f"GET /topics {head}\r\n{last}".encode())
        content = b"".join(iter(lambda: peer.recv(1 << 20), b""))
    first, _, rest = content.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200")
    return json.loads(rest.partition(b"\r\n\r\n")[2])


def _binary(server: RunningServer) -> Any:
    with server.client() as client:
        return client.subscriptions()

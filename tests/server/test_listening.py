"""Listening: every accepted connection counts, and a system without file descriptors is not tortured."""

import asyncio
import contextlib
import errno
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server import listening
from headrace.server.connection import Connection
from headrace.server.hub import Hub
from headrace.server.listening import Listener
from headrace.testing import RunningServer, running_server
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import RawHttp, raw_request

HEALTH = raw_request("GET", "/health/live")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def secure(certificate: tuple[Path, Path], request: Any) -> Iterator[RunningServer]:
    cert, key = map(str, certificate)
    settings = {"max_connections": 4, "handshake_timeout": 0.5, **getattr(request, "param", {})}
    with running_server(memory=True, tls_cert=cert, tls_key=key, **settings) as server:
        yield server


def context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate[0])


@pytest.mark.parametrize("secure", [{"handshake_timeout": 60}], indirect=True)
def test_unfinished_handshakes_count_as_connections(
    secure: RunningServer, certificate: tuple[Path, Path]
) -> None:
    """Silent ones, and one that stopped in the middle: those above the limit are closed at once."""
    hub = secure.server.hub
    stuck = [socket.create_connection(secure.http_address, 10) for _ in range(4)]
    stuck[0].sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
    secure.wait_until(lambda: len(hub.opening) == 4)
    extra = socket.create_connection(secure.address, 10)
    with extra, contextlib.suppress(ConnectionResetError):
        assert extra.recv(10) == b""
    assert secure.call(lambda: (hub.refused, len(hub.connections))) == (1, 0)
    stuck.pop().close()
    secure.wait_until(lambda: len(hub.opening) == 3)
    with RawHttp(secure.http_address) as raw:
        raw.socket = context(certificate).wrap_socket(raw.socket, server_hostname="localhost")
        raw.send(HEALTH)
        assert raw.answer().status == 200
        assert secure.call(lambda: (len(hub.opening), len(hub.connections))) == (3, 1)
    for each in stuck:
        each.close()


def test_a_handshake_has_a_deadline(secure: RunningServer, certificate: tuple[Path, Path]) -> None:
    """It is closed, and its place is free again."""
    hub = secure.server.hub
    stuck = [socket.create_connection(secure.http_address, 20) for _ in range(4)]
    for each in stuck:
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(10) == b""
        each.close()
    secure.wait_until(lambda: not hub.opening)
    assert secure.call(lambda: hub.failed_handshakes) == 4
    with RawHttp(secure.http_address) as raw:
        raw.socket = context(certificate).wrap_socket(raw.socket, server_hostname="localhost")
        raw.send(HEALTH)
        assert raw.answer().status == 200


def test_what_is_no_tls_is_closed_and_forgotten(secure: RunningServer) -> None:
    """Plain text on a TLS port, and a peer that goes away in the middle."""
    hub = secure.server.hub
    for data in (b"PING\r\n", b"\x16\x03\x01\x02\x00\x01", b""):
        with socket.create_connection(secure.address, 10) as plain:
            plain.sendall(data)
    secure.wait_until(lambda: not hub.opening and not hub.connections)
    secure.wait_until(lambda: hub.failed_handshakes == 3)


def test_a_stop_while_a_connection_is_made_forgets_nobody(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the client has left, the connection is gone: the stop waits for that."""
    made = Connection.connection_made

    def made_and_stopped(self: Connection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        for listener in server.server._listeners:
            listener.close()

    monkeypatch.setattr(Connection, "connection_made", made_and_stopped)
    with socket.create_connection(server.address) as client:
        server.wait_until(lambda: server.server.hub.numbered == 1)
        client.sendall(b"HELP\r\n")
        assert client.recv(100)
    server.wait_until(lambda: not server.server.hub.connections)


@pytest.mark.parametrize("secure", [{"handshake_timeout": 60}], indirect=True)
def test_a_stop_does_not_wait_for_handshakes(secure: RunningServer) -> None:
    """They end with the server."""
    hub = secure.server.hub
    with socket.create_connection(secure.address, 10) as stuck:
        secure.wait_until(lambda: len(hub.opening) == 1)
        secure.stop()
        with contextlib.suppress(ConnectionResetError):
            assert stuck.recv(10) == b""
    assert not hub.opening


# --- file descriptors -----------------------------------------------------------------------------
class NoFiles:
    """A listening socket of a process that has no file descriptors left."""

    def __init__(self, code: int):
        self.code = code
        self.asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        raise OSError(self.code, "out of something")


class Readers:
    """The part of a loop that a listener uses."""

    def __init__(self) -> None:
        self.readers: list[object] = []
        self.later: list[Any] = []

    def add_reader(self, reader: object, *_: object) -> None:
        self.readers.append(reader)

    def remove_reader(self, reader: object) -> None:
        self.readers.remove(reader)

    def call_later(self, delay: float, *call: Any) -> None:
        assert delay >= listening.REST_S
        self.later.append(call)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_listener_without_descriptors_rests(
    server: RunningServer, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries once, rests, and tries once again: it neither spins nor fills the log."""

    async def make() -> Listener:
        return Listener(Hub.__new__(Hub), lambda: None, None, 1.0)  # type: ignore[arg-type, return-value]

    listener = asyncio.run(make())
    loop, bare = Readers(), NoFiles(code)
    listener._loop = loop  # type: ignore[assignment]
    listener.sockets.append(bare)  # type: ignore[arg-type]
    listener._start(bare)  # type: ignore[arg-type]
    for tries in range(1, 4):
        assert loop.readers == [bare]
        listener.accept(bare)  # type: ignore[arg-type]
        assert (bare.asked, loop.readers) == (tries, [])
        call, argument = loop.later.pop()
        call(argument)
    assert caplog.text.count("no connection can be accepted") == 1


def test_the_files_of_the_log_are_kept_from_connections(tmp_path: Path) -> None:
    """Partitions and connections share what the process may open; each is refused before the log lacks one."""
    with running_server(data_dir=tmp_path / "data") as server, server.client() as client:
        hub, topics = server.server.hub, server.engine.topics
        client.create_topic("orders", partitions=4)

        def share() -> None:
            hub.open_files = hub.files_kept + topics.partition_count + len(hub.connections) + 2
            topics.file_room = hub.file_room

        server.call(share)
        first = TextSocket(server.address)
        assert first.ask("PING") == ["PONG"]
        with pytest.raises(Exception, match="Too many open files"):
            client.create_topic("invoices", partitions=2)
        client.create_topic("invoices", partitions=1)
        refused = TextSocket(server.address)
        with pytest.raises(Exception, match=r"closed|reset"):
            refused.ask("PING")
        client.delete_topic("invoices")
        again = TextSocket(server.address)
        assert again.ask("PING") == ["PONG"]
        for text in (first, refused, again):
            text.close()

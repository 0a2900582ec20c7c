"""The proxy does to connections what it is told, and nothing else."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.fakes.tcp_proxy import TcpProxy


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """Before a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(4096):
                    connection.sendall(piece)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with TcpProxy(listener.getsockname()[1]) as found:
        yield found
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def ask(proxy: TcpProxy, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as connection:
        connection.sendall(text)
        return connection.recv(4096)


def test_it_passes_on_what_it_gets(proxy: TcpProxy) -> None:
    assert ask(proxy, b"hello") == b"hello"


def test_slow(proxy: TcpProxy) -> None:
    """An answer comes later, not never."""
    with proxy.slow(0.2):
        began = time.monotonic()
        assert ask(proxy, b"hello") == b"hello"
        assert time.monotonic() - began >= 0.2


def test_refusing(proxy: TcpProxy) -> None:
    """The whole request is read, and answered with S3's SlowDown."""
    with proxy.refusing():
        answer = ask(proxy, b"PUT /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"<Code>SlowDown</Code>" in answer
    assert proxy.refused == 1
    assert ask(proxy, b"hello") == b"hello"


def test_cutting(proxy: TcpProxy) -> None:
    """The connection is reset in the middle of what is sent."""
    with proxy.cutting(after=10), suppress(ConnectionResetError):
        assert ask(proxy, b"hello") == b"hello"
        assert ask(proxy, b"hello again") == b"", "no answer, if the reset is not seen"
    assert proxy.cuts == 1


def test_away_and_back(proxy: TcpProxy) -> None:
    """Connections end, new ones are refused, and later they are not."""
    proxy.go_away()
    with pytest.raises(ConnectionRefusedError):
        ask(proxy, b"hello")
    proxy.come_back()
    assert ask(proxy, b"hello") == b"hello"

"""A TCP proxy on loopback that is slow, away, refuses, or cuts connections, as it is told.

It stands before a server that speaks HTTP/1.1. Only ``refuse`` knows that: it answers requests with 503 and the
body of S3's SlowDown. All other faults are those of a network.

:class:`ProxyProcess` is the same in a process of its own, for clients that keep Python's other threads from running while
they wait, as some calls of deltalake do. It is told what to do in lines on stdin.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_BODY = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
)
_SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class TcpProxy:
    """``with TcpProxy(port) as proxy:`` clients connect to ``proxy.port``."""

    def __init__(self, upstream: int):
        self._upstream = ("127.0.0.1", upstream)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._delay_s = 0.0
        self._refuses = False
        self._cut_after: int | None = None
        self._sent = 0
        self._wake = threading.Event()
        self.refused = self.cuts = 0
        self._timer: threading.Timer | None = None
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()

    # --- faults -----------------------------------------------------------------------------
    def slow(self, delay_s: float) -> AbstractContextManager[None]:
        """Every piece of an answer comes so much later."""
        self._wake.clear()
        self._delay_s = delay_s
        return self._healed()

    def refusing(self) -> AbstractContextManager[None]:
        """Requests are answered with 503 SlowDown."""
        self._refuses = True
        self._drop()
        return self._healed()

    def cutting(self, after: int) -> AbstractContextManager[None]:
        """A connection is reset as soon as so many bytes were sent on all; then another one, and so on."""
        self._sent, self._cut_after = 0, after
        return self._healed()

    def heal(self) -> None:
        """End all of these; also from another thread."""
        if self._timer is not None:
            self._timer.cancel()
        self._refuses, self._cut_after, self._delay_s = False, None, 0.0
        self._wake.set()

    def heal_in(self, seconds: float) -> None:
        """After a while, heal, and come back."""

        def recover() -> None:
            self.heal()
            if self._listener is None:
                self.come_back()

        self._timer = threading.Timer(seconds, recover)
        self._timer.daemon = True
        self._timer.start()

    @contextmanager
    def _healed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.heal()

    def go_away(self) -> None:
        """Nobody listens any more, and all connections end."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread that accepts
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._wake.set()
        self._drop()

    def come_back(self) -> None:
        self._listen()

    def _drop(self) -> None:
        with self._lock:
            found, self._sockets = self._sockets, set()
        for each in found:
            _reset(each)

    # --- connections ------------------------------------------------------------------------
    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._refuses:
            self._refuse(client)
            return
        try:
            server = socket.create_connection(self._upstream, 5)
            server.settimeout(None)
        except OSError:
            _reset(client)
            return
        with self._lock:
            self._sockets |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if is_request and self._cut_after is not None:
                    self._sent += len(piece)
                    if self._sent >= self._cut_after:
                        self._sent = 0
                        self.cuts += 1
                        _reset(source)
                        _reset(target)
                        return
                if not is_request and self._delay_s:
                    self._wake.wait(self._delay_s)
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _refuse(self, client: socket.socket) -> None:
        """Read one request with its body, so that the client reads the answer, and answer it."""
        with contextlib.suppress(OSError, ValueError), client:
            client.settimeout(10)
            data = b""
            while b"\r\n\r\n" not in data:
                piece = client.recv(65536)
                if not piece:
                    return
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            fields = dict(
                line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line
            )
            left = int(fields.get(b"content-length", b"0")) - len(body)
            while left > 0 and b"expect" not in fields:
                left -= len(client.recv(65536)) or left
            self.refused += 1
            client.sendall(_SLOW_DOWN)


class ProxyProcess:
    """``with ProxyProcess(port) as proxy:`` has the methods of :class:`TcpProxy`."""

    def __init__(self, upstream: int):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(upstream)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port, self.refused, self.cuts = 0, 0, 0
        self._tell("heal")

    def _tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
            self.port, self.refused, self.cuts = map(int, self._process.stdout.readline().split())

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input ends it

    def slow(self, delay_s: float) -> AbstractContextManager[None]:
        return self._healed("slow", delay_s)

    def refusing(self) -> AbstractContextManager[None]:
        return self._healed("refusing")

    def cutting(self, after: int) -> AbstractContextManager[None]:
        return self._healed("cutting", after)

    @contextmanager
    def _healed(self, *words: object) -> Iterator[None]:
        self._tell(*words)
        try:
            yield
        finally:
            self.heal()

    def heal(self) -> None:
        self._tell("heal")

    def go_away(self) -> None:
        self._tell("go_away")

    def come_back(self) -> None:
        self._tell("come_back")

    def heal_in(self, seconds: float) -> None:
        """By its own clock: the thread that asks may not be able to ask again."""
        self._tell("heal_in", seconds)


def _reset(connection: socket.socket) -> None:
    """Not an orderly end: the other side gets ECONNRESET. Its thread closes the socket."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    with TcpProxy(int(sys.argv[1])) as proxy:
        for line in sys.stdin:
            name, *given = line.split()
            getattr(proxy, name)(*(float(each) for each in given))
            print(proxy.port, proxy.refused, proxy.cuts, flush=True)


if __name__ == "__main__":
    main()

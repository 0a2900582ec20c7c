"""The listening sockets: which connections come in, and how many.

A connection counts from the moment it is accepted. asyncio's own servers show a TLS connection only after
its handshake, so peers that never finish one would be counted nowhere and take all file descriptors, also
those that the log needs for its next segment. So this module accepts sockets itself, refuses those above
``max_connections`` at once, and gives every handshake a deadline.

::

    accept ──▶ full? close ──▶ Hub.opening ── handshake ──▶ Connection.connection_made ──▶ Hub.connections
                                    └── failed, or too slow: closed

If the system is out of descriptors or memory, ``accept`` fails, and the socket stays readable: a loop that
tried again at once would spin. So the listener rests for a while; the peers wait in the backlog.

Rejected: ``loop.create_server`` with a counting protocol factory. Nobody tells the factory that a handshake
has failed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from headrace.broker.audit import Source
from headrace.server.connection import Connection
from headrace.server.hub import Hub
from headrace.server.refusals import tls_failure
from headrace.server.starting import StartingConnection

logger = logging.getLogger("headrace.server")
BACKLOG = 1024
ACCEPTS_PER_TURN = 64
"""So that a flood of connections leaves time for those that exist."""
REST_S = 1.0
SHUTDOWN_S = 5.0
"""How long a TLS peer may take to answer our goodbye."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """One port. ``make`` makes the protocol of a new connection."""

    def __init__(
        self,
        hub: Hub,
        make: Callable[[], Connection | StartingConnection],
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ):
        self._hub = hub
        self._make = make
        self.tls = tls
        """Of connections that come from now on."""
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], bool] = {}
        """Connections that are being made -> whether they have a handshake."""
        self._is_exhausted = False
        self.sockets: list[socket.socket] = []

    async def listen(self, host: str, port: int) -> None:
        """Bind every address of the host; :class:`OSError` if that fails."""
        infos = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        missing: OSError | None = None
        try:
            for family, _, _, _, address in dict.fromkeys(infos):
                try:
                    self.sockets.append(_bound(family, address))
                except OSError as error:
                    if error.errno not in _NO_SUCH_ADDRESS:
                        raise
                    missing = error  # "localhost" has an IPv6 address, this machine may have none
            if missing is not None and not self.sockets:
                raise missing
        except OSError:
            self.close()
            raise
        for listening in self.sockets:
            self._start(listening)

    def _start(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening, self.accept, listening)

    def accept(self, listening: socket.socket) -> None:
        """Let those in that wait, up to a number."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # it has gone already
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise  # the loop logs it
                self._rest(listening, error)
                return
            self._is_exhausted = False
            if self._hub.admits():
                self._open(accepted, address)
            else:
                accepted.close()

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        if not self._is_exhausted:
            self._is_exhausted = True
            logger.error("no connection can be accepted for now: %s; see ulimit -n", error)
        self._loop.remove_reader(listening)
        self._loop.call_later(REST_S, self._start, listening)

    def _open(self, accepted: socket.socket, address: Any) -> None:
        accepted.setblocking(False)
        connection = self._make()
        opening = self._hub.opening
        opening.add(connection)

        def opened(task: asyncio.Task[None]) -> None:
            self._opening.pop(task)
            opening.discard(connection)
            if task.cancelled():  # perhaps before it began
                accepted.close()

        task = self._loop.create_task(self._connect(accepted, address, connection))
        self._opening[task] = self.tls is not None
        task.add_done_callback(opened)

    async def _connect(
        self, accepted: socket.socket, address: Any, connection: Connection | StartingConnection
    ) -> None:
        try:
            if self.tls is None:
                await self._loop.connect_accepted_socket(lambda: connection, accepted)
            else:
                await self._loop.connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=self.tls,
                    ssl_handshake_timeout=self._handshake_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except (
            OSError
        ) as error:  # also ssl.SSLError, and ConnectionAbortedError after handshake_timeout
            self._hub.failed_handshakes += 1
            logger.debug("a connection was not opened: %s", error)
            why = None if self.tls is None else tls_failure(error, self._handshake_s)
            if why is not None:
                peer, host = f"{address[0]}:{address[1]}", str(address[0])
                self._hub.refusals.note("tls", Source(peer, host), why)
            accepted.close()

    def close(self) -> None:
        """Accept no more. Handshakes that are under way end.

        A plain connection needs one more turn of the loop, and gets it: uvloop would close its socket without a word
        to the connection, and whoever waits until all are gone would wait for it.
        """
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self.sockets = []
        for task, has_handshake in tuple(self._opening.items()):
            if has_handshake:
                task.cancel()


def _bound(family: int, address: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening

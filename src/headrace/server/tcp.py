"""One TCP port for text and binary: the first byte tells.

A text command begins with a letter; a frame begins with its length, whose first byte never reaches one.
:class:`Connection` owns the socket and its flow control; a :class:`Session` (text or binary) owns what
is said. A dead peer is found by TCP keep-alive within half a minute; one that sends heartbeats is also
dropped when it stops.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

from headrace.broker.engine import Engine
from headrace.errors import HeadraceError
from headrace.server.flow import Outbox
from headrace.server.gathering import Gathering
from headrace.server.operations import ServedOperations

logger = logging.getLogger("headrace.server")
KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)


HALF_CLOSED_S = 10.0
"""How long a client that sends nothing more may wait for its last answers."""
UNAUTHENTICATED_S = 10.0
"""How long somebody may be connected without saying who he is, where that is asked."""
UNAUTHENTICATED_BYTES_MAX = 64 << 10
"""Of an incomplete command that is kept for somebody who has not said who he is."""


class Session(Protocol):
    """One protocol on one connection."""

    protocol: str

    def feed(self, data: bytes) -> None: ...

    def lost(self) -> None:
        """The connection is gone: give back what it held."""


class Guest(Protocol):
    """A connection, of whatever kind, as the hub knows it."""

    peer: str
    session: Session | None

    @property
    def protocol(self) -> str: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Hub:
    """What all connections of a server share."""

    def __init__(self, engine: Engine, operations: ServedOperations, token: str | None = None):
        self.engine = engine
        self.operations = operations
        self.gathering = Gathering(engine)
        self._token = None if token is None else token.encode()
        self.connections: set[Guest] = set()
        self.max_connections = 15_000
        self.heartbeat_s = 30.0
        self.accepted = 0
        self.refused = 0
        self.draining = False
        self._empty: asyncio.Event | None = None
        self.metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain")

    def left(self, connection: Guest) -> None:
        self.connections.discard(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    async def wait_until_empty(self) -> None:
        if self.connections:
            self._empty = asyncio.Event()
            await self._empty.wait()

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def is_token(self, text: str) -> bool:
        return self._token is None or hmac.compare_digest(self._token, text.encode())


SessionMaker = Callable[["Connection"], Session]


class Connection(asyncio.Protocol):
    def __init__(self, hub: Hub, text: SessionMaker, binary: SessionMaker):
        self.hub = hub
        self._text, self._binary = text, binary
        self.session: Session | None = None
        self.outbox: Outbox = None  # type: ignore[assignment]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self.authenticated = not hub.needs_token
        self.peer = "?"
        self.closing = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def protocol(self) -> str:
        return "tcp" if self.session is None else self.session.protocol

    # --- the socket -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outbox = Outbox(self._transport, asyncio.get_running_loop())
        hub = self.hub
        if hub.draining or len(hub.connections) >= hub.max_connections:
            hub.refused += 1
            self._transport.abort()
            return
        hub.accepted += 1
        hub.connections.add(self)
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "?"
        keep_alive(transport.get_extra_info("socket"))
        if not self.authenticated:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(UNAUTHENTICATED_S, self._give_up)

    def _give_up(self) -> None:
        if not self.authenticated:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if self.session is None:
            first = data[0]
            is_text = 0x41 <= first <= 0x5A or 0x61 <= first <= 0x7A or first in b"\r\n \t"
            self.session = (self._text if is_text else self._binary)(self)
        try:
            self.session.feed(data)
        except Exception:
            # Our own mistake: this connection cannot go on, the others can.
            logger.exception("connection %s failed", self.peer)
            self._transport.abort()

    def eof_received(self) -> bool:
        """A client that has said everything, as netcat does, may still want its answers."""
        if self.outbox.busy and self._transport.get_extra_info("sslcontext") is None:
            self.outbox.on_idle = self._transport.close
            # It may also be gone: nobody can tell before something is written.
            asyncio.get_running_loop().call_later(HALF_CLOSED_S, self._transport.close)
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.hub.left(self)
        self.outbox.close()
        if self._patience is not None:
            self._patience.cancel()
        if self.session is not None:
            self.session.lost()

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    # --- ending -----------------------------------------------------------------------------
    def close(self) -> None:
        """No more commands; what is unanswered is answered, then the connection closes."""
        self.closing = True
        if self.outbox.unanswered:
            self.outbox.on_idle = self._transport.close
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def own_mistake(peer: str) -> HeadraceError:
    """For whoever waits for an answer, when what failed is ours. Called in an ``except``."""
    logger.exception("a command of %s failed", peer)
    return HeadraceError("the broker made a mistake; its log says more", code="bug")


def keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError as error:  # a Unix socket, or gone already
        logger.debug("keep-alive could not be set: %s", error)

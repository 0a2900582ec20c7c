"""One connection: everything that text, binary, HTTP and WebSocket have in common.

A :class:`Connection` owns the socket: it admits or refuses the client, drops a peer that is dead or does
not authenticate, keeps answers in the order of the requests and bounds what they cost (``flow``), passes
publishes and operations on to the broker, answers for our own bugs, and ends in good order. A
:class:`Session` is one protocol: it turns bytes into requests and answers into bytes.

::

    socket ──▶ Connection ──▶ Session.feed ──▶ RequestQueue ──▶ the session's handler
                                                                   │ connection.publish(publish)
                                                                   │ connection.call(operation)
    socket ◀── Outbox ◀────── Session encodes the answer ◀─────────┘

A connection ends in one of three ways. *In good order* (``close``): unanswered requests are answered
first. *With a linger*: after our last word, what the client still sends is read and thrown away for a
while, because a reset would overtake that word. *At once* (``abort``).

TCP keep-alive finds a dead peer within half a minute. A peer that sends heartbeats is also dropped when
they stop (``binary``).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish, PublishDone
from headrace.errors import HeadraceError, Unauthenticated
from headrace.operations.declaring import Operation
from headrace.server.flow import Outbox, RequestQueue
from headrace.server.operations import ServedOperations
from headrace.server.origins import Origins
from headrace.wire.http import KnownHeads

if TYPE_CHECKING:
    from headrace.server.routing import RouteTable

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
"""How long a client may stay on the TCP port without authenticating, where a token is needed."""
UNAUTHENTICATED_BYTES_MAX = 64 << 10
"""Of an incomplete command that is kept for a client that has not authenticated."""
LINGER_S = 2.0

Answered = TypeVar("Answered")
Item = TypeVar("Item")


@dataclass(eq=False, repr=False)
class Hub:
    """What all connections of a server share."""

    engine: Engine
    operations: ServedOperations
    token: str | None
    routes: RouteTable
    origins: Origins
    known_heads: KnownHeads = field(default_factory=KnownHeads)
    connections: set[Connection] = field(default_factory=set)
    max_connections: int = 15_000
    heartbeat_s: float = 30.0
    accepted: int = 0
    refused: int = 0
    draining: bool = False
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain")
    _empty: asyncio.Event | None = None

    def admits(self) -> bool:
        """Whether another connection may come; it is counted either way."""
        admitted = not self.draining and len(self.connections) < self.max_connections
        self.accepted += admitted
        self.refused += not admitted
        return admitted

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    async def wait_until_empty(self) -> None:
        if self.connections:
            self._empty = asyncio.Event()
            await self._empty.wait()

    def is_token(self, text: str) -> bool:
        return self.token is None or hmac.compare_digest(self.token.encode(), text.encode())


class Session:
    """One protocol on one connection."""

    protocol = ""
    hears_goodbye = False
    """Whether it still reads after our side has closed."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.hub = connection.hub
        self.engine = connection.hub.engine
        self.publishing = self.engine.publishing
        self.outbox = connection.outbox

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def lost(self) -> None:
        """The connection is gone: give back everything it held."""

    def say_goodbye(self) -> bool:
        """The server closes. True if the protocol has a last word, and the client answers it."""
        return False


class Parser(Protocol[Item]):
    """Bytes to requests, without I/O (``headrace/wire``)."""

    error: HeadraceError | None
    """Set when the stream makes no sense any more."""

    @property
    def buffered(self) -> int:
        """Bytes of a request that is not complete."""

    def feed(self, data: bytes) -> list[Item]: ...


class RequestSession(Session, Generic[Item]):
    """A session whose parser gives requests. They begin in order, and each is answered."""

    login = ""
    """What a client must send first where a token is needed; empty: each request authenticates."""

    def __init__(self, connection: Connection, parser: Parser[Item]):
        super().__init__(connection)
        self._parser = parser
        self._requests: RequestQueue[Item | HeadraceError] = RequestQueue(self.outbox, self._handle)

    def feed(self, data: bytes) -> None:
        add, depends = self._requests.add, self.depends
        for item in self._parser.feed(data):
            add(item, depends(item))
        if self._parser.error is not None:
            add(self._parser.error, True)
        elif (
            not self.connection.authenticated
            and self.login
            and self._parser.buffered > UNAUTHENTICATED_BYTES_MAX
        ):
            add(Unauthenticated(self.login), True)

    def _handle(self, item: Item | HeadraceError) -> None:
        connection = self.connection
        if connection.closing or connection.session is not self:
            return
        if isinstance(item, HeadraceError):
            self.end(item)
            return
        if not connection.authenticated and self.login and not self.is_open(item):
            self.fail(item, Unauthenticated(self.login))
            connection.close()
            return
        try:
            self.begin(item)
        except HeadraceError as error:
            self.fail(item, error)
        except Exception:
            self.fail(item, connection.bug())

    def depends(self, item: Item) -> bool:
        """Whether everything before the request must be answered first."""
        raise NotImplementedError

    def is_open(self, item: Item) -> bool:
        """Whether the request is allowed before the login."""
        return False

    def begin(self, item: Item) -> None:
        """Answer the request, now or later, or raise why not."""
        raise NotImplementedError

    def fail(self, item: Item, error: HeadraceError) -> None:
        """Answer the request with an error."""
        raise NotImplementedError

    def end(self, error: HeadraceError) -> None:
        """Say why the stream cannot be read any further, and close the connection."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """``open_session`` is called with the first bytes; ``port`` names what has not spoken yet."""

    def __init__(self, hub: Hub, port: str, open_session: Callable[[Connection, bytes], Session]):
        self.hub = hub
        self._port = port
        self._open_session = open_session
        self.session: Session | None = None
        self.outbox: Outbox = None  # type: ignore[assignment]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self.authenticated = hub.token is None
        self.peer = "?"
        self.closing = False
        self.leaving = False
        """The client sends nothing more, or the broker stops: no time for long polls."""
        self.unread = False
        """The client may be sending something that nobody will read."""
        self.long_polls: dict[Callable[[], None], None] = {}
        """Calling one ends its waiting. (An empty dict is smaller than an empty set.)"""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._patience: asyncio.TimerHandle | None = None

    @property
    def protocol(self) -> str:
        return self._port if self.session is None else self.session.protocol

    # --- the socket -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self.outbox = Outbox(self._transport, loop)
        if not self.hub.admits():
            self._transport.abort()
            return
        self.hub.connections.add(self)
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "?"
        _keep_alive(transport.get_extra_info("socket"))
        if self._port == "tcp" and not self.authenticated:  # HTTP authenticates each request
            self._patience = loop.call_later(UNAUTHENTICATED_S, self._give_up)

    def _give_up(self) -> None:
        if not self.authenticated:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        session = self.session
        try:
            if self.closing and not (session and session.hears_goodbye):
                return
            if session is None:
                session = self.session = self._open_session(self, data)
            session.feed(data)
        except Exception:
            # A bug of ours: this connection cannot go on, the others can.
            logger.exception("connection %s failed", self.peer)
            self._transport.abort()

    def eof_received(self) -> bool:
        """A client that sends nothing more, such as netcat, may still wait for its answers."""
        self._stop_long_polls()
        if self.outbox.busy and self._transport.get_extra_info("sslcontext") is None:
            self.outbox.on_idle = self._transport.close
            # The client may also be gone: that shows only when something is written.
            asyncio.get_running_loop().call_later(HALF_CLOSED_S, self._transport.close)
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.hub.left(self)
        self.outbox.close()
        if self._patience is not None:
            self._patience.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self.session is not None:
            self.session.lost()

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    # --- requests ---------------------------------------------------------------------------
    def authenticate(self, token: str) -> bool:
        if not self.hub.is_token(token):
            return False
        self.authenticated = True
        return True

    def publish(self, publish: Publish, done: PublishDone) -> None:
        """Every publish of every protocol. ``done`` is called once, whatever happens."""
        try:
            self.hub.engine.publish(publish, done)
        except HeadraceError as error:
            done([], error)
        except Exception:
            done([], self.bug())

    async def call(self, operation: object, arguments: object) -> Any:
        """An operation by its name; returns its answer as JSON has it."""
        return await self.hub.operations.call(operation, arguments)

    async def run(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """An operation whose arguments may be text; returns its result."""
        return await self.hub.operations.run(operation, arguments, strict=False)

    def answer_later(
        self,
        work: Awaitable[Answered],
        fill: Callable[[Answered], object],
        failed: Callable[[HeadraceError], Answered],
    ) -> asyncio.Task[None]:
        """Give ``fill`` the result of the work, or what ``failed`` makes of its error."""

        async def run() -> None:
            try:
                answer = await work
            except HeadraceError as error:
                answer = failed(error)
            except Exception:
                answer = failed(self.bug())
            fill(answer)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def bug(self) -> HeadraceError:
        """Log the exception that is being handled. The client gets this error instead."""
        logger.exception("a command of %s failed", self.peer)
        return HeadraceError("the broker has a bug here; its log says more", code="bug")

    # --- ending -----------------------------------------------------------------------------
    def close(self) -> None:
        """Read no more requests, answer the unanswered ones, then close."""
        self.closing = True
        self._stop_long_polls()
        if self.outbox.unanswered:
            self.outbox.on_idle = self._leave
        else:
            self._leave()

    def _leave(self) -> None:
        if self.unread or (self.session is not None and self.session.say_goodbye()):
            self.linger()
        else:
            self._transport.close()

    def _stop_long_polls(self) -> None:
        self.leaving = True
        for stop in tuple(self.long_polls):
            stop()

    def hang_up(self) -> None:
        """Close: both sides have said everything."""
        self.closing = True
        self._transport.close()

    def linger(self) -> None:
        """Send nothing more, and give the client a little time to read the last word."""
        self.closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def abort(self) -> None:
        self._transport.abort()


def _keep_alive(sock: socket.socket | None) -> None:
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

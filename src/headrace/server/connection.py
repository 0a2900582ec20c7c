"""One connection: everything that text, binary, HTTP and WebSocket have in common.

A :class:`Connection` owns the socket: it admits or refuses the client, drops a peer that is dead or does
not authenticate, keeps answers in the order of the requests and bounds what they cost (``flow``), passes
publishes and operations on to the broker, answers for our own bugs, and ends in good order. A
``Session`` (``session.py``) is one protocol: it turns bytes into requests and answers into bytes.

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
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from headrace import limits
from headrace.access.caller import Caller
from headrace.access.quotas import Meter
from headrace.broker.audit import Source
from headrace.broker.permissions import Permissions
from headrace.broker.publishers import Publisher
from headrace.broker.publishing import Publish, PublishDone
from headrace.errors import HeadraceError, InvalidArgument, unreadable
from headrace.operations.declaring import Operation
from headrace.operations.results import ClientInfo
from headrace.server.flow import Outbox
from headrace.server.hub import Hub
from headrace.server.keep_alive import keep_alive
from headrace.server.logins import Credentials, certificate_names
from headrace.server.session import Session

logger = logging.getLogger("headrace.server")
HALF_CLOSED_S = 10.0
"""How long a client that sends nothing more may wait for its last answers."""
UNAUTHENTICATED_S = 10.0
"""How long a client may stay on the TCP port without authenticating, where a token is needed."""
PIECE_BYTES = 16 << 10
"""Data is read in pieces of this size. The cheapest commands have six bytes, so this may be 2,700 of them."""
MUCH_BYTES = 4 << 10
"""More that comes at once waits for a later turn of the loop, if this one has read enough from others."""
LINGER_S = 2.0
TLS_HELLO = b"\x16\x03"
"""How a TLS client begins. No protocol of ours does."""
NO_TLS = (
    "it speaks TLS, and this broker does not: set tls_cert and tls_key, or connect without TLS "
    "(tcp://, http://)"
)


Answered = TypeVar("Answered")


def readable_id(text: str) -> str | None:
    """A ``client_id`` as it is kept: short, and on one line."""
    text = "".join(
        c if c.isprintable() else " " for c in text[: limits.CLIENT_ID_CHARS_MAX]
    ).strip()
    return text or None


class Connection(asyncio.Protocol):
    """``open_session`` is called with the first bytes; ``port`` names what has not spoken yet."""

    def __init__(self, hub: Hub, port: str, open_session: Callable[[Connection, bytes], Session]):
        self.hub = hub
        self._port = port
        self._open_session = open_session
        self.session: Session | None = None
        self.outbox: Outbox = None  # type: ignore[assignment]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        access = hub.engine.access
        self.caller = access.nobody if access.is_on else access.anyone
        """Who the client is: of this connection, or of its present HTTP request."""
        self.authenticated = not access.is_on
        self.is_stranger = True
        """It has sent no valid command yet. A web page can make a browser talk to us, but not in our language."""
        self.logging_in = False
        self.is_node = False
        """It is another node of the cluster."""
        self._certified: Caller | None = None
        self._meters: tuple[Meter, ...] = ()
        """Of its address and its principal, where they have quotas."""
        self.is_metered = False
        """Whether there are any."""
        self._resume: asyncio.TimerHandle | None = None
        self._rest = b""
        """What has come and is read later, in front of what is still in the socket."""
        self.number = 0
        self._connected_ms = 0
        self.client_id: str | None = None
        """What the client says about itself."""
        self.publisher: Publisher | None = None
        """As which it publishes; None until it does, and after its name or its login has changed."""
        self.peer = "?"
        self.address = ""
        self.closing = False
        self.leaving = False
        """The client sends nothing more, or the broker stops: no time for long polls."""
        self.unread = False
        """The client may be sending something that nobody will read."""
        self.long_polls: dict[Callable[[], None], None] = {}
        """Calling one ends its waiting. (An empty dict is smaller than an empty set.)"""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.since = 0.0
        """The loop's time from which its present deadline counts."""
        self._patience: asyncio.TimerHandle | None = None

    @property
    def source(self) -> Source:
        return Source(self.peer, self.address, self.number, self.client_id)

    def fields(self, topic: str | None = None) -> dict[str, Any]:
        """What a line of the log says about it."""
        return {**self.source.fields(self.caller.name), "topic": topic}

    @property
    def protocol(self) -> str:
        return self._port if self.session is None else self.session.protocol

    def named(self, client_id: str) -> None:
        """The client says who it is: for people, never for rights."""
        self.client_id, self.publisher = readable_id(client_id), None

    def describe(self) -> ClientInfo:
        held = [] if self.session is None else list(self.session.held())
        return {
            "connection": self.number,
            "client_id": self.client_id,
            "name": self.caller.name,
            "address": self.peer,
            "protocol": self.protocol,
            "connected": self._connected_ms,
            "subscriptions": held[: limits.HELD_SHOWN_MAX],
            "subscriptions_total": len(held),
            "in_flight": sum(each["in_flight"] for each in held),
            "unanswered": self.outbox.unanswered,
            "unsent_bytes": self.outbox.unsent_bytes,
        }

    # --- the socket -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self.outbox = Outbox(self._transport, loop, self.hub.engine.budget)
        self.outbox.on_reading = self._read_rest
        hub = self.hub
        hub.opening.discard(self)
        if hub.draining:
            self._transport.abort()
            return
        hub.connections[self] = None
        hub.numbered += 1
        self.number, self._connected_ms = hub.numbered, hub.engine.now_ms()
        hub.watched.add(self)
        self.since = loop.time()
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "?"
        self.address = str(address[0]) if address else ""
        try:
            self._count(None)
            caller = self.hub.engine.access.by_certificate(
                certificate_names(transport.get_extra_info("peercert"))
            )
            if caller is not None:
                self.enter(caller)
                self._certified = caller
        except HeadraceError as error:  # a quota
            logger.info("connection %s is refused: %s", self.peer, error, extra=self.fields())
            self._transport.abort()
            return
        keep_alive(transport.get_extra_info("socket"))
        if self._port == "tcp" and not self.authenticated:  # HTTP authenticates each request
            self._patience = loop.call_later(UNAUTHENTICATED_S, self._give_up)

    def _give_up(self) -> None:
        if not self.authenticated:
            self._transport.abort()

    def meet(self) -> None:
        """It has sent a valid command."""
        self.is_stranger = False
        self.hub.watched.discard(self)

    def check_deadline(self, now: float) -> None:
        """See ``deadlines``."""
        if self.closing:
            return
        if self.session is not None:
            self.session.check_deadline(now)
        elif now - self.since > (self.hub.head_s if self._port == "http" else self.hub.idle_s):
            self.overdue()

    def overdue(self) -> None:
        """Close a connection that has let a deadline pass."""
        self.hub.overdue += 1
        self.close()

    def data_received(self, data: bytes) -> None:
        if self.is_metered:
            self.charge(len(data))
        if self._rest:
            self._keep(self._rest + data)
        elif len(data) > MUCH_BYTES and self.hub.engine.pace.is_over():
            self._keep(data)
            self._read_later()
        else:
            self._read(data)

    def _keep(self, data: bytes) -> None:
        """It is read later. Until then it counts against the broker's memory."""
        self.outbox.requests.add(len(data) - len(self._rest))
        self._rest = data

    def _take_rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        if not self.outbox.closed:
            self.outbox.requests.add(-len(rest))
        return rest

    def _read(self, data: bytes) -> None:
        try:
            if len(data) < PIECE_BYTES:
                self._feed(data)
            else:
                self._feed_pieces(data)
        except Exception:
            # A bug of ours: this connection cannot go on, the others can.
            logger.exception("connection %s failed", self.peer, extra=self.fields())
            self._transport.abort()

    def _feed(self, data: bytes) -> None:
        session = self.session
        if self.closing and not (session and session.hears_goodbye):
            return
        if session is None:
            if data.startswith(TLS_HELLO):
                self.hub.refusals.note("tls", self.source, NO_TLS)
            session = self.session = self._open_session(self, data)
        session.feed(data)

    def _feed_pieces(self, data: bytes) -> None:
        """Read much data for a few milliseconds, while requests may be read at all. The rest waits."""
        pace = self.hub.engine.pace
        deadline = pace.deadline()
        for at in range(0, len(data), PIECE_BYTES):
            if at and (not self.outbox.reading or pace.is_past(deadline)):
                self._keep(data[at:])
                break
            self._feed(data[at : at + PIECE_BYTES])
        if self.outbox.reading and (self._rest or pace.is_past(deadline)):
            # The loop reads a socket up to 32 times before it turns to others.
            self._read_later()

    def _read_later(self) -> None:
        self.outbox.throttle(True)
        self.hub.engine.pace.soon(self._go_on_reading)

    def _read_rest(self) -> None:
        """Requests may be read again."""
        if self._rest:
            self._read_later()

    def _go_on_reading(self) -> None:
        rest = self._take_rest()
        self.outbox.throttle(False)
        if self.outbox.closed or not rest:
            return
        if self.outbox.reading:
            self._read(rest)
        else:
            self._keep(rest)

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
        self._take_rest()
        if self._patience is not None:
            self._patience.cancel()
        if self._resume is not None:
            self._resume.cancel()
        for meter in self._meters:
            meter.disconnect(self)
        self._meters, self.is_metered = (), False
        for task in tuple(self._tasks):
            task.cancel()
        if self.session is not None:
            self.session.lost()

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    # --- requests ---------------------------------------------------------------------------
    @property
    def permissions(self) -> Permissions:
        """What the client may do."""
        return Permissions(self.hub.engine, self.caller, self.source)

    def log_in_at_once(self, credentials: Credentials) -> bool:
        """The client is who its credentials say; False if it takes time to find out (``log_in``)."""
        if not self.hub.engine.access.is_on:
            return True
        caller = self.hub.logins.at_once(self.source, credentials)
        if caller is None:
            return False
        self.enter(caller)
        return True

    async def log_in(self, credentials: Credentials) -> None:
        """The client is who its credentials say. Nothing more is read from it meanwhile."""
        self.logging_in = True
        self.outbox.throttle(True)
        try:
            self.enter(await self.hub.logins.check(self.source, credentials))
        finally:
            self.logging_in = False
            self.outbox.throttle(False)

    @property
    def certified(self) -> Caller | None:
        """Who the client is by its certificate."""
        caller = self._certified
        return caller if caller is not None and caller.valid else None

    def enter(self, caller: Caller) -> None:
        """The client is this caller; :class:`QueueFull` if it has too many connections already."""
        if caller is not self.caller:
            self._count(caller)
            self.caller, self.publisher = caller, None
        self.authenticated = True

    def _count(self, caller: Caller | None, *, is_new: bool = True) -> None:
        """Count the connection for its address and its principal, instead of whom it was counted for."""
        meters = (
            self.hub.engine.access.meter_of(self.address),
            None if caller is None else caller.meter,
        )
        wanted = tuple(meter for meter in meters if meter is not None)
        if wanted == self._meters:
            return
        joined: list[Meter] = []
        try:
            for meter in wanted:
                if meter not in self._meters:
                    meter.connect(self, is_new=is_new)
                    joined.append(meter)
        except HeadraceError:
            for meter in joined:
                meter.disconnect(self)
            raise
        for meter in self._meters:
            if meter not in wanted:
                meter.disconnect(self)
        self._meters, self.is_metered = wanted, bool(wanted)
        self.outbox.belong(tuple(meter.memory for meter in wanted))
        self.outbox.on_sent = self.charge if wanted else None

    def charge(self, moved: int = 0, requests: int = 0) -> None:
        """Count bytes, of either direction, and requests against the quotas. Over them, the client is
        not read for a while, and gets no deliveries."""
        pause = 0.0
        for meter in self._meters:
            pause = max(pause, meter.moved(moved), meter.requested(requests))
        if pause > 0 and self._resume is None and not self.closing:
            self.outbox.throttle(True)
            self._resume = asyncio.get_running_loop().call_later(pause, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        pause = max((max(m.moved(0), m.requested(0)) for m in self._meters), default=0.0)
        if pause > 0:  # a debt that is longer than the longest pause
            self._resume = asyncio.get_running_loop().call_later(pause, self._go_on)
        else:
            self.outbox.throttle(False)

    def access_changed(self) -> None:
        """The rules have changed. What the caller may do has changed by itself; what it holds has not."""
        if self.session is None or self.caller is self.hub.engine.access.nobody:
            return
        if not self.caller.valid:
            error = self.caller.refusal("consume")
            self.caller, self.authenticated = self.hub.engine.access.nobody, False
            self.publisher = None
            self.session.expel(error)
            return
        self._count(self.caller, is_new=False)  # a new quota for connections is for new ones
        self.session.access_changed()

    def publish(self, publish: Publish, done: PublishDone) -> None:
        """Every publish of every protocol. ``done`` is called once, whatever happens."""
        caller, engine = self.caller, self.hub.engine
        try:
            if not caller.unlimited and publish.topic not in caller.publishes:
                self.permissions.check_publish(publish.topic)
            publish.by = self.publisher or self._named_publisher()
            if engine.topics.get(publish.topic) is None:
                with self.permissions.owning():
                    engine.publish(publish, done)
            else:
                engine.publish(publish, done)
        except HeadraceError as error:
            done([], error)
        except Exception:
            done([], self.bug(publish.topic))

    def _named_publisher(self) -> Publisher:
        self.publisher = Publisher(self.client_id, self.caller.name, self.address, self.protocol)
        return self.publisher

    async def call(self, operation: object, arguments: object) -> Any:
        """An operation by its name; returns its answer as JSON has it."""
        return await self.hub.operations.call(operation, arguments, self.caller, self.source)

    async def run(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """An operation whose arguments may be text; returns its result."""
        operations = self.hub.operations
        return await operations.run(operation, arguments, self.caller, self.source, strict=False)

    def answer_later(
        self,
        work: Coroutine[Any, Any, Answered],
        fill: Callable[[Answered], object],
        failed: Callable[[HeadraceError], Answered],
    ) -> asyncio.Task[None]:
        """Give ``fill`` the result of the work, or what ``failed`` makes of its error.

        The work begins in one of the next turns, when it is its turn among those of all connections.
        """
        pace = self.hub.engine.pace

        async def run() -> None:
            try:
                if pace.is_over():
                    await pace.turn()
            except BaseException:
                work.close()
                raise
            try:
                answer = await work
            except HeadraceError as error:
                # Its traceback may be in a cycle with the frames of the work, which hold megabytes.
                answer = failed(error.with_traceback(None))
            except Exception:
                answer = failed(self.bug())
            fill(answer)

        return self.start(run())

    def start(self, work: Coroutine[Any, Any, Answered]) -> asyncio.Task[Answered]:
        """A task that ends with the connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def bug(self, topic: str | None = None) -> HeadraceError:
        """Log the exception that is being handled. The client gets this error instead."""
        error = sys.exception()
        if isinstance(error, RecursionError):  # only nested JSON goes that deep
            return InvalidArgument("the JSON is nested too deeply", code="invalid_json")
        if isinstance(
            error, OSError
        ):  # of a read: what is written answers with an error of its own
            logger.error("the disk cannot be read: %s", error, extra=self.fields(topic))
            return unreadable(error)
        logger.exception("a command of %s failed", self.peer, extra=self.fields(topic))
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

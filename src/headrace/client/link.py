"""One connection to a broker that is kept up: connect, authenticate, ask, notice, connect again.

A :class:`Link` is either *up* (there is a :class:`Wire` that has said hello) or on its way there, with
growing pauses. A question asked while it is down waits for it, up to its timeout. What was asked and
not answered when the connection broke fails with :class:`ConnectionLost`; whether to ask again is for
the caller to know, because only the caller knows whether doing it twice does harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from headrace import limits
from headrace.client.address import Login
from headrace.errors import (
    Closed,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    RequestTimeout,
    Unauthenticated,
    by_kind,
)
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Frame, Type

logger = logging.getLogger("headrace.client")
Result = TypeVar("Result")
GOODBYE_S = 2.0
BACKOFF_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


def login_of(login: Login) -> dict[str, str] | None:
    """The properties of ``AUTH``; None without a login."""
    return {name: value for name, value in login._asdict().items() if value is not None} or None


def error_of(frame: Frame) -> HeadraceError:
    """The error that an answer carries, as the same class it was on the other side."""
    properties = frame.properties
    cls = by_kind(properties.get("kind", ""))
    return cls(
        properties.get("error", "the broker refused without a word"),
        code=properties.get("code"),
        retryable=properties.get("retryable") == "true",
    )


class Wire(asyncio.Protocol):
    """One TCP connection: requests out, answers matched by their number, the rest handed on."""

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[Wire, Exception | None], None],
    ):
        self._parser = BinaryParser()
        self._on_frame, self._on_lost = on_frame, on_lost
        self._waiting: dict[int, Callable[[Frame | None], None]] = {}
        self._next = 0
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._writable = asyncio.Event()
        self._writable.set()
        self._turn = asyncio.Lock()
        self.last_heard = 0.0
        self.is_lost = False
        self.speaks_http = False
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(16 << 20)
        self.last_heard = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        self.last_heard = asyncio.get_running_loop().time()
        for frame in self._parser.feed(data):
            if frame.type in (Type.ACK, Type.BATCHES, Type.HEARTBEAT):
                answer = self._waiting.pop(frame.sequence, None)
                if answer is not None:
                    answer(frame)
                elif frame.sequence == 0 and frame.type == Type.ACK:
                    logger.error("the broker ended the connection: %s", error_of(frame))
            else:
                self._on_frame(frame)
        if self._parser.error is not None:
            self.speaks_http = data.startswith(b"HTTP/")
            if not self.speaks_http:
                logger.error("the broker does not make sense: %s", self._parser.error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._gone.set()
        self._writable.set()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer(None)
        self._on_lost(self, exc)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    @property
    def is_idle(self) -> bool:
        """Whether everything was answered."""
        return not self._waiting

    async def writable(self) -> None:
        """There is room for more. Whoever asks first may write first."""
        async with self._turn:
            await self._writable.wait()

    def send(
        self,
        type: int,
        properties: Mapping[str, str],
        body: bytes,
        answer: Callable[[Frame | None], None],
    ) -> None:
        """Ask; ``answer`` gets the frame, or None when the connection breaks before it comes."""
        if self.is_lost:
            answer(None)
            return
        self._next += 1
        self._waiting[self._next] = answer
        self._transport.write(binary.encode(type, self._next, properties, body))

    def tell(self, type: int, properties: Mapping[str, str]) -> None:
        """Send what has no answer."""
        if not self.is_lost:
            self._transport.write(binary.encode(type, 0, properties))

    async def ask(self, type: int, properties: Mapping[str, str], body: bytes = b"") -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        def answer(frame: Frame | None) -> None:
            if future.done():
                return
            if frame is None:
                future.set_exception(ConnectionLost("the connection to the broker broke"))
            elif frame.properties.get("status") == "error":
                future.set_exception(error_of(frame))
            else:
                future.set_result(frame)

        self.send(type, properties, body, answer)
        return await future

    async def close(self) -> None:
        """Send what is on its way, say goodbye (TLS wants to), and be gone."""
        self._transport.close()
        if not await self._is_gone():
            self._transport.abort()
            await self._is_gone()

    async def _is_gone(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                return await self._gone.wait()
        return False

    def abort(self) -> None:
        self._transport.abort()


_OTHER_NAME = (62, 64)
"""What OpenSSL says of a name, and of an address, that the certificate does not have."""


def connect_failed(host: str, port: int, error: OSError) -> ConnectFailed:
    """What to do about it, by what went wrong."""
    where = f"{host}:{port}"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OTHER_NAME:
        return ConnectFailed(
            f"the certificate of {where} is for another name ({error.verify_message}); "
            "connect by the name that is in it"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectFailed(
            f"the certificate of {where} is not trusted ({error.verify_message}); "
            "give the one to trust (--ca, in Python ca=, or HEADRACE_CA)"
        )
    if isinstance(error, ssl.SSLError):
        return ConnectFailed(
            f"TLS failed at {where} ({error.reason or error}); "
            "if the broker there has no TLS, leave out tls:// (in Python tls=True) and the ca (HEADRACE_CA)"
        )
    return ConnectFailed(
        f"no broker answers at {where} ({str(error) or 'timeout'}); is it running?"
    )


class Link:
    def __init__(
        self,
        brokers: Sequence[tuple[str, int, ssl.SSLContext | None]],
        *,
        client_id: str,
        login: Mapping[str, str] | None = None,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
    ):
        self._brokers = brokers
        self._at = 0
        """Which of the brokers is the current one, or the one to try next."""
        self.client_id = client_id
        self.login = login
        self.request_timeout = request_timeout
        self._heartbeat_s = heartbeat_interval
        self._wire: Wire | None = None
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False
        self._keeper: asyncio.Task[None] | None = None
        self.refused: HeadraceError | None = None
        self.reconnects = 0
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_up: Callable[[Wire], Awaitable[None]] | None = None
        self.on_down: Callable[[], None] = lambda: None
        self.on_refused: Callable[[HeadraceError], None] = lambda error: None
        """It does not come back."""
        self.max_message_size = limits.MESSAGE_BYTES_CEILING
        """The broker's, once it is connected."""
        self.node: str | None = None
        """The broker's address in its cluster; None: it is alone."""
        self.silence_s = heartbeat_interval
        """How long neither side may be silent: our own patience, or the broker's if it has less."""

    @property
    def broker(self) -> tuple[str, int, ssl.SSLContext | None]:
        """The current one."""
        return self._brokers[self._at]

    @property
    def address(self) -> tuple[str, int]:
        host, port, _ = self.broker
        return host, port

    @property
    def is_up(self) -> bool:
        return self._wire is not None and not self._wire.is_lost

    @property
    def is_closed(self) -> bool:
        """On purpose, and for good."""
        return self._closed

    @property
    def wire(self) -> Wire | None:
        """The connection if it is up."""
        return self._wire if self.is_up else None

    # --- keeping it up ----------------------------------------------------------------------
    async def open(self) -> None:
        """Connect once, or say why not; from then on it is kept up."""
        await self._connect()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def start(self) -> None:
        """Keep it up, without waiting for the first connection."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _connect(self) -> None:
        """To the first broker that answers, beginning with the last one that did."""
        failed: list[HeadraceError] = []
        for _ in self._brokers:
            try:
                await self._connect_one()
                return
            except HeadraceError as error:
                if not error.retryable:  # the login, or the protocol
                    raise
                failed.append(error)
            self._at = (self._at + 1) % len(self._brokers)
        if len(failed) == 1:
            raise failed[0]
        raise ConnectFailed("; ".join(map(str, failed)))

    async def _connect_one(self) -> None:
        host, port, tls = self.broker
        wire: Wire | None = None
        try:
            async with asyncio.timeout(self.request_timeout / len(self._brokers)):
                wire = await self._dial()
                if self.login is not None:
                    await wire.ask(Type.AUTH, self.login)
                hello = await wire.ask(Type.HEARTBEAT, {"client_id": self.client_id})
                patience = float(hello.properties.get("interval", self._heartbeat_s))
                self.silence_s = min(self._heartbeat_s, patience)
                most = hello.properties.get("max_message_size", limits.MESSAGE_BYTES_CEILING)
                self.max_message_size = int(most)
                self.node = hello.properties.get("node")
                self._wire = wire
                self._down.clear()
                if self.on_up is not None:
                    await self.on_up(wire)
        except ConnectionLost:
            if wire is not None and wire.speaks_http:
                raise ConnectFailed(
                    f"{host}:{port} speaks HTTP; give the broker's other port, which is 9999 unless "
                    "it was changed"
                ) from None
            hint = "" if tls else "; if it wants TLS, write tls:// in front of the address"
            raise ConnectFailed(f"{host}:{port} closed the connection at once{hint}") from None
        except (OSError, ssl.SSLError, TimeoutError) as error:
            if wire is not None:
                wire.abort()
            raise connect_failed(host, port, error) from None
        except BaseException:
            if wire is not None:
                wire.abort()
            raise
        self._up.set()

    async def _dial(self) -> Wire:
        host, port, tls = self.broker
        transport, wire = await asyncio.get_running_loop().create_connection(
            lambda: Wire(self.on_frame, self._lost),
            host,
            port,
            ssl=tls,
            server_hostname=host if tls else None,
        )
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # Nobody listens there, and the system gave us the very port that we call.
            wire.abort()
            raise ConnectFailed(f"no broker answers at {host}:{port}")
        return wire

    def _lost(self, wire: Wire, _error: Exception | None) -> None:
        if wire is self._wire:
            self._wire = None
            self._up.clear()
            self._down.set()
            self.on_down()

    async def _keep(self) -> None:
        """Send heartbeats while it is up, connect again when it is not."""
        failures = 0
        while not self._closed:
            wire = self.wire
            if wire is None:
                pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                try:
                    await self._connect()
                    self.reconnects += 1
                    # Whoever read that it was lost wants to read this, too.
                    level = logging.WARNING if failures else logging.INFO
                    logger.log(level, "connected again to %s:%d", *self.address)
                    failures = 0
                except HeadraceError as error:
                    if not error.retryable:  # the login, or the protocol: asking again is no use
                        logger.error("%s:%d refuses this client: %s", *self.address, error)
                        self.refused = error
                        self._up.set()
                        self.on_refused(error)
                        return
                    level = logging.DEBUG if failures else logging.WARNING  # once for each time
                    logger.log(level, "the connection is lost, and is tried again: %s", error)
                    failures += 1
                except Exception:
                    logger.exception("connecting to %s:%d failed", *self.address)
                    failures += 1
                continue
            silent = asyncio.get_running_loop().time() - wire.last_heard
            if silent > self.silence_s:
                logger.warning("nothing heard from %s:%d for %.0f s", *self.address, silent)
                wire.abort()
                await asyncio.sleep(0)
                continue
            wire.send(Type.HEARTBEAT, {}, b"", lambda frame: None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.silence_s / 3):
                    await self._down.wait()

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        wire, self._wire = self._wire, None
        self._up.set()
        if wire is not None:
            await wire.close()

    # --- asking -----------------------------------------------------------------------------
    async def ready(self) -> Wire:
        """The connection, as soon as there is one. Whoever asks first has it first: batches keep their order."""
        async with self._turn:
            while True:
                if self._closed:
                    raise Closed("the client is closed")
                if self.refused is not None:
                    raise self.refused
                wire = self.wire
                if wire is not None:
                    return wire
                self._up.clear()
                await self._up.wait()

    async def ask(
        self,
        type: int,
        properties: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        again: bool = False,
        timeout: float | None = None,
    ) -> Frame:
        """Ask and wait. ``again``: ask once more if the connection breaks; it does no harm."""

        async def ask() -> Frame:
            while True:
                wire = await self.ready()
                try:
                    return await wire.ask(type, properties or {}, body)
                except ConnectionLost:
                    if not again:
                        raise
                except Unauthenticated:
                    if self.login is not None:
                        raise
                    host, port = self.address
                    raise Unauthenticated(
                        f"{host}:{port} wants a login: give a token (--token, in Python token=, or "
                        "HEADRACE_TOKEN), or a user and a password (HEADRACE_USER, HEADRACE_PASSWORD)"
                    ) from None

        return await self.within_time(ask(), timeout)

    async def within_time(
        self, work: Coroutine[Any, Any, Result], timeout: float | None = None
    ) -> Result:
        """:class:`RequestTimeout` if it takes longer than any answer may."""
        limit = self.request_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                return await work
        except RequestTimeout:
            raise
        except TimeoutError:
            host, port = self.address
            raise RequestTimeout(f"no answer from {host}:{port} within {limit:g} seconds") from None

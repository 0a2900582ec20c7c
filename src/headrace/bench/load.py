"""The load: many connections, each of which publishes, waits for the answer, and publishes again.

Without a rate that is all. With one, each message has a time at which it is due, and its latency counts
from that time, not from when the connection came to send it: a broker that stalls for a second makes
every message of that second late, and a test that waited politely would not notice.

It ends when every message is answered, when the time is up, when it is told to, or when no connection is
left; what is unanswered then is counted as such.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from headrace.bench.dialects import DIALECTS, Dialect, Marks, Outcome, payload_maker
from headrace.bench.figures import Figures
from headrace.errors import HeadraceError

CONNECT_S = 10.0
CONNECT_AT_ONCE = 100
GRACE_S = 2.0
"""How long answers are waited for once nothing more is sent."""
SILENCE_S = 5.0
"""How long deliveries may stop before they are given up."""
_clock = time.perf_counter


class NoBroker(HeadraceError):
    code = "connect_failed"
    retryable = True


@dataclass(frozen=True, slots=True)
class Target:
    """Where the broker is, and how it is spoken to."""

    protocol: str
    host: str
    port: int
    token: str | None = None
    tls: ssl.SSLContext | None = None

    def dialect(self, topic: str) -> Dialect:
        return DIALECTS[self.protocol](topic, self.token, f"{self.host}:{self.port}")


@dataclass(frozen=True, slots=True)
class Plan:
    topic: str
    connections: int
    messages: int
    size: int
    rate: float | None = None
    seconds: float = 60.0
    consume: bool = False


class _Connection(asyncio.Protocol):
    """Says its greeting, then hands every outcome on."""

    def __init__(self, dialect: Dialect):
        self.dialect = dialect
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        greeting = self.dialect.greeting()
        if greeting:
            self.transport.write(greeting)
        else:
            self._ready.set_result(None)

    async def ready(self) -> None:
        await self._ready

    def data_received(self, data: bytes) -> None:
        now = _clock()
        for outcome in self.dialect.feed(data):
            if self._ready.done():
                self.answered(outcome, now)
            elif outcome is None:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(NoBroker(_REFUSED.format(outcome), code=outcome))
        if self.dialect.reply:
            self.transport.write(self.dialect.reply)
            self.dialect.reply = b""

    def answered(self, outcome: Outcome, now: float) -> None:
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if not self._ready.done():
            self._ready.set_exception(NoBroker("the broker closed the connection at once"))


_REFUSED = "the broker refused the connection: {}"


class _Publisher(_Connection):
    def __init__(self, load: Load, dialect: Dialect, number: int):
        super().__init__(dialect)
        self._load = load
        rate = load.plan.rate
        self._every = None if rate is None else load.plan.connections / rate
        self._due = 0.0 if rate is None else number / rate
        self._sent_at = 0.0
        self.waiting = False
        """Whether a request is unanswered."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, at: float) -> None:
        self._due += at
        self._next()

    def _next(self) -> None:
        if self._every is None:
            self._send(_clock())
            return
        due, self._due = self._due, self._due + self._every
        delay = due - _clock()
        if delay > 0:
            self._timer = asyncio.get_running_loop().call_later(delay, self._send, due)
        else:
            self._send(due)

    def _send(self, at: float) -> None:
        if self.is_lost:
            return
        at = min(at, _clock())  # a timer may be half a millisecond early
        request = self._load.take(at)
        if request is not None:
            self._sent_at = at
            self.waiting = True
            self.transport.write(self.dialect.publish(request))

    def answered(self, outcome: Outcome, now: float) -> None:
        self.waiting = False
        self._load.answered(outcome, now - self._sent_at)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop()
        self._load.lost(self)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Listener(_Connection):
    def __init__(self, load: Load, dialect: Dialect):
        super().__init__(dialect)
        self._load = load
        self._marks = Marks()
        self._subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ready(self) -> None:
        await super().ready()
        self.transport.write(self.dialect.subscribe())
        await self._subscribed

    def data_received(self, data: bytes) -> None:
        now = _clock()
        super().data_received(data)
        for number in self._marks.feed(data):
            self._load.delivered(number, now)

    def answered(self, outcome: Outcome, now: float) -> None:
        if self._subscribed.done():
            return
        if outcome is None:
            self._subscribed.set_result(None)
        else:
            self._subscribed.set_exception(
                NoBroker(f"the broker refused the subscription: {outcome}", code=outcome)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._subscribed.done():
            self._subscribed.set_exception(NoBroker("the broker closed the subscription at once"))
            self._subscribed.exception()  # perhaps nobody came to wait for it


class Load:
    """One test. ``figures`` is true at any moment; ``run`` makes them grow."""

    def __init__(self, plan: Plan, target: Target):
        self.plan = plan
        self.target = target
        self.figures = Figures()
        self._payload = payload_maker(plan.size)
        self._sent_at = array("d", bytes(8 * plan.messages)) if plan.consume else None
        self._publishers: list[_Publisher] = []
        self._listener: _Listener | None = None
        self._over = asyncio.Event()
        self._answered = 0
        self._is_stopping = False
        self._settled = asyncio.Event()
        self._heard = asyncio.Event()

    # --- what the connections tell ------------------------------------------------------------
    def take(self, at: float) -> bytes | None:
        """The next message, or None when there is none to send any more."""
        number = self.figures.sent
        if self._is_stopping or number >= self.plan.messages:
            return None
        self.figures.sent += 1
        if self._sent_at is not None:
            self._sent_at[number] = at
        return self._payload(number)

    def answered(self, outcome: Outcome, seconds: float) -> None:
        figures = self.figures
        if outcome is None:
            figures.published += 1
            figures.acknowledging.add(seconds)
        else:
            figures.errors[outcome] += 1
        self._answered += 1
        if self._answered == self.plan.messages:
            self._over.set()
        if self._answered == figures.sent and self._is_stopping:
            self._settled.set()

    def delivered(self, number: int, now: float) -> None:
        assert self._sent_at is not None
        if number < len(self._sent_at) and self._sent_at[number]:
            self.figures.delivering.add(now - self._sent_at[number])
            self.figures.delivered += 1
            self._sent_at[number] = 0.0  # one that comes twice is counted once
            if self._is_stopping and self.figures.delivered >= self.figures.published:
                self._heard.set()

    def lost(self, publisher: _Publisher) -> None:
        if publisher.waiting:
            publisher.waiting = False
            self.answered("connection_lost", 0.0)
        if all(other.is_lost for other in self._publishers):
            self._over.set()

    # --- running ------------------------------------------------------------------------------
    def stop(self) -> None:
        """Send nothing more; what is under way is waited for, but not long."""
        self.figures.interrupted = True
        self._over.set()

    async def run(self) -> Figures:
        await self._connect()
        figures = self.figures
        began = _clock()
        if not figures.interrupted:
            for publisher in self._publishers:
                publisher.start(began)
        try:
            async with asyncio.timeout(self.plan.seconds):
                await self._over.wait()
        except TimeoutError:
            figures.time_was_up = True
        self._is_stopping = True
        for publisher in self._publishers:
            publisher.stop()
        if self._waiting():
            await _wait(self._settled, GRACE_S)
        figures.seconds = _clock() - began
        if self._waiting():
            figures.errors["unanswered"] += self._waiting()
        if self._listener is not None and not figures.interrupted:
            await self._hear_the_rest()
        self._close()
        return figures

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        target, plan = self.target, self.plan
        gate = asyncio.Semaphore(CONNECT_AT_ONCE)

        async def connect(make: Callable[[], _Connection]) -> _Connection:
            async with gate, asyncio.timeout(CONNECT_S):
                name = target.host if target.tls else None
                _, made = await loop.create_connection(
                    make, target.host, target.port, ssl=target.tls, server_hostname=name
                )
                try:
                    await made.ready()
                except BaseException:
                    made.transport.abort()
                    raise
                return made

        # The first one alone: if nobody answers, it is said once.
        try:
            if plan.consume:
                listener = await connect(lambda: _Listener(self, target.dialect(plan.topic)))
                self._listener = cast(_Listener, listener)
            first = await connect(lambda: _Publisher(self, target.dialect(plan.topic), 0))
        except (OSError, TimeoutError) as error:
            self._close()
            raise no_broker(target, error) from None
        self._publishers.append(cast(_Publisher, first))
        others = await asyncio.gather(
            *(
                connect(lambda n=n: _Publisher(self, target.dialect(plan.topic), n))  # type: ignore[misc]
                for n in range(1, plan.connections)
            ),
            return_exceptions=True,
        )
        for made in others:
            if isinstance(made, _Publisher):
                self._publishers.append(made)
            elif isinstance(made, (OSError, TimeoutError, HeadraceError)):
                self.figures.errors[getattr(made, "code", "connect_failed")] += 1
            elif isinstance(made, BaseException):
                raise made
        self.figures.connections = len(self._publishers)

    async def _hear_the_rest(self) -> None:
        """Until everything acknowledged has come, or nothing comes any more."""
        figures = self.figures
        before = -1
        while before < figures.delivered < figures.published:
            before = figures.delivered
            await _wait(self._heard, SILENCE_S)

    def _waiting(self) -> int:
        """Requests that are unanswered."""
        return sum(publisher.waiting for publisher in self._publishers)

    def _close(self) -> None:
        for connection in (*self._publishers, self._listener):
            if connection is not None:
                connection.transport.abort()


def no_broker(target: Target, error: BaseException) -> NoBroker:
    what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    other = "" if target.protocol in ("text", "binary") else "; --http names another HTTP port"
    return NoBroker(
        f"no broker answers at {target.host}:{target.port} ({what}); "
        f"'headrace serve' starts one, and --start makes one for this test alone{other}"
    )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

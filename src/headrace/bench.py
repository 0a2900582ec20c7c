"""The load test of ``headrace bench``: many clients publish, and the test measures each message.

Each connection is an :class:`AsyncClient` that publishes, waits for the receipt, and publishes again.
With a rate, each message is due at a certain time, and its latency counts from that time, not from
the moment at which its connection was free. If a broker stalls for a second, every message of that second
is late; a test that measured only from the moment of sending would not notice.

The test ends when every message is answered, when its time is up, when it is stopped, or when no
connection is left. Messages without an answer are counted as ``unanswered``.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.channels import AsyncChannel
from headrace.client.aio import AsyncClient
from headrace.errors import HeadraceError, TopicNotFound

PERCENTILES = (50, 90, 99)
CONNECT_S = 10.0
CONNECT_AT_ONCE = 100
PUBLISH_S = 5.0
"""How long a client tries to publish a message, for example while the broker restarts."""
GRACE_S = 2.0
"""How long the test waits for receipts after the last message was sent."""
SILENCE_S = 5.0
"""How long the test waits for the next delivery before it gives up on the rest."""
NUMBER_DIGITS = 10
_HEAD, _MIDDLE, _TAIL = b'{"bench":"', b'","fill":"', b'"}'
_NUMBER = slice(len(_HEAD), len(_HEAD) + NUMBER_DIGITS)
PAYLOAD_BYTES_MIN = len(_HEAD) + NUMBER_DIGITS + len(_MIDDLE) + len(_TAIL)
_clock = time.perf_counter


def payload_maker(size: int) -> Callable[[int], bytes]:
    """A function that makes the payload of a message from its number: JSON of ``size`` bytes."""
    tail = _MIDDLE + b"x" * (size - PAYLOAD_BYTES_MIN) + _TAIL
    return (_HEAD + b"%%0%dd" % NUMBER_DIGITS + tail).__mod__


def number_of(payload: bytes) -> int | None:
    """The number of a message of this test; None for any other message of the topic."""
    digits = payload[_NUMBER]
    return int(digits) if payload.startswith(_HEAD) and digits.isdigit() else None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    topic: str
    connections: int
    messages: int
    size: int
    rate: float | None = None
    seconds: float = 60.0
    consume: bool = False
    keep: bool = False


@dataclass
class Figures:
    """The counters and latencies (in seconds) of a test, current at any moment."""

    connections: int = 0
    sent: int = 0
    published: int = 0
    delivered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latencies: array[float] = field(default_factory=lambda: array("d"))
    deliveries: array[float] = field(default_factory=lambda: array("d"))
    seconds: float = 0.0
    interrupted: bool = False
    time_was_up: bool = False

    def as_dict(self, size: int, *, consume: bool) -> dict[str, Any]:
        rate = self.published / self.seconds if self.seconds else 0.0
        return {
            "connections": self.connections,
            "sent": self.sent,
            "published": self.published,
            "delivered": self.delivered if consume else None,
            "errors": dict(self.errors.most_common()),
            "seconds": round(self.seconds, 6),
            "messages_per_second": round(rate, 1),
            "bytes_per_second": round(rate * size, 1),
            "latency_ms": summary(self.latencies),
            "delivery_ms": summary(self.deliveries),
            "interrupted": self.interrupted,
            "time_was_up": self.time_was_up,
        }


def summary(latencies: Sequence[float]) -> dict[str, Any] | None:
    """Percentiles and a histogram in milliseconds; None if nothing was measured."""
    if not latencies:
        return None
    ordered = sorted(latencies)
    points = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    points |= {"min": ordered[0], "mean": math.fsum(ordered) / len(ordered), "max": ordered[-1]}
    in_ms: dict[str, Any] = {name: round(value * 1000, 4) for name, value in points.items()}
    return in_ms | {"histogram": histogram(ordered)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by ``percent`` % of all values (nearest rank)."""
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def histogram(ordered: Sequence[float]) -> list[dict[str, float]]:
    """Counts between 1, 2, 5, 10, 20, 50 … milliseconds, from the smallest value to the largest."""
    counts = Counter(_step(seconds * 1000) for seconds in ordered)
    return [
        {"from_ms": _bound(step), "to_ms": _bound(step + 1), "count": counts[step]}
        for step in range(min(counts), max(counts) + 1)
    ]


def _bound(step: int) -> float:
    """… 0.5, 1, 2, 5, 10 …: step 0 begins at one millisecond."""
    power, digit = divmod(step, 3)
    return float(f"{(1, 2, 5)[digit]}e{power}")


def _step(ms: float) -> int:
    ms = max(ms, 1e-3)
    step = 3 * math.floor(math.log10(ms))
    while ms >= _bound(step + 1):
        step += 1
    return step


class LoadTest:
    """One test. ``run`` runs it, ``stop`` ends it early, ``figures`` holds the results so far."""

    def __init__(self, plan: LoadPlan, new_client: Callable[[], AsyncClient]):
        self.plan = plan
        self.figures = Figures()
        self.durability = "unknown"
        self.topic_is_ours = False
        """Whether the test created the topic. It never deletes a topic that existed before."""
        self.left_over: HeadraceError | None = None
        """Why the test could not delete its topic."""
        self._new_client = new_client
        self._payload = payload_maker(plan.size)
        self._sent_at = array("d", bytes(8 * plan.messages)) if plan.consume else None
        self._publishing = 0
        """How many connections still publish."""
        self._over = asyncio.Event()
        self._all_delivered = asyncio.Event()

    def stop(self) -> None:
        """Stop publishing, and wait only briefly for outstanding receipts."""
        self.figures.interrupted = True
        self._over.set()

    async def run(self) -> None:
        # One connection manages the topic and receives; if no broker answers, the error comes once.
        async with self._new_client() as control:
            partitions = await self._make_topic(control)
            try:
                await self._load(control, partitions)
            finally:
                if self.topic_is_ours and not self.plan.keep:
                    await self._delete_topic(control)

    async def _make_topic(self, control: AsyncClient) -> int:
        """Create the topic if it does not exist; return its number of partitions."""
        name = self.plan.topic
        try:
            stats = await control.topic_stats(name)
        except TopicNotFound:
            await control.create_topic(name)
            self.topic_is_ours = True
            stats = await control.topic_stats(name)
        self.durability = str(stats["durability"])
        return len(stats["partitions"])

    async def _delete_topic(self, control: AsyncClient) -> None:
        """If the broker does not answer, keep the error: the results are still valid."""
        try:
            if not control.is_connected:
                raise HeadraceError("the broker does not answer")
            await control.delete_topic(self.plan.topic)
        except HeadraceError as error:
            self.left_over = error

    async def _load(self, control: AsyncClient, partitions: int) -> None:
        listener: asyncio.Task[None] | None = None
        if self.plan.consume:
            channel = await control.subscribe(self.plan.topic)
            listener = asyncio.create_task(self._listen(channel))
        clients = await self._connect()
        try:
            await self._publish_all(clients, partitions)
            if listener is not None and not self.figures.interrupted:
                await self._await_deliveries()
        finally:
            if listener is not None:
                listener.cancel()
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    async def _connect(self) -> list[AsyncClient]:
        """The clients that publish. A connection that fails counts as an error."""
        gate = asyncio.Semaphore(CONNECT_AT_ONCE)
        connected = []

        async def connect() -> None:
            async with gate:
                try:
                    connected.append(await self._new_client().connect())
                except HeadraceError as error:
                    self.figures.errors[error.code] += 1

        await asyncio.gather(*(connect() for _ in range(self.plan.connections)))
        self.figures.connections = len(connected)
        return connected

    async def _publish_all(self, clients: list[AsyncClient], partitions: int) -> None:
        figures = self.figures
        if not clients or figures.interrupted:
            return
        began = _clock()
        publishing = {
            asyncio.create_task(self._publish(client, began, number, number % partitions))
            for number, client in enumerate(clients)
        }
        self._publishing = len(publishing)
        await _wait(self._over, self.plan.seconds)
        figures.time_was_up = not self._over.is_set()
        self._over.set()
        done, late = await asyncio.wait(publishing, timeout=GRACE_S)
        figures.seconds = _clock() - began
        if late:
            figures.errors["unanswered"] += len(late)
            for task in late:
                task.cancel()
            await asyncio.wait(late)
        for task in done:
            task.result()  # raises if we made a mistake

    async def _publish(
        self, client: AsyncClient, began: float, number: int, partition: int
    ) -> None:
        """One connection: publish, wait for the receipt, publish again."""
        plan, figures, rate = self.plan, self.figures, self.plan.rate
        due = began if rate is None else began + number / rate
        try:
            while True:
                if rate is not None and (delay := due - _clock()) > 0:
                    await _wait(self._over, delay)
                if self._over.is_set() or figures.sent == plan.messages:
                    return
                started = _clock() if rate is None else min(due, _clock())
                if rate is not None:
                    due += figures.connections / rate
                message = figures.sent
                figures.sent += 1
                if self._sent_at is not None:
                    self._sent_at[message] = started
                try:
                    await client.publish(plan.topic, self._payload(message), partition=partition)
                except HeadraceError as error:
                    figures.errors[error.code] += 1
                    if not client.is_connected:
                        return
                else:
                    figures.latencies.append(_clock() - started)
                    figures.published += 1
        finally:
            self._publishing -= 1
            if not self._publishing:
                self._over.set()

    async def _listen(self, channel: AsyncChannel) -> None:
        assert self._sent_at is not None
        figures, sent_at = self.figures, self._sent_at
        async for message in channel:
            number = number_of(message.value or b"")
            if number is None or number >= len(sent_at) or not sent_at[number]:
                continue
            figures.deliveries.append(_clock() - sent_at[number])
            figures.delivered += 1
            sent_at[number] = 0.0  # count a message that comes twice only once
            if self._over.is_set() and figures.delivered >= figures.published:
                self._all_delivered.set()

    async def _await_deliveries(self) -> None:
        """Wait until every confirmed message is delivered, or deliveries stop."""
        figures = self.figures
        before = -1
        while before < figures.delivered < figures.published:
            before = figures.delivered
            await _wait(self._all_delivered, SILENCE_S)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

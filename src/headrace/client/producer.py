"""Publishing: small messages are gathered into batches, and each is stored exactly once.

Each (topic, partition) is a :class:`_Lane`: what is published waits there while batches are under way
and leaves together when there is room for one more, when enough has gathered, or after ``linger``. So
an idle client sends at once and a busy one sends large batches, by itself.

Every batch has a producer id and the number of its first record. After a reconnect the unanswered
ones are sent again, in order, with the same numbers; the broker answers what it already has with the
first offset. A refusal that may pass (disk full, queue full) is tried again until the timeout; one
that will not fails its messages, and those behind it go on under a new producer id, because the
numbers of the failed ones were never used.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable

from headrace import limits
from headrace.client.link import Link, Wire, error_of
from headrace.errors import (
    Closed,
    HeadraceError,
    OutcomeUnknown,
    ProducerFenced,
    QueueFull,
    RequestTimeout,
    SequenceGap,
)
from headrace.log.batch import crc32c, encode
from headrace.log.columns import Columns, concat
from headrace.model import Receipt
from headrace.wire.binary import Frame, Type

logger = logging.getLogger("headrace.client")
Done = Callable[[Receipt | None, HeadraceError | None], None]
IN_FLIGHT_MAX = limits.PRODUCER_BATCHES_KEPT
BUFFER_BYTES_MAX = 64 << 20
RETRY_S = 0.1


class _Item:
    """One call's records, and who hears of them."""

    __slots__ = ("bytes", "columns", "count", "deadline", "done")

    def __init__(self, columns: Columns, done: Done, deadline: float):
        self.columns = columns
        self.done = done
        self.deadline = deadline
        self.count = len(columns.values)
        self.bytes = sum(map(len, columns.values)) + 32 * self.count


class _Sent:
    """A batch that is on its way."""

    __slots__ = ("answered", "error", "items", "raw", "sequence")

    def __init__(self, items: list[_Item], raw: bytes, sequence: int):
        self.items = items
        self.raw = raw
        self.sequence = sequence
        self.answered = False
        self.error: HeadraceError | None = None


class _Lane:
    """One partition's publishes, in order."""

    def __init__(self, producer: Producer, topic: str, partition: int):
        self._producer = producer
        self._topic, self._partition = topic, partition
        self._waiting: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._in_flight: deque[_Sent] = deque()
        self._scheduled: asyncio.Handle | None = None
        self._stopped = False
        """A batch failed: nothing new leaves before those in flight are all answered."""
        self._new_identity()

    def _new_identity(self) -> None:
        self._id = random.SystemRandom().getrandbits(63) | 1
        self._sequence = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._in_flight

    # --- gathering --------------------------------------------------------------------------
    def add(self, item: _Item) -> None:
        self._waiting.append(item)
        self._waiting_bytes += item.bytes
        if self._waiting_bytes >= self._producer.batch_bytes:
            self._schedule(0.0)
        elif self._scheduled is None:
            self._schedule(self._producer.linger)

    def _schedule(self, delay: float) -> None:
        loop = self._producer.loop
        if self._scheduled is not None:
            self._scheduled.cancel()
        if delay > 0:
            self._scheduled = loop.call_later(delay, self.send)
        else:
            self._scheduled = loop.call_soon(self.send)

    def flush_now(self) -> None:
        if self._waiting:
            self._schedule(0.0)

    def send(self) -> None:
        """Send what waits, as far as there is room on the way."""
        self._scheduled = None
        wire = self._producer.wire
        while self._waiting and not self._stopped and wire is not None:
            full = self._waiting_bytes >= self._producer.batch_bytes
            if len(self._in_flight) >= (IN_FLIGHT_MAX if full else 1):
                return  # goes on when an answer comes
            self._send_one(wire, self._take())

    def _take(self) -> list[_Item]:
        items: list[_Item] = []
        size = records = 0
        with_times = False
        while self._waiting:
            item = self._waiting[0]
            own_times = item.columns.times is not None
            if items and (
                size + item.bytes > self._producer.batch_bytes
                or records + item.count > limits.BATCH_RECORDS_TARGET
                or own_times
                or with_times
            ):
                break
            with_times = own_times
            items.append(self._waiting.popleft())
            size += item.bytes
            records += item.count
        self._waiting_bytes -= size
        return items

    def _send_one(self, wire: Wire, items: list[_Item]) -> None:
        try:
            batch = encode(concat([item.columns for item in items]))
        except HeadraceError as error:
            self._fail(items, error)
            return
        batch.producer_id = self._id
        batch.first_sequence = self._sequence
        self._sequence = (self._sequence + batch.count) & 0xFFFF_FFFF
        sent = _Sent(items, batch.raw(), batch.first_sequence)
        self._in_flight.append(sent)
        self._put(wire, sent)

    def _put(self, wire: Wire, sent: _Sent) -> None:
        properties = {"topic": self._topic, "partition": str(self._partition)}
        wire.send(Type.PUBLISH_BATCH, properties, sent.raw, lambda f: self._answered(sent, f))

    # --- answers ----------------------------------------------------------------------------
    def _answered(self, sent: _Sent, frame: Frame | None) -> None:
        if frame is None:
            return  # the connection broke; ``resume`` sends it again
        if frame.properties.get("status") == "error":
            sent.error = error_of(frame)
            sent.answered = True
            self._stopped = True
        else:
            sent.answered = True
            self._stored(sent, frame)
        while self._in_flight and self._in_flight[0].answered and not self._in_flight[0].error:
            self._in_flight.popleft()
        if self._stopped:
            if all(batch.answered for batch in self._in_flight):
                self._recover()
        else:
            self.send()
        self._producer.progressed()

    def _stored(self, sent: _Sent, frame: Frame) -> None:
        properties = frame.properties
        offset = int(properties["offset"])
        timestamp = int(properties["timestamp"])
        duplicate = properties.get("duplicate") == "true"
        for item in sent.items:
            ids = item.columns.ids
            receipt = Receipt(
                self._topic,
                self._partition,
                offset,
                timestamp,
                item.count,
                duplicate,
                ids[0] if ids else None,
            )
            offset += item.count
            self._producer.finished(item)
            item.done(receipt, None)
        sent.items = []

    def _recover(self) -> None:
        """Everything in flight is answered, and something failed: decide about each."""
        left = [sent for sent in self._in_flight if sent.items]
        self._in_flight.clear()
        if not left:
            self._stopped = False
            self.send()
            return
        first = left[0].error
        assert first is not None
        if first.retryable and self._in_time(left[0]):
            self._in_flight.extend(left)
            self._producer.loop.call_later(RETRY_S, self.resume)
            return
        # Refused for good: what is behind it was refused as a gap, or not at all stored.
        self._fail(left[0].items, first)
        self._new_identity()
        for sent in reversed(left[1:]):
            if isinstance(sent.error, (SequenceGap, ProducerFenced)) or sent.error is None:
                for item in reversed(sent.items):
                    self._waiting.appendleft(item)
                    self._waiting_bytes += item.bytes
            else:
                self._fail(sent.items, sent.error)
        self._stopped = False
        self.send()

    def _in_time(self, sent: _Sent) -> bool:
        now = self._producer.loop.time()
        return any(item.deadline > now for item in sent.items)

    def resume(self) -> None:
        """Send again what is unanswered, in order."""
        wire = self._producer.wire
        if wire is None:
            return
        self._stopped = False
        for sent in self._in_flight:
            if sent.items:
                sent.answered, sent.error = False, None
                self._put(wire, sent)
        self.send()

    def expire(self, now: float) -> None:
        """Give up on what has waited for too long while the broker could not be reached."""
        while self._waiting and self._waiting[0].deadline <= now:
            item = self._waiting.popleft()
            self._waiting_bytes -= item.bytes
            self._fail([item], RequestTimeout("the broker could not be reached in time"))
        for sent in self._in_flight:
            if sent.items and all(item.deadline <= now for item in sent.items):
                error = OutcomeUnknown(
                    "the broker did not answer in time: the message may or may not be stored"
                )
                self._fail(sent.items, error)
                sent.items = []

    def _fail(self, items: list[_Item], error: HeadraceError) -> None:
        for item in items:
            self._producer.finished(item)
            item.done(None, error)

    def close(self, error: HeadraceError) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
        for sent in self._in_flight:
            self._fail(sent.items, error)
        self._fail(list(self._waiting), error)
        self._in_flight.clear()
        self._waiting.clear()


class Producer:
    def __init__(
        self,
        link: Link,
        partitions: Callable[[str], Awaitable[int]],
        *,
        linger: float,
        batch_bytes: int,
        timeout: float,
    ):
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._ask_partitions = partitions
        self.linger = linger
        self.batch_bytes = batch_bytes
        self._timeout = timeout
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._partitions: dict[str, int] = {}
        self._asking: dict[str, asyncio.Task[int]] = {}
        self._turn: dict[str, int] = {}
        self._bytes = 0
        self._items = 0
        self._idle: list[asyncio.Future[None]] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False
        self.errors = 0

    @property
    def wire(self) -> Wire | None:
        return self._link.wire

    # --- in ---------------------------------------------------------------------------------
    def publish(self, topic: str, columns: Columns, partition: int | None, done: Done) -> None:
        """Records of one call, to one partition. ``done`` hears when they are stored."""
        if self._closed:
            done(None, Closed("the client is closed"))
            return
        item = _Item(columns, done, self.loop.time() + self._timeout)
        if self._bytes + item.bytes > BUFFER_BYTES_MAX and self._items:
            done(
                None,
                QueueFull(
                    f"{self._bytes >> 20} MiB wait to be sent; wait for some of them first",
                    code="client_buffer_full",
                ),
            )
            return
        self._bytes += item.bytes
        self._items += 1
        self._watch()
        count = self._partitions.get(topic)
        if partition is not None:
            self._lane(topic, partition).add(item)
        elif count is not None:
            self._lane(topic, self._choose(topic, columns, count)).add(item)
        else:
            self._learn(topic, item)

    def _choose(self, topic: str, columns: Columns, count: int) -> int:
        """By key, or staying with one partition until something has been sent to it."""
        if count == 1:
            return 0
        key = columns.keys[0] if columns.keys else None
        if key is not None:
            return int(crc32c(key)) % count
        turn = self._turn.get(topic, 0)
        self._turn[topic] = turn + 1
        return (turn // 64) % count

    @property
    def is_busy(self) -> bool:
        """Whether it is better to wait for something before publishing more."""
        return self._bytes > BUFFER_BYTES_MAX // 2

    async def learn(self, topic: str) -> int:
        """How many partitions the topic has; asked once, and again after a reconnect."""
        known = self._partitions.get(topic)
        if known is not None:
            return known
        task = self._asking.get(topic)
        if task is None:
            task = self._asking[topic] = self.loop.create_task(self._ask(topic))
        return await asyncio.shield(task)

    async def _ask(self, topic: str) -> int:
        try:
            count = await self._ask_partitions(topic)
            self._partitions[topic] = count
            return count
        finally:
            self._asking.pop(topic, None)

    def _learn(self, topic: str, item: _Item) -> None:
        task = self._asking.get(topic)
        if task is None:
            task = self._asking[topic] = self.loop.create_task(self._ask(topic))

        def learned(task: asyncio.Task[int]) -> None:
            error = task.exception() if not task.cancelled() else Closed("the client is closed")
            if error is not None:
                self.finished(item)
                item.done(
                    None,
                    error if isinstance(error, HeadraceError) else HeadraceError(repr(error)),
                )
                return
            lane = self._lane(topic, self._choose(topic, item.columns, task.result()))
            lane.add(item)

        task.add_done_callback(learned)

    def _lane(self, topic: str, partition: int) -> _Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[(topic, partition)] = _Lane(self, topic, partition)
        return lane

    # --- out --------------------------------------------------------------------------------
    def finished(self, item: _Item) -> None:
        self._bytes -= item.bytes
        self._items -= 1

    def progressed(self) -> None:
        if not self._items and self._idle:
            idle, self._idle = self._idle, []
            for future in idle:
                if not future.done():
                    future.set_result(None)

    def resume(self) -> None:
        """The link is up again."""
        self._partitions.clear()
        for lane in list(self._lanes.values()):
            lane.resume()

    def _watch(self) -> None:
        if self._expiry is None:
            self._expiry = self.loop.call_later(min(self._timeout, 1.0), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self.loop.time()
        for lane in self._lanes.values():
            lane.expire(now)
        self.progressed()
        if self._items:
            self._watch()

    async def flush(self) -> None:
        """Everything published so far is stored, or has failed, when this returns."""
        for lane in self._lanes.values():
            lane.flush_now()
        if self._items:
            future: asyncio.Future[None] = self.loop.create_future()
            self._idle.append(future)
            await future

    def close(self) -> None:
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for lane in self._lanes.values():
            lane.close(OutcomeUnknown("the client was closed before the broker answered"))
        for task in list(self._asking.values()):
            task.cancel()
        self._items = 0
        self.progressed()

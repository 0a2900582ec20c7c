"""Publishing: small messages are gathered into batches, and each is stored exactly once.

Each (topic, partition) is a :class:`_PartitionLane`. Published records wait there while batches are under way, and
leave together when one more batch may be sent, when enough has gathered, or after ``linger``. So an idle
client sends at once, and a busy one sends large batches, without any tuning.

Every batch has a producer id and the number of its first record. After a reconnect the unanswered batches
are sent again, in order, with the same numbers; the broker answers a batch that it already has with the
first offset. A refusal that may pass (disk full, queue full) is tried again until the timeout. Any other
refusal fails its messages, and later messages continue under a new producer id, because the numbers of
the failed ones were never used. Messages that were gathered with one that is invalid are sent again
without it. A broker that has forgotten the producer (its topic was created again, or is in memory) gets
the batches that it certainly does not have under a new id.

The client chooses partitions by the number that the topic had when it asked, and each batch says which number
that was. When partitions are added, the broker refuses what was planned on the old number. Then nothing more of
the topic is sent until all its batches in flight are answered; the client asks again and places everything
that is not stored anew, in the order in which it was published. Without that wait, a message could overtake
the one before it of the same key, which lies in another partition now.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from headrace import limits
from headrace.client.link import Link, Wire, error_of
from headrace.client.outgoing import (
    BUFFER_BYTES_MAX,
    BundlePart,
    buffer_full,
    may_be_stored,
    not_sent,
    size_of,
)
from headrace.client.owners import Owners
from headrace.errors import Closed, HeadraceError, InvalidArgument, RequestTimeout, SequenceGap
from headrace.log.batch import encode
from headrace.log.columns import Columns, concat, pick
from headrace.model import Receipt
from headrace.partitioning import Partitioner, spread
from headrace.wire.binary import Frame, Type

logger = logging.getLogger("headrace.client")
Done = Callable[[Receipt | None, HeadraceError | None], None]
IN_FLIGHT_MAX = limits.PRODUCER_BATCHES_KEPT
RETRY_S = 0.1
ANSWER_S = 0.5  # a repetition with less time for its answer could end as an unknown outcome
PARTITIONS_CHANGED = "partitions_changed"
"""The error code of a batch that was planned on another number of partitions: nothing was stored."""


class _Item:
    """The records of one call, and whom to tell."""

    __slots__ = (
        "alone",
        "bytes",
        "columns",
        "count",
        "deadline",
        "done",
        "generation",
        "is_ours",
        "number",
        "planned_on",
    )

    def __init__(self, columns: Columns, done: Done, deadline: float, generation: int, number: int):
        self.columns = columns
        self.done = done
        self.deadline = deadline
        self.generation = generation
        self.number = number
        """In the order of the calls."""
        self.planned_on: int | None = None
        """The number of partitions among which its partition was chosen; None: the caller named it."""
        self.is_ours = False
        """The producer has chosen the partition, and may choose another one."""
        self.alone = columns.times is not None
        """Not gathered with others: it has its own times, or was in a batch that was refused."""
        self.count = len(columns.values)
        self.bytes = done.bytes if isinstance(done, BundlePart) else size_of(columns.values)

    def cut(self, indexes: Sequence[int]) -> _Item:
        """Some of the messages of a bundle."""
        assert isinstance(self.done, BundlePart)
        columns = pick(self.columns, indexes)
        done = self.done.cut(indexes, size_of(columns.values))
        part = _Item(columns, done, self.deadline, self.generation, self.number)
        part.planned_on, part.is_ours, part.alone = self.planned_on, self.is_ours, self.alone
        return part


class _Sent:
    """A batch on its way."""

    __slots__ = ("answered", "error", "items", "planned_on", "raw", "unsure")

    def __init__(self, items: list[_Item], raw: bytes):
        self.planned_on = items[0].planned_on
        self.items = items
        """Those that still wait; empty when all of them were given up."""
        self.raw = raw
        self.answered = False
        self.error: HeadraceError | None = None
        self.unsure = False
        """The connection broke before an answer came, so it may be stored."""

    def outcome(self) -> HeadraceError:
        """The error of its records when it is given up."""
        if self.unsure and isinstance(self.error, SequenceGap):
            why = "the connection broke before the answer, and the next broker has not seen this producer"
        elif self.error is None or (self.unsure and self.error.retryable):
            why = "the broker did not answer in time"
        elif self.unsure and not isinstance(self.error, InvalidArgument):
            why = f"the connection broke before the answer, and the repetition was refused ({self.error})"
        else:
            return self.error
        return may_be_stored(why)


class _PartitionLane:
    """The publishes to one partition, in order."""

    def __init__(self, producer: Producer, topic: str, partition: int):
        self._producer = producer
        self._topic, self._partition = topic, partition
        self._waiting: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._in_flight: deque[_Sent] = deque()
        self._scheduled: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._stopped = False
        """A batch failed: nothing new is sent until all batches in flight are answered."""
        self._owners, self._link = producer.owners, producer.link
        self._unanswered = 0
        self._is_broken = False
        """What is in flight has to be sent again when there is a connection."""
        self._new_identity()

    def _new_identity(self) -> None:
        self._id = random.SystemRandom().getrandbits(63) | 1
        self._sequence = 0

    # --- gathering --------------------------------------------------------------------------
    def add(self, item: _Item) -> None:
        self._waiting.append(item)
        self._waiting_bytes += item.bytes
        is_full, linger = self._waiting_bytes >= self._producer.batch_bytes, self._producer.linger
        if (
            self._scheduled is None
            and isinstance(item.done, BundlePart)
            and (is_full or not linger)
        ):
            self.send()  # a bundle is what was gathered already
        elif is_full:
            self._schedule(0.0)
        elif self._scheduled is None:
            self._schedule(linger)

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
        """Send what waits, as long as more batches may be in flight."""
        self._scheduled = None
        wire = self._wire()
        if self._producer.is_planning_again(self._topic):
            return
        while self._waiting and not self._stopped and wire is not None:
            full = self._waiting_bytes >= self._producer.batch_bytes
            if len(self._in_flight) >= (IN_FLIGHT_MAX if full else 1):
                return  # continues when an answer comes
            self._send_one(wire, self._take())

    def _wire(self) -> Wire | None:
        """The connection to the owner; None: there is none now, or what is under way has gone elsewhere."""
        link = self._owners.link(self._topic, self._partition)
        if link is not self._link:
            if self._unanswered:
                return None
            self._link = link
        return link.wire

    def _take(self) -> list[_Item]:
        items: list[_Item] = []
        size = records = 0
        while self._waiting:
            item = self._waiting[0]
            if items and (
                size + item.bytes > self._producer.batch_bytes
                or records + item.count > limits.BATCH_RECORDS_TARGET
                or item.alone
                or items[0].alone
                or item.planned_on != items[0].planned_on
            ):
                break
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
            self._producer.progressed()
            return
        batch.producer_id = self._id
        batch.first_sequence = self._sequence
        self._sequence = (self._sequence + batch.count) & 0xFFFF_FFFF
        sent = _Sent(items, batch.raw())
        self._in_flight.append(sent)
        self._put(wire, sent)
        self._producer.sent(self._topic, self._partition)

    def _put(self, wire: Wire, sent: _Sent) -> None:
        properties = {"topic": self._topic, "partition": str(self._partition)}
        if sent.planned_on is not None:
            properties["partitions"] = str(sent.planned_on)
        self._unanswered += 1
        wire.send(Type.PUBLISH_BATCH, properties, sent.raw, lambda f: self._answered(sent, f))

    # --- answers ----------------------------------------------------------------------------
    def _answered(self, sent: _Sent, frame: Frame | None) -> None:
        self._unanswered -= 1
        if frame is None:  # the connection broke; ``resume`` sends it again
            sent.unsure = self._is_broken = True
            return
        sent.answered = True
        if frame.properties.get("status") == "error":
            sent.error = self._owners.refused(self._topic, self._partition, error_of(frame))
            self._stopped = True
        else:
            self._owners.heard(self._topic, self._partition, frame.properties, self._link)
            self._stored(sent, frame)
        while self._in_flight and self._in_flight[0].answered and not self._in_flight[0].error:
            self._in_flight.popleft()
        if self._stopped:
            if all(batch.answered for batch in self._in_flight):
                self._recover()
        else:
            self.send()
        self._producer.plan_again_if_idle(self._topic)
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
        """Everything in flight is answered and a batch failed: retry, or decide about each."""
        left = [sent for sent in self._in_flight if sent.items]
        self._in_flight.clear()
        if left and left[0].error and left[0].error.retryable and self._in_time(left[0]):
            self._in_flight.extend(left)
            self._retry = self._producer.loop.call_later(RETRY_S, self.resume)
            return
        self._new_identity()
        again: list[_Item] = []
        misplaced = False
        for sent in left:
            assert sent.error is not None
            if misplaced and isinstance(sent.error, SequenceGap):
                sent.unsure = False  # the broker does not have the batch before it, so not this one
            self._refused(sent, sent.error, again)
            misplaced |= sent.error.code == PARTITIONS_CHANGED
        self._waiting.extendleft(reversed(again))
        self._waiting_bytes += sum(item.bytes for item in again)
        self._stopped = False
        self.send()

    def _refused(self, sent: _Sent, error: HeadraceError, again: list[_Item]) -> None:
        """Fail the records of a refused batch, or have them sent again under the new identity."""
        if isinstance(error, SequenceGap) and not sent.unsure:
            again += sent.items  # an earlier batch was refused, or the broker has forgotten it
        elif error.retryable and not sent.unsure and self._in_time(sent):
            again += sent.items
        elif error.code == PARTITIONS_CHANGED:
            self._fail(self._producer.plan_again(self._topic, sent.items), error)
        elif isinstance(error, InvalidArgument) and _can_be_cut(sent):
            for item in sent.items:  # one of them may be invalid, and the others valid
                item.alone = True
                again += self._producer.halves(item)
        else:
            self._producer.forget(self._topic)
            self._fail(sent.items, sent.outcome())

    def _in_time(self, sent: _Sent) -> bool:
        soon = self._producer.loop.time() + self._producer.answer_s
        return any(item.deadline > soon for item in sent.items)

    def reconnect(self) -> None:
        """A connection has come or gone."""
        if self._is_broken:
            self.resume()
        else:
            self.send()

    def resume(self) -> None:
        """Send the unanswered batches again, in order."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        wire = self._wire()
        self._is_broken = wire is None
        if wire is None:
            return
        self._stopped = False
        # A batch that was refused and given up is not sent again. A batch that may be stored is, even if
        # nobody waits for it any more: the numbers of later batches continue from its own.
        self._in_flight = deque(s for s in self._in_flight if s.items or s.unsure)
        for sent in self._in_flight:
            sent.answered, sent.error = False, None
            self._put(wire, sent)
        self.send()
        self._producer.plan_again_if_idle(self._topic)

    @property
    def is_answered(self) -> bool:
        """Nothing is in flight."""
        return not self._in_flight

    def take_back(self) -> list[_Item]:
        """The records that wait and may go to another partition."""
        ours = [item for item in self._waiting if item.is_ours]
        if ours:
            self._waiting = deque(item for item in self._waiting if not item.is_ours)
            self._waiting_bytes -= sum(item.bytes for item in ours)
        return ours

    def expire(self, now: float) -> None:
        """Give up records that have waited too long."""
        while self._waiting and self._waiting[0].deadline <= now:
            item = self._waiting.popleft()
            self._waiting_bytes -= item.bytes
            self._fail([item], RequestTimeout("the broker could not be reached in time"))
        for sent in self._in_flight:
            if sent.items and all(item.deadline <= now for item in sent.items):
                self._fail(sent.items, sent.outcome())
                sent.items = []

    def _fail(self, items: list[_Item], error: HeadraceError) -> None:
        for item in items:
            self._producer.finished(item)
            item.done(None, error)

    def close(self) -> None:
        for timer in (self._scheduled, self._retry):
            if timer is not None:
                timer.cancel()
        for sent in self._in_flight:
            self._fail(sent.items, sent.outcome())
        self._fail(list(self._waiting), not_sent())
        self._in_flight.clear()
        self._waiting.clear()


def _can_be_cut(sent: _Sent) -> bool:
    return len(sent.items) > 1 or (
        isinstance(sent.items[0].done, BundlePart) and sent.items[0].count > 1
    )


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
        self.link = link
        self.owners = Owners(link, self.reconnect)
        self._ask_partitions = partitions
        self.linger = linger
        self.batch_bytes = batch_bytes
        self._timeout, self.answer_s = timeout, min(ANSWER_S, timeout / 10)
        self._lanes: dict[tuple[str, int], _PartitionLane] = {}
        self._partitions: dict[str, int] = {}
        self._asking: dict[str, asyncio.Task[int]] = {}
        self._unplaced: dict[str, deque[_Item]] = {}
        """Records that wait until the number of partitions of their topic is known."""
        self._again: dict[str, list[_Item]] = {}
        """Topics whose partitions have changed: records that need another place, once all that is in
        flight is answered."""
        self._count = 0
        self._partitioners: dict[str, Partitioner] = {}
        self._bytes = 0
        self._generation = 0
        self._open = {0: 0}
        """Generation -> number of its unfinished records. Each flush begins a new generation."""
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False

    # --- in ---------------------------------------------------------------------------------
    def publish(
        self,
        topic: str,
        columns: Columns,
        partition: int | None,
        done: Done,
        planned_on: int | None = None,
    ) -> None:
        """Publish the records of one call to one partition. ``done`` is called when they are stored.

        ``planned_on``: the number of partitions among which :meth:`spread` has chosen the partition. If it
        has changed, the records fail with ``partitions_changed``: they may have to be spread again.
        """
        if self._closed:
            done(None, Closed("the client is closed"))
            return
        self._count += 1
        deadline = self.loop.time() + self._timeout
        item = _Item(columns, done, deadline, self._generation, self._count)
        is_admitted = isinstance(done, BundlePart)  # by ``PublishQueue``
        if self._bytes + item.bytes > BUFFER_BYTES_MAX and self._bytes and not is_admitted:
            done(None, buffer_full(self._bytes))
            return
        self._bytes += item.bytes
        self._open[item.generation] += 1
        self._watch()
        if partition is not None:
            item.planned_on = planned_on
            self._lane(topic, partition).add(item)
        elif topic in self._partitions:
            self._place(topic, item)
        else:
            self._unplaced.setdefault(topic, deque()).append(item)
            self._learning(topic)

    def _place(self, topic: str, item: _Item) -> None:
        count = item.planned_on = self._partitions[topic]
        item.is_ours = True
        keys, partitioner = item.columns.keys, self.partitioner(topic)
        keyless = partitioner.current(count)
        if not keys or count == 1:
            partitioner.add(count, item.bytes)
            self._lane(topic, keyless).add(item)
            return
        places = spread(keys, count, keyless)
        parts = [item] if len(places) == 1 else self._cut(item, [each for _, each in places])
        for (partition, _), part in zip(places, parts, strict=True):
            self._lane(topic, partition).add(part)

    def _cut(self, item: _Item, parts: Sequence[Sequence[int]]) -> list[_Item]:
        self._open[item.generation] += len(parts) - 1
        return [item.cut(indexes) for indexes in parts]

    def halves(self, item: _Item) -> list[_Item]:
        """A bundle of which one message may be invalid, in two parts."""
        half = item.count // 2
        if not half or not isinstance(item.done, BundlePart):
            return [item]
        return self._cut(item, [range(half), range(half, item.count)])

    def partitioner(self, topic: str, first: int = 0) -> Partitioner:
        """Of a topic. ``first``: where its first records without a key go."""
        found = self._partitioners.get(topic)
        if found is None:
            found = self._partitioners[topic] = Partitioner(first)
        return found

    def sent(self, topic: str, partition: int) -> None:
        """A batch has left: the next records without a key go to the next partition."""
        count = self._partitions.get(topic, 1)
        if count > 1 and self.partitioner(topic).current(count) == partition:
            self.partitioner(topic).next(count)

    async def spread(
        self, topic: str, columns: Columns, partition: int | None
    ) -> list[tuple[int | None, int | None, Columns]]:
        """(partition, planned on, its records) for each partition that the records go to.

        None as the partition leaves the choice to ``publish``: no record has a key.
        """
        if partition is not None:
            return [(partition, None, columns)]
        count = await self.learn(topic)
        if columns.keys is None:
            return [(None, None, columns)]
        if count == 1:
            return [(0, count, columns)]
        keyless = self.partitioner(topic).current(count)
        places = spread(columns.keys, count, keyless)
        return [(number, count, pick(columns, indexes)) for number, indexes in places]

    @property
    def is_busy(self) -> bool:
        """Whether a caller should wait for an answer before it publishes more."""
        return self._bytes > BUFFER_BYTES_MAX // 2

    @property
    def is_idle(self) -> bool:
        """Whether everything published so far is stored or has failed."""
        return not self._bytes

    async def learn(self, topic: str) -> int:
        """The number of partitions of the topic; asked once, and again after a reconnect."""
        known = self._partitions.get(topic)
        return await asyncio.shield(self._learning(topic)) if known is None else known

    def partitions_of(self, topic: str) -> int | None:
        """The number of partitions if it is known; any thread may ask."""
        return self._partitions.get(topic)

    def forget(self, topic: str) -> None:
        """A publish was refused for good: the topic may have changed."""
        self._partitions.pop(topic, None)

    def _learning(self, topic: str) -> asyncio.Task[int]:
        task = self._asking.get(topic)
        if task is None:
            task = self._asking[topic] = self.loop.create_task(self._learn(topic))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def _learn(self, topic: str) -> int:
        """Ask until there is an answer or nobody waits for it; then place the records, in order."""
        try:
            while True:
                try:
                    count = self._partitions[topic] = await self._ask_partitions(topic)
                    break
                except HeadraceError as error:
                    if not error.retryable or not self._unplaced.get(topic):
                        raise
                await asyncio.sleep(RETRY_S)
        except Exception as error:
            failure = error if isinstance(error, HeadraceError) else HeadraceError(repr(error))
            for item in self._unplaced.pop(topic, ()):
                self.finished(item)
                item.done(None, failure)
            self.progressed()
            raise
        finally:
            self._asking.pop(topic, None)
        if topic in self._again:  # others were published before these
            self.forget(topic)
            return count
        for item in self._unplaced.pop(topic, ()):
            self._place(topic, item)
        if self._flushes:
            self._send_now()
        return count

    # --- when partitions were added -----------------------------------------------------------
    def is_planning_again(self, topic: str) -> bool:
        """Nothing of the topic is sent until all that is in flight is answered."""
        return topic in self._again

    def plan_again(self, topic: str, items: list[_Item]) -> list[_Item]:
        """Keep refused records for another place. Returns those that are not ours to place."""
        self.forget(topic)
        self._again.setdefault(topic, []).extend(item for item in items if item.is_ours)
        return [item for item in items if not item.is_ours]

    def plan_again_if_idle(self, topic: str) -> None:
        """Place everything that is not stored anew, as soon as nothing is in flight."""
        if not self._again or topic not in self._again:
            return
        lanes = [lane for (name, _), lane in self._lanes.items() if name == topic]
        if not all(lane.is_answered for lane in lanes):
            return
        items = self._again.pop(topic)
        for lane in lanes:
            items += lane.take_back()
        items.sort(key=lambda item: item.number)
        self._unplaced.setdefault(topic, deque()).extendleft(reversed(items))
        self.forget(topic)
        if self._unplaced[topic]:
            self._learning(topic)
        for lane in lanes:
            lane.send()

    def _lane(self, topic: str, partition: int) -> _PartitionLane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[(topic, partition)] = _PartitionLane(self, topic, partition)
        return lane

    # --- out --------------------------------------------------------------------------------
    def finished(self, item: _Item) -> None:
        self._bytes -= item.bytes
        self._open[item.generation] -= 1

    def progressed(self) -> None:
        """End a flush if everything that was published before it is finished."""
        if not self._flushes:
            return
        for generation in [g for g, count in self._open.items() if not count]:
            if generation != self._generation:
                del self._open[generation]
        oldest = min(self._open)
        for generation, future in self._flushes:
            if generation < oldest and not future.done():
                future.set_result(None)
        self._flushes = [(g, future) for g, future in self._flushes if not future.done()]

    def resume(self) -> None:
        self._partitions.clear()
        self.reconnect()

    def reconnect(self) -> None:
        for lane in list(self._lanes.values()):
            lane.reconnect()

    def _watch(self) -> None:
        if self._expiry is None:
            self._expiry = self.loop.call_later(min(self._timeout, 1.0), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self.loop.time()
        for lane in self._lanes.values():
            lane.expire(now)
        for items in self._unplaced.values():
            while items and items[0].deadline <= now:
                self._give_up(items.popleft())
        for topic, again in self._again.items():
            self._again[topic] = [item for item in again if item.deadline > now]
            for item in again:
                if item.deadline <= now:
                    self._give_up(item)
        self.progressed()
        if self._bytes:
            self._watch()

    def _give_up(self, item: _Item) -> None:
        self.finished(item)
        item.done(None, RequestTimeout("the broker could not be reached in time"))

    async def flush(self) -> None:
        """Everything published so far is stored, or has failed, when this returns."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._flushes.append((self._generation, future))
        self._generation += 1
        self._open[self._generation] = 0
        self._send_now()
        self.progressed()
        await future

    def _send_now(self) -> None:
        for lane in self._lanes.values():
            lane.flush_now()

    def close(self) -> None:
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for task in list(self._asking.values()):
            task.cancel()
        for lane in self._lanes.values():
            lane.close()
        for items in (*self._unplaced.values(), *self._again.values()):
            for item in items:
                self.finished(item)
                item.done(None, not_sent())
        self._unplaced.clear()
        self._again.clear()
        self.progressed()

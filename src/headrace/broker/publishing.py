"""Publishing: from checked records to entries in partitions, and back to receipts.

Refusals come first and are definite: closed, disk full, queue full. Then the records are spread over
partitions: by key, by the producer (a repetition must find the same partition), or in turn. What goes
to several partitions is refused as a whole before any of it is stored.

A topic in memory that only followers read is a broadcast: when it is full, the oldest records make
room, and a follower that was too slow has missed them. With a subscription, or with nobody, they are
kept, and it is the publisher who waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import limits
from headrace.broker import state as entries
from headrace.broker.follower import Follower
from headrace.broker.retention import low_water
from headrace.broker.topic import Topic
from headrace.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    ReadOnly,
    StorageFull,
)
from headrace.log.batch import Batch
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import Receipt, check_subscription_name, check_topic_name

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

PublishDone = Callable[[list[Receipt], HeadraceError | None], None]
SCHEDULE_PRODUCER = 0x6865_6164_7261_6365  # "headrace"
"""The schedule publishes with this producer id, and nobody else may."""


class Once(NamedTuple):
    """The producer that a caller's idempotency key stands for: of one batch, whatever its keys."""

    id: int
    epoch: int = 0
    sequence: int = 0


class Publishing:
    def __init__(self, engine: Engine, random: Random):
        self._engine = engine
        self._random = random
        self.producers: dict[str, tuple[int, int]] = {}
        """Named idempotent producers: (id, epoch)."""

    def append(self, topic: Topic, partition: int, entry: Append) -> None:
        """Store an entry in a partition, or answer why not. The fast way in: all is checked."""
        refusal = self.refusal(topic, entry.count)
        if refusal is not None:
            topic.refused += entry.count
            entry.fail(refusal)
            return
        if self.queue_limit(topic) is not None:
            self._count(topic, entry)
        topic.published_bytes += entry.bytes
        topic.partitions[partition].log.append(entry)

    def refusal(self, topic: Topic, count: int) -> HeadraceError | None:
        """Why the topic takes no ``count`` more records now, or None."""
        engine = self._engine
        if engine.failed is not None or engine.closing:
            return engine.failed or Closed("the broker is closed")
        refusal = engine.guard.refusal() if topic.settings.durable else None
        limit = self.queue_limit(topic)
        if refusal is not None or limit is None:
            return refusal
        excess = self.backlog(topic) + topic.appending + count - limit
        if excess <= 0 or (count <= limit and self._make_room(topic, excess)):
            return None
        return QueueFull(
            f"topic {topic.name!r} holds {self.backlog(topic)} unread messages and may "
            f"hold {limit} (max_queue_size); consume some, or raise it"
        )

    def queue_limit(self, topic: Topic) -> int | None:
        limit = topic.settings.max_queue_size
        if limit is None and not topic.settings.durable:
            return limits.QUEUE_SIZE_MEMORY_DEFAULT
        return limit

    def backlog(self, topic: Topic) -> int:
        """Records that some subscription has not finished; without one, all there are."""
        total = 0
        for partition in topic.partitions:
            low = low_water(partition)
            start = partition.log.start_offset
            total += partition.log.end_offset - (start if low is None else max(low, start))
        return total

    def _make_room(self, topic: Topic, excess: int) -> bool:
        """Drop the oldest records of a broadcast; False when it is none."""
        watchers = [watcher for partition in topic.partitions for watcher in partition.watchers]
        is_broadcast = (
            not topic.settings.durable
            and all(low_water(partition) is None for partition in topic.partitions)
            and any(isinstance(watcher, Follower) for watcher in watchers)
        )
        if not is_broadcast:
            return False
        for partition in topic.partitions:
            log = partition.log
            dropped = min(excess, log.end_offset - log.start_offset)
            log.drop_before(log.start_offset + dropped)
            excess -= dropped
        return excess <= 0

    def _count(self, topic: Topic, entry: Append) -> None:
        """What is on its way into the log counts against the limit, too."""
        topic.appending += entry.count
        done = entry.done

        def finished(entry: Append) -> None:
            topic.appending -= entry.count
            done(entry)

        entry.done = finished

    def publish(
        self,
        name: str,
        columns: Columns,
        done: PublishDone,
        *,
        partition: int | None = None,
        deliver_at: int | None = None,
        producer: tuple[int, int, int] | None = None,
    ) -> None:
        """Store checked records. ``producer`` is (id, epoch, first sequence)."""
        self._engine.check_open()
        if producer is not None:
            check_producer(producer)
        if deliver_at is not None and deliver_at > self._engine.now_ms():
            if len(columns.values) != 1 or producer is not None:
                raise InvalidArgument(
                    "a delayed message is published by itself, and not by an idempotent producer",
                    code="invalid_delay",
                )
            check_topic_name(name)
            if not self._engine.auto_create_topics:
                self._engine.topics.find(name)
            if partition is not None:
                self._check_partition(name, partition)
            self._engine.schedule.add(name, columns, deliver_at, partition, done)
            return
        topic = self._topic(name, partition)
        if partition is None and producer is not None and len(topic.partitions) > 1:
            partition = _partition_of(topic, columns, producer)
        if partition is None:
            parts = topic.spread(columns)
        else:
            parts = [(topic.partition(partition).number, columns, range(len(columns.values)))]
        _Publish(self, topic, parts, done, producer).start()

    def _topic(self, name: str, partition: int | None) -> Topic:
        """The topic, made if need be; not for a partition that it would not have."""
        if partition is not None:
            self._check_partition(name, partition)
        return self._engine.topic_for_publish(name)

    def _check_partition(self, name: str, partition: int) -> None:
        topic = self._engine.topics.get(check_topic_name(name))
        if topic is not None:
            topic.partition(partition)
            return
        count = self._engine.topics.defaults.partitions
        if isinstance(partition, bool) or not isinstance(partition, int):
            raise InvalidArgument(
                f"a partition is a whole number, not {partition!r}", code="invalid_partition"
            )
        if not 0 <= partition < count:
            raise InvalidArgument(
                f"topic {name!r} would have no partition {partition}: a new one has {count}",
                code="invalid_partition",
            )

    def publish_batch(
        self,
        name: str,
        batch: Batch,
        done: PublishDone,
        *,
        partition: int | None = None,
        producer: tuple[int, int, int] | None = None,
    ) -> None:
        """Store a checked batch as it is; spread over partitions only if its keys ask for it."""
        self._engine.check_open()
        if producer is not None:
            check_producer(producer)
        topic = self._topic(name, partition)
        if partition is None and len(topic.partitions) > 1 and producer is None and batch.keys():
            self.publish(name, batch.columns(), done)
            return
        if partition is None:
            partition = producer[0] % len(topic.partitions) if producer else topic.next_partition()
        number = topic.partition(partition).number
        _Publish(self, topic, [(number, batch, range(batch.count))], done, producer).start()

    def producer(self, name: str | None, done: Callable[[int, int, Any], None]) -> None:
        """(id, epoch) for an idempotent producer. With a name, earlier holders are fenced off."""
        self._engine.check_open()
        if name is None:
            self._engine.call_soon(done, self._random.getrandbits(63) | 1, 0, None)
            return
        check_subscription_name(name)
        known = self.producers.get(name)
        producer_id = known[0] if known else self._random.getrandbits(63) | 1
        epoch = known[1] + 1 if known else 0
        entries.remember(self.producers, name, (producer_id, epoch))
        self._engine.state.write(
            entries.name_producer(name, producer_id, epoch),
            lambda error: done(producer_id, epoch, error),
        )

    def disk_is_full(self) -> None:
        self._engine.guard.hit_the_wall()


class _Publish:
    """One publish that may go to several partitions, answered when all have it."""

    __slots__ = (
        "_done",
        "_error",
        "_parts",
        "_producer",
        "_publishing",
        "_receipts",
        "_topic",
        "_waiting",
    )

    def __init__(
        self,
        publishing: Publishing,
        topic: Topic,
        parts: Sequence[tuple[int, Columns | Batch, Sequence[int]]],
        done: PublishDone,
        producer: tuple[int, int, int] | None,
    ):
        self._publishing, self._topic, self._done = publishing, topic, done
        self._parts = parts
        self._producer = producer
        self._waiting = len(parts)
        self._receipts: list[Receipt] = []
        self._error: HeadraceError | None = None

    def start(self) -> None:
        if len(self._parts) > 1 and (refusal := self._refusal()) is not None:
            self._topic.refused += sum(len(indexes) for _, _, indexes in self._parts)
            self._done([], refusal)
            return
        producer_id, epoch, sequence = self._producer or (0, 0, 0)
        for number, content, _ in self._parts:
            entry = Append(
                content if isinstance(content, Columns) else None,
                content if isinstance(content, Batch) else None,
                self._stored,
                producer_id=producer_id,
                producer_epoch=epoch,
                first_sequence=sequence,
                context=number,
            )
            self._publishing.append(self._topic, number, entry)

    def _refusal(self) -> HeadraceError | None:
        """What goes to several partitions goes to all of them or, as far as is known, to none."""
        for number, _, _ in self._parts:
            why = self._topic.partitions[number].log.read_only
            if why is not None:
                return ReadOnly(why)
        count = sum(len(indexes) for _, _, indexes in self._parts)
        return self._publishing.refusal(self._topic, count)

    def _stored(self, entry: Append) -> None:
        self._waiting -= 1
        if entry.error is not None:
            if not isinstance(self._error, OutcomeUnknown):
                self._error = entry.error
            if isinstance(entry.error, StorageFull):
                self._publishing.disk_is_full()
        else:
            number = entry.context
            assert isinstance(number, int)
            ids = entry.columns.ids if entry.columns is not None else None
            self._receipts.append(
                Receipt(
                    self._topic.name,
                    number,
                    entry.first_offset,
                    entry.timestamp,
                    entry.count,
                    entry.duplicate,
                    ids[0] if ids else None,
                )
            )
        if self._waiting == 0:
            self._done(self._receipts, self._answer())

    def _answer(self) -> HeadraceError | None:
        """A refusal is definite only if every partition refused."""
        error = self._error
        if error is None or not self._receipts or isinstance(error, OutcomeUnknown):
            return error
        stored = ", ".join(str(receipt.partition) for receipt in self._receipts)
        return OutcomeUnknown(
            f"only a part was stored, in partition {stored}; the rest was refused: {error}",
            code="partly_stored",
        )


def _partition_of(topic: Topic, columns: Columns, producer: tuple[int, int, int]) -> int:
    """Where a repetition is found again: by the producer, whose sequence is the partition's."""
    if isinstance(producer, Once) and columns.keys and len(columns.keys) == 1:
        (key,) = columns.keys
        if key is not None:
            return topic.partition_of_key(key)
    return producer[0] % len(topic.partitions)


def check_producer(producer: object) -> None:
    """(id, epoch, first sequence), as the header of a batch can hold them."""
    if (
        not isinstance(producer, tuple)
        or len(producer) != 3
        or any(isinstance(part, bool) or not isinstance(part, int) for part in producer)
        or not 1 <= producer[0] < 1 << 64
        or not 0 <= producer[1] < 1 << 32
        or not 0 <= producer[2] < 1 << 32
        or producer[0] == SCHEDULE_PRODUCER
    ):
        raise InvalidArgument(
            f"a producer is (id, epoch, first sequence), as the broker gave it out, not {producer!r}",
            code="invalid_producer",
        )


def idempotency_producer(key: object) -> Once:
    """A caller's own idempotency key as a producer of exactly one batch."""
    try:
        if not isinstance(key, str) or not key:
            raise ValueError
        digest = hashlib.sha256(key.encode()).digest()
    except ValueError:
        raise InvalidArgument(
            f"an idempotency key is a text, not {key!r}", code="invalid_idempotency_key"
        ) from None
    return Once(int.from_bytes(digest[:8], "little") | 1)


def producer_of(
    producer: tuple[int, int, int] | None, idempotency_key: object
) -> tuple[int, int, int] | None:
    """The one that was given of the two ways to be idempotent."""
    if idempotency_key is None:
        return producer
    if producer is not None:
        raise InvalidArgument("give producer or idempotency_key, not both", code="invalid_producer")
    return idempotency_producer(idempotency_key)

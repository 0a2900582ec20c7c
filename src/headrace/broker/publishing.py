"""Publishing: from checked records to entries in partitions, and back to receipts.

Refusals come first and are definite: closed, disk full, queue full. Then the records are spread over
partitions: by key, by the producer (a repetition must find the same partition), or in turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.broker import state as entries
from headrace.broker.retention import low_water
from headrace.broker.topic import Topic
from headrace.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    StorageFull,
)
from headrace.log.batch import Batch
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import Receipt, check_subscription_name, check_topic_name

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

PublishDone = Callable[[list[Receipt], HeadraceError | None], None]


class Publishing:
    def __init__(self, engine: Engine, random: Random):
        self._engine = engine
        self._random = random
        self.producers: dict[str, tuple[int, int]] = {}
        """Named idempotent producers: (id, epoch)."""

    def append(self, topic: Topic, partition: int, entry: Append) -> None:
        """Store an entry in a partition, or answer why not. The fast way in: all is checked."""
        if self._engine.failed is not None or self._engine.closing:
            entry.fail(self._engine.failed or Closed("the broker is closed"))
            return
        refusal = self._engine.guard.refusal() if topic.settings.durable else None
        if refusal is not None:
            topic.refused += entry.count
            entry.fail(refusal)
            return
        limit = self.queue_limit(topic)
        if limit is not None and not self._has_queue_room(topic, entry, limit):
            return
        topic.published_bytes += entry.bytes
        topic.partitions[partition].log.append(entry)

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

    def _has_queue_room(self, topic: Topic, entry: Append, limit: int) -> bool:
        if self.backlog(topic) + topic.appending + entry.count > limit:
            topic.refused += entry.count
            entry.fail(
                QueueFull(
                    f"topic {topic.name!r} holds {self.backlog(topic)} unread messages and may "
                    f"hold {limit} (max_queue_size); consume some, or raise it"
                )
            )
            return False
        topic.appending += entry.count
        done = entry.done

        def finished(entry: Append) -> None:
            topic.appending -= entry.count
            done(entry)

        entry.done = finished
        return True

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
        if deliver_at is not None and deliver_at > self._engine.now_ms():
            if len(columns.values) != 1 or producer is not None:
                raise InvalidArgument(
                    "a delayed message is published by itself, and not by an idempotent producer",
                    code="invalid_delay",
                )
            check_topic_name(name)
            if not self._engine.auto_create_topics:
                self._engine.topics.find(name)
            self._engine.schedule.add(name, columns, deliver_at, partition, done)
            return
        topic = self._engine.topic_for_publish(name)
        count = len(topic.partitions)
        if partition is None and producer is not None and count > 1:
            partition = producer[0] % count
        if partition is None:
            parts = topic.spread(columns)
        else:
            parts = [(topic.partition(partition).number, columns, range(len(columns.values)))]
        _Publish(self, topic, parts, done, producer).start()

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
        topic = self._engine.topic_for_publish(name)
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
        self.producers[name] = (producer_id, epoch)
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


def idempotency_producer(key: str) -> tuple[int, int, int]:
    """A caller's own idempotency key as a producer of exactly one batch."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1, 0, 0

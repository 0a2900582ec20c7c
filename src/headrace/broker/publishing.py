"""Publishing: the one door through which records enter topics, whatever protocol they came by.

::

    text, binary, HTTP, WebSocket, AsyncBroker, Broker
                     │
                     │  message() or messages() checks a user's arguments   ─▶ Publish
                     ▼
    publish(Publish, done) ──▶ due later: the schedule
                           ──▶ which partition, or which partitions
                           ──▶ append(): closed? disk full? queue full?  ─▶ the partition's log
                           ◀── done(receipts, error), once

A caller's mistake is raised before anything changes. After that ``done`` is called exactly once, on the
loop. An error is definite (nothing was stored) unless it is :class:`OutcomeUnknown`. A publish that goes
to several partitions is refused as a whole before any of it is stored.

Partitions: a publish names one; or each record goes where its key says; or an idempotent publish goes
where its producer's earlier batches are, so that a repetition is recognized, also after partitions were
added; or the batch goes to the next partition in turn (``headrace/partitioning.py``).

A client that chooses the partitions itself says on how many it has planned. If the topic has another number by
now, the publish is refused (``partitions_changed``) and the client plans again: otherwise one key would be in
two partitions, and its order would be lost. A batch that was stored before is answered as a repetition; only
the log, where the first one may still be on its way, can decide that.

Gathering: HTTP and WebSocket clients publish one message at a time, each on a connection of its own.
The plain messages that arrive for a topic in one turn of the loop become one entry in its log. A topic
with a queue limit does not gather, because it accepts or refuses each message by itself. Everything else
that is published to the topic goes after the gathered messages.

A topic in memory that only followers read is a broadcast: when it is full, the oldest records make
room, and a follower that was too slow misses them. A subscription keeps its unread records, and so does
a topic that nobody reads: there the publisher is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headrace import limits
from headrace.broker import state as entries
from headrace.broker.follower import Follower
from headrace.broker.publishers import Publisher, RecentPublishers
from headrace.broker.retention import low_water
from headrace.broker.topic import Topic
from headrace.contents import check_value
from headrace.errors import (
    Closed,
    Conflict,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    ReadOnly,
    StorageFull,
    TopicNotFound,
)
from headrace.log.batch import Batch
from headrace.log.columns import Columns, pick, record, records, time_of
from headrace.log.interface import Append
from headrace.model import (
    ProducerBatch,
    PublishManyOptions,
    PublishOptions,
    Receipt,
    check_subscription_name,
    check_topic_name,
)
from headrace.partitioning import spread

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

PublishDone = Callable[[list[Receipt], HeadraceError | None], None]
SCHEDULE_PRODUCER = 0x6865_6164_7261_6365  # "headrace"
"""The schedule publishes with this producer id, and nobody else may."""
RESERVED_PRODUCERS = 1 << 63
"""Ids from here on belong to commits of staged batches. A reader finds the id of a commit in its batches, and
could otherwise fence off all later ones with a higher epoch."""


class Once(NamedTuple):
    """The producer that stands for a caller's idempotency key: it publishes one batch."""

    id: int
    epoch: int = 0
    sequence: int = 0


def _nobody(receipts: list[Receipt], error: HeadraceError | None) -> None:
    raise AssertionError("a publish was answered before it came through the door")


@dataclass(slots=True, eq=False)
class Publish:
    """Checked records on their way into a topic. ``done`` is set at the door; it must not refer to the
    publish, because a cycle of references would keep the records long after they are stored."""

    topic: str
    records: bytes | Columns | Batch
    """One plain value may be gathered with others of this turn of the loop."""
    partition: int | None = None
    planned_on: int | None = None
    """The number of partitions among which the client has chosen ``partition``."""
    deliver_at: int | None = None
    """Milliseconds since 1970; a time that has passed means now."""
    producer: ProducerBatch | None = None
    by: Publisher | None = None
    """The client; None: the broker itself, or the program that it is embedded in."""
    done: PublishDone = _nobody

    @property
    def count(self) -> int:
        if isinstance(self.records, bytes):
            return 1
        return self.records.count if isinstance(self.records, Batch) else len(self.records.values)


class Publishing:
    def __init__(self, engine: Engine, random: Random):
        self._engine = engine
        self._random = random
        self._gathered: dict[str, tuple[Topic, list[Publish]]] = {}
        """By the topic's name: plain values of this turn of the loop."""
        self._gathered_bytes = 0
        self.producers: dict[str, tuple[int, int]] = {}
        """Named idempotent producers: (id, epoch)."""
        self.recent = RecentPublishers()

    # --- from a user's arguments --------------------------------------------------------------
    def message(
        self,
        topic: str,
        value: object,
        headers: Mapping[str, str] | None,
        options: PublishOptions,
        gather: bool = False,
    ) -> Publish:
        """One message, checked; ``gather`` if it may be stored with others of this turn."""
        bytes_max = self._engine.max_message_size
        if not options and not headers:
            if type(value) is not bytes or len(value) > bytes_max:
                value = check_value(value, bytes_max)
            return Publish(topic, value if gather else Columns([value]))
        now = self._engine.now_ms()
        columns = record(value, headers, options, bytes_max, now)
        return Publish(
            topic,
            columns,
            partition=options.get("partition"),
            deliver_at=time_of(options.get("delay"), options.get("deliver_at"), now),
            producer=producer_of(options.get("producer"), options.get("idempotency_key")),
        )

    def messages(
        self,
        topic: str,
        values: Sequence[object],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None,
        options: PublishManyOptions,
        *,
        idempotency_key: str | None = None,
    ) -> Publish:
        """Many messages, checked."""
        bytes_max, now = self._engine.max_message_size, self._engine.now_ms()
        columns = records(values, headers, options, bytes_max, now)
        return Publish(
            topic,
            columns,
            partition=options.get("partition"),
            producer=producer_of(options.get("producer"), idempotency_key),
        )

    # --- the door -----------------------------------------------------------------------------
    def publish(self, publish: Publish, done: PublishDone) -> None:
        """Store the records, or keep them until they are due."""
        publish.done = done
        if isinstance(publish.records, bytes) and publish.topic in self._gathered:
            # The topic was found in this turn of the loop, and is as open as it was then.
            self._gathered[publish.topic][1].append(publish)
            self._gathered_bytes += len(publish.records)
            if self._gathered_bytes > limits.BATCH_BYTES_TARGET:
                self.flush()
            return
        engine = self._engine
        engine.check_open()
        if publish.producer is not None:
            check_producer(publish.producer)
        if publish.deliver_at is not None and publish.deliver_at > engine.now_ms():
            self._delay(publish, publish.deliver_at)
            return
        if publish.partition is not None and publish.planned_on is None:
            self._check_partition(publish.topic, publish.partition)
        if engine.cluster is not None and engine.topics.lacks(publish.topic):
            engine.cluster.create_then(publish.topic, partial(self._created, publish))
            return
        topic = engine.topic_for_publish(publish.topic)
        if topic.name in self._gathered:
            self._append_gathered(topic.name)
        if publish.planned_on is not None and publish.planned_on != len(topic.partitions):
            self._refuse_plan(topic, publish)
            return
        if isinstance(publish.records, bytes):
            if self.queue_limit(topic) is None:
                self._begin_gathering(topic, publish)
                return
            publish.records = Columns([publish.records])
        parts = self._parts(topic, publish)
        if len(parts) > 1:
            _Spread(self, topic, publish, parts).start()
        else:
            number, records = parts[0]
            self._store(topic, number, records, [publish], publish.producer)

    def _created(self, publish: Publish, error: HeadraceError | None) -> None:
        """The cluster has the topic now."""
        try:
            if error is not None:
                raise error
            self.publish(publish, publish.done)
        except HeadraceError as refusal:
            publish.done([], refusal)

    def _delay(self, publish: Publish, deliver_at: int) -> None:
        if publish.count != 1 or publish.producer is not None:
            raise InvalidArgument(
                "a delayed message is published by itself, and not by an idempotent producer",
                code="invalid_delay",
            )
        name, partition = check_topic_name(publish.topic), publish.partition
        if not self._engine.auto_create_topics:
            self._engine.topics.find(name)
        if partition is not None:
            self._check_partition(name, partition)
        columns = publish.records
        assert isinstance(columns, Columns)
        if self._engine.cluster is not None and not self._engine.cluster.leads:
            self._engine.cluster.delay(publish, columns, deliver_at)
            return
        self._engine.schedule.add(name, columns, deliver_at, partition, publish.done)

    def _refuse_plan(self, topic: Topic, publish: Publish) -> None:
        count, records = len(topic.partitions), publish.records
        error = Conflict(
            f"topic {topic.name!r} has {count} partitions, and the publish was planned on "
            f"{publish.planned_on}; plan again",
            code="partitions_changed",
        )
        number, producer = publish.partition, publish.producer
        if producer is None or number is None or number >= count or isinstance(records, bytes):
            raise error
        context = (topic, number, [publish])
        entry = _entry(records, self._stored, producer, context)
        entry.refusal = error
        topic.partitions[number].log.append(entry)

    def _check_partition(self, name: str, partition: int) -> None:
        """Refuse a partition that the topic does not have, or would not have if it were created."""
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
                f"topic {name!r} would have no partition {partition}: a new topic has {count}",
                code="invalid_partition",
            )

    @staticmethod
    def _parts(topic: Topic, publish: Publish) -> list[tuple[int, Columns | Batch]]:
        """(partition, its records)"""
        records, count = publish.records, len(topic.partitions)
        assert not isinstance(records, bytes)
        if publish.partition is not None:
            return [(topic.partition(publish.partition).number, records)]
        if count == 1:
            return [(0, records)]
        producer = publish.producer
        keys = None
        if producer is None or (isinstance(producer, Once) and publish.count == 1):
            keys = records.keys if isinstance(records, Columns) else records.keys()
        if producer is not None:
            key = keys[0] if keys else None
            number = producer[0] % count if key is None else topic.partition_of_key(key)
            return [(topic.partition_of_producer(producer[0], number), records)]
        if isinstance(records, Batch):
            size = records.stored_bytes
        else:
            size = sum(map(len, records.values))
        keyless = topic.next_partition(0 if keys else size)
        if not keys:
            return [(keyless, records)]
        places = spread(keys, count, keyless)
        if len(places) == 1:
            return [(places[0][0], records)]
        columns = records if isinstance(records, Columns) else records.columns()
        return [(number, pick(columns, indexes)) for number, indexes in places]

    # --- gathering ----------------------------------------------------------------------------
    def _begin_gathering(self, topic: Topic, publish: Publish) -> None:
        if not self._gathered:
            self._gathered_bytes = 0
            self._engine.call_soon(self.flush)
        self._gathered[topic.name] = (topic, [publish])

    def flush(self) -> None:
        """Append what was gathered: at the end of this turn of the loop, or when the broker closes."""
        try:
            while self._gathered:
                self._append_gathered(next(iter(self._gathered)), at_once=True)
        finally:
            if self._gathered:  # an error in one concerns no other
                self._engine.call_soon(self.flush)

    def _append_gathered(self, name: str, at_once: bool = False) -> None:
        topic, publishes = self._gathered.pop(name)
        if self._engine.topics.get(name) is not topic:
            for publish in publishes:
                publish.done([], TopicNotFound(f"topic {name!r} was deleted"))
            return
        values = cast(list[bytes], [publish.records for publish in publishes])
        several = len(topic.partitions) > 1
        number = topic.next_partition(sum(map(len, values))) if several else 0
        self._store(topic, number, Columns(values), publishes, None, at_once)

    # --- storing ------------------------------------------------------------------------------
    def _store(
        self,
        topic: Topic,
        number: int,
        records: Columns | Batch,
        publishes: list[Publish],
        producer: ProducerBatch | None,
        at_once: bool = False,
    ) -> None:
        context = (topic, number, publishes)
        entry = _entry(records, self._stored, producer, context)
        entry.at_once = at_once
        budget = self._engine.budget
        if budget.used + entry.bytes > budget.limit:
            topic.refused += entry.count
            entry.fail(budget.refusal(entry.bytes))
        else:
            self.append(topic, number, entry)

    def _stored(self, entry: Append) -> None:
        topic, number, publishes = cast(tuple[Topic, int, list[Publish]], entry.context)
        if entry.error is not None:
            self._note(topic, entry.error)
            for publish in publishes:
                publish.done([], entry.error)
            return
        if len(publishes) == 1:
            (publish,) = publishes
            if publish.by is not None and not entry.duplicate:
                self.recent.note(topic, number, entry, publish.by)
            receipt = _receipt(topic.name, number, entry)
            publish.done([receipt], None)
            return
        self.recent.note_gathered(topic, number, entry, publishes)
        name, offset, timestamp = topic.name, entry.first_offset, entry.timestamp
        for publish in publishes:
            publish.done([Receipt(name, number, offset, timestamp)], None)
            offset += 1

    def _note(self, topic: Topic, error: HeadraceError) -> None:
        if isinstance(error, StorageFull) and error is not topic.refusal:
            self._engine.guard.hit_the_wall()

    def append(self, topic: Topic, partition: int, entry: Append) -> None:
        """Append an entry to a partition, or refuse it, now. The broker's own records enter here: they
        count against ``memory_limit`` but are not refused, because storing them sets memory free."""
        log = topic.partitions[partition].log
        refusal = self.refusal(topic, entry.count) if log.owned else None
        if refusal is not None:
            topic.refused += entry.count
            entry.fail(refusal)
            return
        if log.owned and self.queue_limit(topic) is not None:
            self._count(topic, entry)
        topic.published_bytes += entry.bytes
        self._engine.budget.used += entry.bytes
        entry.then, entry.done = entry.done, self._let_go
        log.append(entry)

    def _let_go(self, entry: Append) -> None:
        """The entry is answered: the log has its records, or nobody does."""
        self._engine.budget.used -= entry.bytes
        assert entry.then is not None
        entry.then(entry)

    def refusal(self, topic: Topic, count: int) -> HeadraceError | None:
        """Why the topic does not take ``count`` more records now, or None."""
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
        """Records that a subscription has not finished; without a subscription, all records."""
        total = 0
        for partition in topic.partitions:
            if not partition.log.owned:
                continue  # its owner counts them
            low = low_water(partition)
            start = partition.log.start_offset
            total += partition.log.end_offset - (start if low is None else max(low, start))
        return total

    def _make_room(self, topic: Topic, excess: int) -> bool:
        """Drop the oldest records of a broadcast; False when the topic is none."""
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
        """Records on their way into the log count against the limit, too."""
        topic.appending += entry.count
        done = entry.done

        def finished(entry: Append) -> None:
            topic.appending -= entry.count
            done(entry)

        entry.done = finished

    # --- idempotent producers -----------------------------------------------------------------
    def producer(self, name: str | None, done: Callable[[int, int, Any], None]) -> None:
        """(id, epoch) for an idempotent producer. With a name, earlier holders are fenced off."""
        self._engine.check_open()
        if name is None:
            self._engine.call_soon(done, self._random.getrandbits(63) | 1, 0, None)
            return
        check_subscription_name(name)
        if self._engine.cluster is not None:
            self._engine.cluster.name_producer(name, self._random.getrandbits(63) | 1, done)
            return
        known = self.producers.get(name)
        producer_id = known[0] if known else self._random.getrandbits(63) | 1
        epoch = known[1] + 1 if known else 0
        entries.remember(self.producers, name, (producer_id, epoch))
        self._engine.state.write(
            entries.name_producer(name, producer_id, epoch),
            lambda error: done(producer_id, epoch, error),
        )


class _Spread:
    """One publish that goes to several partitions; ``done`` is called when all have answered."""

    __slots__ = ("_error", "_parts", "_publish", "_publishing", "_receipts", "_topic", "_waiting")

    def __init__(
        self,
        publishing: Publishing,
        topic: Topic,
        publish: Publish,
        parts: list[tuple[int, Columns | Batch]],
    ):
        self._publishing, self._topic, self._publish = publishing, topic, publish
        self._parts = parts
        self._waiting = len(parts)
        self._receipts: list[Receipt] = []
        self._error: HeadraceError | None = None

    def start(self) -> None:
        entries = [
            (number, _entry(part, self._stored, self._publish.producer, number))
            for number, part in self._parts
        ]
        refusal = self._refusal(sum(entry.bytes for _, entry in entries))
        if refusal is not None:
            self._topic.refused += self._publish.count
            self._publish.done([], refusal)
            return
        for number, entry in entries:
            self._publishing.append(self._topic, number, entry)

    def _refusal(self, size: int) -> HeadraceError | None:
        """All of the partitions get their records or, as far as is known, none of them does."""
        for number, _ in self._parts:
            why = self._topic.partitions[number].log.read_only
            if why is not None:
                return ReadOnly(why)
        budget = self._publishing._engine.budget
        if budget.used + size > budget.limit:
            return budget.refusal(size)
        return self._publishing.refusal(self._topic, self._publish.count)

    def _stored(self, entry: Append) -> None:
        self._waiting -= 1
        if entry.error is not None:
            if not isinstance(self._error, OutcomeUnknown):
                self._error = entry.error
            self._publishing._note(self._topic, entry.error)
        else:
            number, by = entry.context, self._publish.by
            assert isinstance(number, int)
            if by is not None and not entry.duplicate:
                self._publishing.recent.note(self._topic, number, entry, by)
            self._receipts.append(_receipt(self._topic.name, number, entry))
        if self._waiting == 0:
            self._publish.done(self._receipts, self._answer())

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


def _entry(
    records: Columns | Batch,
    done: Callable[[Append], None],
    producer: ProducerBatch | None,
    context: object,
) -> Append:
    columns, batch = (records, None) if isinstance(records, Columns) else (None, records)
    entry = Append(columns, batch, done, context=context)
    if producer is not None:
        entry.producer_id, entry.producer_epoch, entry.first_sequence = producer
    return entry


def _receipt(topic: str, partition: int, entry: Append) -> Receipt:
    ids = entry.columns.ids if entry.columns is not None else None
    return Receipt(
        topic,
        partition,
        entry.first_offset,
        entry.timestamp,
        entry.count,
        entry.duplicate,
        ids[0] if ids else None,
    )


def check_producer(producer: object) -> None:
    """(id, epoch, first sequence), as the header of a batch can hold them."""
    if (
        not isinstance(producer, tuple)
        or len(producer) != 3
        or any(isinstance(part, bool) or not isinstance(part, int) for part in producer)
        or not 1 <= producer[0] < (1 << 64 if isinstance(producer, Once) else RESERVED_PRODUCERS)
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
            f"an idempotency key is a non-empty string, not {key!r}", code="invalid_idempotency_key"
        ) from None
    return Once(int.from_bytes(digest[:8], "little") | 1)


def producer_of(producer: ProducerBatch | None, idempotency_key: object) -> ProducerBatch | None:
    """The producer, given in one of the two ways to publish idempotently."""
    if idempotency_key is None:
        return producer
    if producer is not None:
        raise InvalidArgument("give producer or idempotency_key, not both", code="invalid_producer")
    return idempotency_producer(idempotency_key)

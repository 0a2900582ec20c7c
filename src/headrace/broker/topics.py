"""All topics of a broker: creating, changing, finding and deleting them.

``Storage`` keeps them (``log/interface.py``); here are the rules: which names and settings are
accepted, and how many partitions there may be.

A topic with thousands of partitions takes the disk a second, so ``create_later`` and ``change_later`` leave
that to a worker; a deletion takes turns of the loop (``deleting.py``). Meanwhile the topic is *changing*: nothing else changes or deletes it (``when_unchanged``),
and publishes do not create it.

What publishing and subscribing create, and the broker's own topics, exist at once: everybody finds the topic, and its
logs take entries. A worker makes its files meanwhile, and the logs store nothing before that (``Creation``)::

    publish ──▶ create ──▶ the topic, its logs held ──▶ entries wait in the logs, in order
                   │
                   └─ a worker: directories, topic.json ──▶ the logs are released, who waits is told (``when_made``)
                                                      └──▶ or: the topic is gone again, entries and who waits get
                                                           the disk's error (``deleting.abandon``)

So a second publish needs no code of its own: it finds the topic. Rejected: publishes that wait outside of the topic and begin
again when it is stored. Every protocol would need that, with its own order, and its own count of the memory that waits.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from headrace import limits
from headrace.broker.topic import Topic
from headrace.clock import Clock
from headrace.errors import (
    Conflict,
    Done,
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    QueueFull,
    TopicNotFound,
    refused_by_disk,
)
from headrace.log.batch import LOST
from headrace.log.interface import Creation, Deletion, LastStop, Log, Storage, TopicRecord
from headrace.log.witness import Ends, Witnesses
from headrace.log.workers import Workers
from headrace.model import (
    Message,
    TopicSettings,
    check_topic_name,
    is_pattern,
    parse_id,
    pattern_matches,
    split_id,
)

logger = logging.getLogger("headrace.broker")
TopicDone = Callable[[Topic | None, HeadraceError | None], None]


class Topics:
    def __init__(
        self,
        storage: Storage,
        defaults: TopicSettings,
        *,
        clock: Clock,
        random: Random,
        workers: Workers,
    ):
        self.storage = storage
        self._workers = workers
        self._changing: dict[str, list[Callable[[], None]]] = {}
        """Topics that are being created, changed or deleted -> who waits for the end of that."""
        self.defaults = defaults
        self._clock, self._random = clock, random
        self._topics: dict[str, Topic] = {}
        self._by_hash: dict[int, Topic] = {}
        self._partitions = 0
        self.file_room: Callable[[], int] = lambda: limits.PARTITIONS_TOTAL_MAX
        """How many more partitions may have an open file each; the server knows."""
        self._automatic = float(limits.PARTITIONS_AUTO_BURST)
        """Partitions that may be created automatically now."""
        self._automatic_at = 0.0
        self.owner: str | None = None
        """The principal for which topics are created at this moment (``Permissions.owning``)."""
        self.watchers: list[Callable[[], None]] = []
        """Called when a topic or a partition is created, or a topic deleted."""

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._topics.values()))

    def __len__(self) -> int:
        return len(self._topics)

    @property
    def partition_count(self) -> int:
        return self._partitions

    def get(self, name: object) -> Topic | None:
        return self._topics.get(name) if isinstance(name, str) else None

    def find(self, name: object) -> Topic:
        topic = self.get(name)
        if topic is None:
            check_topic_name(name, internal=True)
            raise TopicNotFound(f"there is no topic {name!r}; create it, or publish to it")
        return topic

    def matching(self, pattern: str) -> list[Topic]:
        """The topics that a name or a wildcard stands for."""
        if not is_pattern(pattern):
            found = self._topics.get(pattern)
            return [] if found is None else [found]
        return [t for name, t in self._topics.items() if pattern_matches(pattern, name)]

    def lacks(self, pattern: str) -> bool:
        """Whether it is a name of no topic: subscribing to it creates the topic."""
        return not is_pattern(pattern) and pattern not in self._topics

    def by_hash(self, number: int) -> Topic | None:
        return self._by_hash.get(number)

    def find_message(self, message_id: uuid.UUID | str) -> Message:
        """The record that a derived id leads to."""
        parts = split_id(parse_id(message_id))
        topic = None if parts is None else self.by_hash(parts[0])
        if parts is None or topic is None or parts[1] >= len(topic.partitions):
            raise MessageNotFound(
                f"{message_id} does not lead to a record: ids that a client gave are not indexed"
                if parts is None
                else f"there is no message {message_id}"
            )
        _, number, offset = parts
        log = topic.partitions[number].log
        if not log.start_offset <= offset < log.end_offset:
            raise MessageNotFound(f"message {message_id} is not there any more, or not yet")
        batch = log.read_cached(offset)
        if batch.flags & LOST:
            raise MessageNotFound(f"message {message_id} was lost and given up by a repair")
        return batch.message(topic.name, number, offset)

    # --- starting ---------------------------------------------------------------------------
    def load(self, witnesses: Witnesses, stop: LastStop) -> None:
        """Open every stored topic."""
        for record in self.storage.topics(self.defaults):
            logs = [
                self.storage.open(record, number, stop._replace(reached=reached))
                for number, reached in enumerate(witnesses.ends(record))
            ]
            self._register(Topic(record, logs))

    def ends(self) -> Ends:
        """Where each partition ends, of the topics that are on disk."""
        return {
            topic.name: (topic.incarnation, topic.end_offsets())
            for topic in self
            if topic.settings.durable
        }

    # --- what a cluster has decided -----------------------------------------------------------
    def adopt(self, record: TopicRecord, logs: Iterable[Log]) -> Topic:
        topic = Topic(record, logs)
        self._register(topic)
        return topic

    def grow(self, topic: Topic, settings: TopicSettings, logs: Sequence[Log]) -> None:
        """New settings, and perhaps more partitions."""
        topic.apply(settings)
        topic.add_partitions(logs)
        self._partitions += len(logs)
        if logs:
            self._changed()

    def check_new(self, name: str, settings: TopicSettings) -> None:
        """Refuse a topic that cannot be created."""
        self.check_unchanged(name)
        self._check_partitions(settings.partitions)

    # --- creating, changing, deleting ---------------------------------------------------------
    def create(
        self,
        name: str,
        settings: TopicSettings,
        abandon: Callable[[Topic, Callable[[], None]], None],
        *,
        internal: bool = False,
    ) -> Topic:
        """A topic that can be used at once. If it cannot be stored, ``abandon`` takes it away from everybody, and
        then calls back."""
        topic = self._plan(name, settings, internal=internal)
        creation = self.storage.begin(topic.record)
        topic.add_partitions(creation.logs)
        self._register(topic)
        if self.storage.durable:
            topic.making = []
            self._changing[name] = []
            made = partial(self._made, topic, creation, abandon)
            self._workers.submit(creation.store, made)
        return topic

    def _made(
        self,
        topic: Topic,
        creation: Creation,
        abandon: Callable[[Topic, Callable[[], None]], None],
        _result: object,
        error: BaseException | None,
    ) -> None:
        def end() -> None:
            waiting = self._changing.pop(topic.name)
            making, topic.making = topic.making or [], None
            if topic.refusal is None:
                creation.finish(None)
            for done in making:
                done(topic.refusal)
            if (
                topic.refusal is not None
            ):  # last: a publisher may try again at once, and create it anew
                creation.finish(topic.refusal)
            for go_on in waiting:
                go_on()

        if error is None:
            end()
        else:
            topic.refusal = self.not_stored(topic, error)
            abandon(topic, end)

    def when_made(self, topic: Topic, done: Done) -> None:
        """Call ``done`` when the topic is stored, or with the reason why it could not be."""
        if topic.making is None:
            done(topic.refusal)
        else:
            topic.making.append(done)

    def if_refused(self, name: str, act: Callable[[HeadraceError], object]) -> None:
        """Call ``act`` if the topic is being stored, and cannot be."""
        topic = self.get(name)

        def told(error: HeadraceError | None) -> None:
            if error is not None:
                act(error)

        if topic is not None and topic.making is not None:
            topic.making.append(told)

    def once_made(self, name: str, done: Done) -> Done:
        """``done``, which is called when the topic is stored, too. The first error counts."""
        topic = self.get(name)
        if topic is None or topic.making is None:
            return done
        left = 2
        first: HeadraceError | None = None

        def told(error: HeadraceError | None) -> None:
            nonlocal left, first
            left, first = left - 1, first or error
            if left == 0:
                done(first)

        topic.making.append(told)
        return told

    def create_later(self, name: str, settings: TopicSettings, done: TopicDone) -> None:
        topic = self._plan(name, settings)
        more = topic.settings.partitions
        self._partitions += more  # nobody else may take them
        self._by_hash[topic.hash] = topic

        def made(logs: list[Log] | None) -> None:
            self._partitions -= more
            del self._by_hash[topic.hash]
            if logs is not None:
                topic.add_partitions(logs)
                self._register(topic)

        self._in_worker(topic, partial(self.storage.create, topic.record), made, done)

    def _plan(self, name: str, settings: TopicSettings, *, internal: bool = False) -> Topic:
        """Check a new topic; nothing is stored yet."""
        check_topic_name(name, internal=internal)
        if name not in self._topics:
            self.check_unchanged(name)
        else:
            raise Conflict(
                f"topic {name!r} exists already, with other settings", code="topic_exists"
            )
        if settings.durable and not self.storage.durable:
            settings = settings.but({"durable": False})
        self._check_partitions(settings.partitions)
        incarnation = self._random.getrandbits(53)
        record = TopicRecord(name, settings, incarnation, self._clock.now_ms(), self.owner)
        topic = Topic(record)
        if topic.hash in self._by_hash:
            raise Conflict(
                f"topic {name!r} cannot be told from {self._by_hash[topic.hash].name!r} by its "
                "hash; choose another name",
                code="topic_exists",
            )
        return topic

    def change_later(self, topic: Topic, settings: TopicSettings, done: TopicDone) -> None:
        """Apply new settings; partitions can be added but not taken away."""
        self.check_unchanged(topic.name)
        self.check_change(topic, settings)
        before = len(topic.partitions)
        added = settings.partitions - before
        self._partitions += added

        def stored(logs: list[Log] | None) -> None:
            self._partitions -= added
            if logs is None:
                return
            topic.apply(settings)
            topic.add_partitions(logs)
            self._partitions += len(logs)
            if logs:
                self._changed()

        record = topic.record._replace(settings=settings, adopted=False)

        def store() -> list[Log]:
            logs = self.storage.add(record, range(before, settings.partitions))
            self.storage.save(record)
            return logs

        self._in_worker(topic, store, stored, done)

    def _in_worker(
        self,
        topic: Topic,
        work: Callable[[], list[Log]],
        finish: Callable[[list[Log] | None], None],
        done: TopicDone,
    ) -> None:
        """Let a worker do it, then ``finish`` with the new logs, or with None if it failed."""

        def finished(logs: list[Log] | None, error: BaseException | None) -> None:
            waiting = self._changing.pop(topic.name)
            finish(None if error is not None else logs)
            for go_on in waiting:
                go_on()
            if error is None:
                done(topic, None)
            else:
                done(None, self.not_stored(topic, error))

        self._changing[topic.name] = []
        if self.storage.durable:
            self._workers.submit(work, finished)
        else:
            finished(work(), None)

    @staticmethod
    def not_stored(topic: Topic, error: BaseException) -> HeadraceError:
        if isinstance(error, HeadraceError):
            return error
        if isinstance(error, OSError):
            return refused_by_disk(error)
        logger.error(
            "topic %s cannot be stored", topic.name, exc_info=error, extra={"topic": topic.name}
        )
        return HeadraceError("the broker has a bug here; its log says more", code="bug")

    def check_unchanged(self, name: str) -> None:
        if name in self._changing:
            raise QueueFull(
                f"topic {name!r} is being created, changed or deleted; try again in a moment",
                code="topic_changing",
            )

    def when_unchanged(self, name: str) -> Callable[[Callable[[], Any]], None] | None:
        """None, or what takes a callback that runs when the topic is no longer changing."""
        waiting = self._changing.get(name)
        return None if waiting is None else waiting.append

    def check_change(self, topic: Topic, settings: TopicSettings) -> None:
        old = topic.settings
        if settings.durable != old.durable:
            raise Conflict(
                f"topic {topic.name!r} is {'durable' if old.durable else 'in memory'} and stays so;"
                " create another topic",
                code="topic_settings_fixed",
            )
        added = settings.partitions - old.partitions
        if added < 0:
            raise Conflict(
                f"topic {topic.name!r} has {old.partitions} partitions; they cannot be taken away",
                code="topic_settings_fixed",
            )
        self._check_partitions(added)

    def begin_deletion(self, topic: Topic) -> None:
        """Remove it at once; its name stays taken until ``end_deletion``."""
        self.remove(topic)
        self._changing[topic.name] = []

    def undo_deletion(self, topic: Topic) -> None:
        """The disk has refused it: the topic is back, and nothing of it has changed."""
        self._register(topic)
        for go_on in self._changing.pop(topic.name):
            go_on()

    def remove(self, topic: Topic) -> None:
        del self._topics[topic.name]
        del self._by_hash[topic.hash]
        self._partitions -= len(topic.partitions)
        self._changed()

    def end_deletion(self, topic: Topic, deletion: Deletion, done: Callable[[], None]) -> None:
        """Close it; storage, which has agreed to the deletion, frees the space later.

        Its name is free when it is closed: a disk thread may still roll a log or remove old segments, by names that
        the next topic has, too.
        """

        def closed() -> None:
            waiting = self._changing.pop(topic.name)
            deletion.finish(done)
            for go_on in waiting:
                go_on()

        _close([partition.log for partition in topic.partitions], closed)

    def check_automatic(self, now: float) -> None:
        """Refuse a topic that is created by publishing or subscribing, if there are too many of them.

        One client could otherwise take all partitions of the broker within seconds. All clients share the
        rate: a limit for each connection would be no limit. ``now`` is monotonic.
        """
        more = self.defaults.partitions
        if self._partitions + more > limits.PARTITIONS_TOTAL_MAX - limits.PARTITIONS_RESERVED:
            raise InvalidArgument(
                f"the broker has {self._partitions} partitions; the rest, up to "
                f"{limits.PARTITIONS_TOTAL_MAX}, is for topics that are created explicitly. Create it, or "
                "delete topics that nobody needs",
                code="too_many_partitions",
            )
        refilled = (now - self._automatic_at) * limits.PARTITIONS_AUTO_RATE
        self._automatic = min(self._automatic + refilled, limits.PARTITIONS_AUTO_BURST)
        self._automatic_at = now
        if self._automatic <= 0:
            raise QueueFull(
                "too many topics are being created by publishing or subscribing to them; try again in a "
                "moment, or create the topic explicitly",
                code="creating_too_fast",
            )
        self._automatic -= more

    def _check_partitions(self, more: int) -> None:
        if self._partitions + more > limits.PARTITIONS_TOTAL_MAX:
            raise InvalidArgument(
                f"the broker has {self._partitions} partitions; {more} more would be above the "
                f"limit of {limits.PARTITIONS_TOTAL_MAX}",
                code="too_many_partitions",
            )
        if more > self.file_room():
            raise InvalidArgument(
                f"the broker has no files left for {more} more partitions (Too many open files); raise its "
                "limit (ulimit -n), or close connections",
                code="too_many_partitions",
            )

    def _register(self, topic: Topic) -> None:
        self._topics[topic.name] = topic
        self._by_hash[topic.hash] = topic
        self._partitions += len(topic.partitions)
        self._changed()

    def _changed(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    def close(self, done: Callable[[], None]) -> None:
        for waiting in self._changing.values():  # its logs have to be closed, too
            waiting.append(lambda: self.close(done))
            return
        _close([partition.log for topic in self for partition in topic.partitions], done)


def _close(logs: Iterable[Log], done: Callable[[], None]) -> None:
    """Close them all; ``done`` is called after the last one."""
    waiting = 1

    def closed() -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            done()

    for log in logs:
        waiting += 1
        log.close(closed)
    closed()

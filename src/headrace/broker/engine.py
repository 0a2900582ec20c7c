"""The broker's door: everything it can do, on one event loop.

Who owns what: ``topics`` the logs, ``state`` the journal of subscriptions, each ``Subscription`` its
members and deliveries, ``schedule`` what waits for its time, ``dead_letters`` what was given up,
``retention`` what is forgotten. The engine ties them together and is the only one that knows all.

Rules:
- Every method is called on the loop's thread. What takes time answers through ``done``, on the loop;
  what is the caller's mistake is raised at once, before anything has changed.
- One process per data directory: the lock is taken first.
- A failure that breaks a promise (a failed sync) stops the engine: all who wait are told, nothing
  more is accepted, ``on_failed`` hears of it, and the next start does not trust what was cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.access.control import AccessControl
from headrace.broker import attaching
from headrace.broker import state as entries
from headrace.broker.attaching import Beginning, attaches
from headrace.broker.attempts import first_reserve
from headrace.broker.audit import Audit
from headrace.broker.backups import Backups
from headrace.broker.cursor import Cursor
from headrace.broker.dead_letters import DeadLetters
from headrace.broker.deleting import abandon, delete_topic
from headrace.broker.delivery import Member, Sink
from headrace.broker.events import Events
from headrace.broker.follower import Follower
from headrace.broker.history import Recording
from headrace.broker.pace import Pace
from headrace.broker.pipelines import Pipelines
from headrace.broker.positions import resolve_all
from headrace.broker.publishing import Publishing
from headrace.broker.requests import Requests
from headrace.broker.restoring import definition, restored, snapshot
from headrace.broker.retention import DiskGuard, Retention
from headrace.broker.schedule import Schedule
from headrace.broker.slots import SlotStates
from headrace.broker.staging import Staging
from headrace.broker.state import Loaded, StateJournal
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition, Topic, check_offset
from headrace.broker.topics import TopicDone, Topics
from headrace.budget import Budget
from headrace.clock import Clock, Loop
from headrace.errors import (
    BrokerFailed,
    Closed,
    Conflict,
    Done,
    HeadraceError,
    InvalidArgument,
    OffsetOutOfRange,
    QueueFull,
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
    refused_by_disk,
)
from headrace.files import DiskMethod, Files
from headrace.log.directory import JOURNAL, DataDirectory
from headrace.log.interface import LastStop, Storage
from headrace.log.journal import Journal
from headrace.log.storage import DiskStorage, MemoryStorage
from headrace.log.uring import open_workers
from headrace.log.workers import SyncFailed, Workers
from headrace.model import (
    INTERNAL_PREFIX,
    SubscriptionSettings,
    TopicSettings,
    check_pattern,
    check_topic_name,
    is_pattern,
    pattern_matches,
)

if TYPE_CHECKING:
    from headrace.broker.clustering import Cluster
    from headrace.broker.overview import Connected

logger = logging.getLogger("headrace.broker")

Start = str | int


class Engine:
    def __init__(
        self,
        data_dir: Path | None,
        loop: Loop,
        *,
        topic_defaults: TopicSettings | None = None,
        auto_create_topics: bool = True,
        max_message_size: int = limits.MESSAGE_BYTES_DEFAULT,
        disk_reserve_bytes: int = limits.DISK_RESERVE_BYTES_DEFAULT,
        events_interval: float = limits.EVENTS_INTERVAL_S_DEFAULT,
        memory_limit: int | None = None,
        rewrite_segments: bool = True,
        disk: DiskMethod = "auto",
        files: Files | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
        workers: Workers | None = None,
        storage: Storage | Callable[[Engine], Storage] | None = None,
        on_failed: Callable[[HeadraceError], None] | None = None,
    ):
        self.loop = loop
        self.time, self.call_soon, self.call_later = loop.time, loop.call_soon, loop.call_later
        files = files or Files()
        self.clock = self._clock = clock or Clock()
        self.random = self._random = random or SystemRandom()
        self.workers = workers or open_workers(loop, files if data_dir else None, disk)
        self.pace = Pace(loop, self._clock)
        self.budget = Budget(memory_limit)
        self.now_ms = self._clock.now_ms
        self.auto_create_topics = auto_create_topics
        self.max_message_size = max_message_size
        self.on_failed = on_failed or (lambda error: None)
        self.failed: HeadraceError | None = None
        self.closing = False
        self.stopping = False
        """About to close: members that leave now are sent away."""
        self.directory = None if data_dir is None else DataDirectory(data_dir, files, self._clock)
        self.access = AccessControl(data_dir, loop, files=files, clock=self._clock)
        self.guard = DiskGuard(data_dir, disk_reserve_bytes, files, loop, self.workers)
        storage = storage(self) if callable(storage) else storage
        if storage is None and data_dir is not None:
            storage = DiskStorage(
                data_dir,
                files=files,
                clock=self._clock,
                loop=loop,
                random=self._random,
                workers=self.workers,
                on_failure=self.fail,
                budget=self.budget,
                rewrite_segments=rewrite_segments,
            )
        storage = storage or MemoryStorage(clock=self._clock, loop=loop, budget=self.budget)
        self.rewriter = getattr(storage, "rewriter", None)
        defaults = topic_defaults or TopicSettings()
        self.topics = Topics(
            storage, defaults, clock=self._clock, random=self._random, workers=self.workers
        )
        journal = None if data_dir is None else Journal(files, data_dir / JOURNAL, entries.MAGIC)
        self.cluster: Cluster | None = None
        """The other nodes, if the partitions are divided between several."""
        self.state: StateJournal | SlotStates = (
            SlotStates(self, storage.slot_of)
            if storage.slot_of is not None
            else StateJournal(
                journal, loop, self.workers, self.pace, partial(snapshot, self), self.fail
            )
        )
        self.retention = Retention(self.topics, self._clock, loop, self.pace)
        self.publishing = Publishing(self, self._random)
        self.append = self.publishing.append
        self.publish = self.publishing.publish
        self.schedule = Schedule(self)
        self.dead_letters = DeadLetters(self)
        self.staging = Staging(self, self._random)
        self.pipelines = Pipelines(self)
        self.events = Events(self, events_interval)
        self.audit = Audit(self)
        self.requests = Requests(self)
        self.backups = Backups(self)
        self.history = Recording(self)
        if isinstance(self.state, SlotStates):
            self.retention.may_delete = self.state.serves
        else:
            self.retention.before_run = self.staging.expire_orphans
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self.beginnings: dict[Subscription, Beginning] = {}
        self._unstored: set[tuple[str, str]] = set()
        """Their definition is on its way to the journal, or was refused by the disk."""
        self._followers: set[Follower] = set()
        self.on_attached: Callable[[Subscription], None] = lambda subscription: None
        """A subscription with members gets another topic: not all may have the right."""
        self.connections: Callable[[], Iterable[Connected]] = lambda: ()
        """Of the server, if there is one."""
        self.started_ms = self.now_ms()
        self.lost_positions = False
        """A subscription that is unknown may be one that the journal has lost."""
        self._next_number = 1
        self._lease_id = self._random.getrandbits(52)

    # --- opening and closing ------------------------------------------------------------------
    def open(self) -> None:
        """Take the directory, read what is there, be ready. Blocks for as long as that takes."""
        suspect, last = False, None
        if self.directory is not None:
            self.directory.acquire()
        try:
            self.guard.open()
            if self.directory is not None:
                suspect, last = self.directory.is_suspect, self.directory.last_run()
                self.directory.begin_run({} if last is None else last.ends)
            self.access.open()
            # Before the logs: positions are witnesses of how far these once reached.
            loaded = self.state.load(None if last is None else last.ends)
            unclean = last is None or last.may_have_failed
            self.topics.load(loaded.witnesses, LastStop(suspect, unclean))
            self._restore(loaded, clean=bool(last and last.clean))
            if isinstance(self.state, StateJournal):  # else a slot brings them (``slots.py``)
                self.staging.load(list(loaded.commits.values()))
                self.state.start()
                self.schedule.load()
                self.pipelines.load()
            if self.directory is not None and suspect:
                self.directory.clear_suspect()
        except BaseException as error:
            self.access.close()
            self.workers.close()
            self.topics.storage.close()
            if self.directory is not None:
                if isinstance(error, (OSError, SyncFailed)):  # a sync, perhaps: not to be trusted
                    self.directory.mark_suspect(str(error))
                self.directory.release()
            if isinstance(error, OSError):
                raise refused_by_disk(error) from error
            if isinstance(error, SyncFailed):
                raise StorageFailed(f"the disk failed: {error}") from error
            raise
        self.retention.start()
        self.events.start()
        self.access.listeners.append(partial(attaching.reattach, self))

    def _restore(self, loaded: Loaded, *, clean: bool) -> None:
        """Make the subscriptions of the journal stand where it says."""
        self.publishing.producers = loaded.producers
        self._next_number = loaded.next_number
        has_records = any(sum(topic.end_offsets()) for topic in self.topics)
        self.lost_positions = bool(loaded.damaged) or (loaded.missing and has_records)
        if loaded.missing and has_records:
            logger.error(
                "there are messages but no journal of subscriptions: those that were there are "
                "unknown, and begin at the earliest message when they are made again"
            )
        for subscription in restored(self, loaded, clean=clean):
            self._subscriptions[subscription.key] = subscription
            for topic in self.topics:
                if attaches(self, subscription, topic.name):
                    list(attaching.attach(self, subscription, topic, write=False))

    def close(self, done: Callable[[], None]) -> None:
        """Store what is on its way, let go of everybody, release the directory."""
        if self.closing:
            raise Closed("the broker is closing already")
        self.events.close()
        self.backups.close()
        self.access.close()
        self.audit.close()
        self.publishing.flush()
        self.closing = True
        self.retention.close()
        self.guard.close()
        self.schedule.close()
        self._let_go(Closed("the broker was closed"))

        def state_closed() -> None:
            self.workers.close()
            self.topics.storage.close()
            if self.directory is not None:
                if self.failed is None:
                    self.directory.end_run(self.topics.ends())
                self.directory.release()
            done()

        # What the logs still store (a redrive, a delayed message) may move positions: the journal is last.
        self.topics.close(lambda: self.state.close(state_closed))

    def _let_go(self, error: HeadraceError) -> None:
        self.requests.close(error)
        self.dead_letters.redrives.close(error)
        for follower in tuple(self._followers):
            follower.close(error)
        self._followers.clear()
        self.staging.close(error)
        for ring in tuple(self.topics.watchers):  # who waits for news hears why there are none
            ring()
        for subscription in self._subscriptions.values():
            subscription.close(error)

    def fail(self, error: HeadraceError) -> None:
        """A promise cannot be kept any more: stop."""
        if self.failed is not None:
            return
        self.failed = BrokerFailed(f"the broker has stopped: {error.message}")
        logger.critical("the broker stops: %s", error)
        if self.directory is not None:
            self.directory.mark_suspect(error.message)
        self.events.cancel()
        self.backups.close()
        self.access.close()
        self.retention.close()
        self.guard.close()
        self.schedule.close()
        self._let_go(self.failed)
        self.on_failed(self.failed)

    def check_open(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self.closing:
            raise Closed("the broker is closed")

    # --- topics -----------------------------------------------------------------------------
    def create_topic(
        self, name: str, settings: TopicSettings | None = None, *, internal: bool = False
    ) -> Topic:
        self.check_open()
        if self.cluster is not None:  # who needs a topic waits for it (``Cluster.create_then``)
            missing = QueueFull(
                f"topic {name!r} is being created; try again", code="topic_changing"
            )
            missing.missing_topic = name
            raise missing
        chosen = settings or self.topics.defaults
        topic = self.topics.create(name, chosen, partial(abandon, self), internal=internal)
        attaching.attach_all(self, topic, 0)
        return topic

    def create_topic_later(self, name: str, settings: TopicSettings, done: TopicDone) -> None:
        """``create_topic``, by a worker: it may have thousands of partitions."""
        self.check_open()
        attaching.check_positions(self, name, settings.partitions)
        if self.cluster is not None:
            self.cluster.create_topic(name, settings, done)
            return
        self.topics.create_later(name, settings, partial(self._topic_stored, 0, done))

    def change_topic(
        self, name: str, changes: dict[str, Any], done: TopicDone = lambda topic, error: None
    ) -> None:
        self.check_open()
        topic = self.topics.find(name)
        before, settings = len(topic.partitions), topic.settings.but(changes)
        attaching.check_positions(self, name, max(settings.partitions - before, 0))
        if self.cluster is not None:
            self.cluster.change_topic(topic, settings, done)
            return
        self.topics.change_later(topic, settings, partial(self._topic_stored, before, done))

    def _topic_stored(
        self, before: int, done: TopicDone, topic: Topic | None, error: HeadraceError | None
    ) -> None:
        if topic is not None and not self.closing and self.failed is None:
            attaching.attach_all(self, topic, before)
        done(topic, error)

    def delete_topic(self, name: str, done: Done) -> None:
        """The topic, its records and the subscriptions over it alone are gone."""
        self.check_open()
        if self.cluster is not None:
            self.cluster.delete_topic(name, done)
        else:
            delete_topic(self, name, done)

    def topic_for_publish(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None or name.startswith(INTERNAL_PREFIX):
            self.check_automatic(name)
            topic = self.audit.created(self.create_topic(name))
        return topic

    def check_automatic(self, name: str) -> None:
        """Whether a publish may create the topic."""
        check_topic_name(name)
        if not self.auto_create_topics:
            why = "topics are not made by publishing here (auto_create_topics is off)"
            raise TopicNotFound(f"there is no topic {name!r}, and {why}; create it first")
        self.topics.check_automatic(self.time())
        attaching.check_positions(self, name, self.topics.defaults.partitions)

    # --- reading ----------------------------------------------------------------------------
    def partition(self, topic: str, partition: int = 0) -> Partition:
        return self.topics.find(topic).partition(partition)

    def resolve(self, partition: Partition, where: Start, *, time_ms: int | None = None) -> int:
        """An offset for ``earliest``, ``latest``, a number or a time."""
        log = partition.log
        if time_ms is not None:
            return log.offset_at(time_ms)
        if where == "earliest":
            return log.start_offset
        if where == "latest":
            return log.end_offset
        offset = check_offset(where)
        if offset > log.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is behind the end of {partition.topic}/{partition.number}, "
                f"which is {log.end_offset}"
            )
        return max(offset, log.start_offset)

    # --- subscriptions ------------------------------------------------------------------------
    def all_subscriptions(self) -> list[Subscription]:
        return list(self._subscriptions.values())

    def subscriptions(self, topic: str | None = None) -> list[Subscription]:
        """Those that users made; over one topic (also by a wildcard) if it is named."""
        return [
            subscription
            for subscription in self._subscriptions.values()
            if not subscription.name.startswith(INTERNAL_PREFIX)
            and (topic is None or pattern_matches(subscription.pattern, topic))
        ]

    def subscription_or_none(self, name: str, pattern: str) -> Subscription | None:
        return self._subscriptions.get((pattern, name))

    def keeper(self, name: str, topic: str) -> Subscription:
        """The hidden subscription that knows which records of a topic are done, made if needed."""
        found = self._subscriptions.get((topic, name))
        return found or self.subscribe(name, topic, start="earliest", internal=True)

    def subscription(self, name: str, pattern: str | None = None) -> Subscription:
        """By name and topic, or by name alone where that is unambiguous."""
        if pattern is not None:
            found = self._subscriptions.get((pattern, name))
            matches = [] if found is None else [found]
        else:
            matches = [s for s in self.subscriptions() if s.name == name]
        if not matches:
            over = "" if pattern is None else f" over {pattern!r}"
            raise SubscriptionNotFound(f"there is no subscription {name!r}{over}; create it first")
        if len(matches) > 1:
            topics = ", ".join(sorted(s.pattern for s in matches))
            raise Conflict(
                f"there are several subscriptions {name!r}, over {topics}: name the topic too",
                code="ambiguous_subscription",
            )
        return matches[0]

    def subscribe(
        self,
        name: str,
        pattern: str,
        *,
        start: Start = "earliest",
        start_time_ms: int | None = None,
        settings: dict[str, Any] | None = None,
        done: Done = lambda error: None,
        internal: bool = False,
        owner: str | None = None,
        known: dict[Partition, int] | None = None,
    ) -> Subscription:
        """The subscription, made if it is not there. Settings that are given are applied. ``known``: see ``resolve_all``."""
        self.check_open()
        attaching.check_names(name, pattern, internal=internal)
        existing = self._subscriptions.get((pattern, name))
        if existing is not None:
            changed = existing.settings.but(settings or {})
            if changed.ordering != existing.settings.ordering and (
                existing.members or existing.leases
            ):
                raise Conflict(
                    f"the ordering of {name!r} cannot change while messages are out with members",
                    code="subscription_busy",
                )
            if changed != existing.settings:
                existing.change(changed)
                self._unstored.add(existing.key)
            done = self.topics.once_made(pattern, done)
            if existing in self.beginnings:
                self.beginnings[existing].waiting.append(done)
            elif existing.key in self._unstored:
                self.keep(existing, done)
            else:
                self.call_soon(done, None)
            return existing
        chosen = SubscriptionSettings.of(settings or {})
        if start_time_ms is None and start not in ("earliest", "latest"):
            offset = check_offset(start)
            if offset and not is_pattern(pattern):
                self.topics.find(pattern)  # one that is made now does not have that offset
        if not internal and not is_pattern(pattern):
            self.topic_for_publish(pattern)
        if self.lost_positions and start == "latest" and start_time_ms is None:
            logger.warning(
                "subscription %s begins at the earliest message: it may have been there before "
                "the journal of subscriptions was damaged",
                name,
            )
            start = "earliest"
        subscription = Subscription(
            self, self._next_number, name, pattern, chosen, self.now_ms(), owner
        )
        topics = [t for t in self.topics.matching(pattern) if attaches(self, subscription, t.name)]
        partitions = [partition for topic in topics for partition in topic.partitions]
        attaching.check_room(self._subscriptions.values(), len(partitions))
        # A bad start is refused before anything is created.
        offsets = resolve_all(self, partitions, start, time_ms=start_time_ms, known=known)
        self.next_number()
        self._subscriptions[subscription.key] = subscription
        attaching.begin(self, subscription, offsets, done)
        return subscription

    def keep(self, subscription: Subscription, done: Done = lambda error: None) -> None:
        """Write the definition. Until it is stored, who asks for the same waits for it, too."""
        self._unstored.add(subscription.key)

        def stored(error: HeadraceError | None) -> None:
            if error is None:
                self._unstored.discard(subscription.key)
            done(error)

        if self.cluster is not None and not subscription.name.startswith(INTERNAL_PREFIX):
            self.cluster.define(subscription, stored)
        else:
            self.state.write(definition(subscription), stored, at=subscription.pattern)

    def make_cursor(
        self, subscription: Subscription, partition: Partition, offset: int, *, write: bool = True
    ) -> None:
        cursor = Cursor(self.next_number(), partition, offset)
        subscription.attach(cursor)
        if write:
            incarnation = self.topics.find(partition.topic).incarnation
            if self.cluster is not None:  # each slot's journal names the subscriptions itself
                self.state.write(definition(subscription), at=partition)
            entry = entries.number_cursor(cursor, subscription.number, incarnation)
            self.state.write(entry, at=partition)
            first_reserve(subscription, cursor)
            self.changed(cursor)

    def add_subscription(
        self, name: str, pattern: str, settings: SubscriptionSettings, created_ms: int
    ) -> Subscription:
        """One that the cluster has defined; it has no cursors yet."""
        made = Subscription(self, self.next_number(), name, pattern, settings, created_ms)
        self._subscriptions[made.key] = made
        return made

    def next_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def unsubscribe(self, subscription: Subscription, done: Done) -> None:
        """Delete it, with its position."""
        self.check_open()
        if self.cluster is not None:
            self.cluster.undefine(subscription, done)
            return
        gone = SubscriptionNotFound(f"subscription {subscription.name!r} was deleted")
        self.remove(subscription, gone)
        self.state.flush(done)

    def remove(self, subscription: Subscription, error: HeadraceError) -> None:
        self.events.ended(subscription)
        del self._subscriptions[subscription.key]
        self._unstored.discard(subscription.key)
        for cursor in subscription.cursors.values():
            self.state.forget(cursor)
        partitions = [cursor.partition for cursor in subscription.cursors.values()]
        subscription.close(error)
        if self.cluster is None:
            self.state.write(entries.delete(subscription.number))
        for partition in partitions:
            self.retention.trim(partition)

    def seek(
        self,
        subscription: Subscription,
        where: Start,
        done: Done,
        *,
        time_ms: int | None = None,
        topic: str | None = None,
        partition: int | None = None,
        known: dict[Partition, int] | None = None,
    ) -> None:
        """Replay: deliver again from an offset or a time, everywhere or in one partition. ``known``: see ``resolve_all``."""
        self.check_open()
        chosen = [
            cursor
            for (name, number), cursor in subscription.cursors.items()
            if topic in (None, name) and partition in (None, number)
        ]
        if not chosen:
            raise InvalidArgument(
                f"subscription {subscription.name!r} has no such topic or partition",
                code="invalid_partition",
            )
        partitions = [cursor.partition for cursor in chosen]
        targets = resolve_all(self, partitions, where, time_ms=time_ms, known=known)

        def seek(cursor: Cursor) -> None:
            if (
                subscription.cursors.get((cursor.partition.topic, cursor.partition.number))
                is cursor
            ):
                subscription.seek(cursor, targets[cursor.partition])

        self.pace.go_through(chosen, seek, lambda: self.state.flush(done))

    def follow(
        self,
        pattern: str,
        sink: Sink,
        allowed: Callable[[str], bool] | None = None,
        *,
        places_max: int | None = None,
    ) -> Follower:
        """An ephemeral subscription: everything from now on, in topics that are ``allowed``."""
        self.check_open()
        check_pattern(pattern)
        created = self.topics.lacks(pattern)
        if not is_pattern(pattern):
            self.topic_for_publish(pattern)
        is_full = places_max is not None and places_max <= 0
        follower = Follower(self, pattern, sink, allowed or (lambda topic: True), created)
        topics = [] if is_full else self.topics.matching(pattern)
        topics = [topic for topic in topics if follower.allowed(topic.name)]
        places = sum(len(topic.partitions) for topic in topics)
        if is_full or (places_max is not None and places > places_max):
            raise QueueFull(
                f"{pattern!r} matches more partitions than the {max(places_max or 0, 0)} that this "
                "connection may still follow; name fewer topics, or use another connection",
                code="too_many_on_connection",
            )
        if is_pattern(pattern):
            self.budget.check(places * limits.FOLLOWED_PARTITION_BYTES)
        self._followers.add(follower)
        self.topics.if_refused(pattern, partial(self.unfollow, follower))
        for topic in topics:
            for partition in topic.partitions:
                follower.attach(partition, partition.log.end_offset)
        return follower

    def open_followers(self) -> tuple[Follower, ...]:
        """One that could not read on has closed itself and is forgotten here."""
        self._followers = {follower for follower in self._followers if not follower.closed}
        return tuple(self._followers)

    def unfollow(self, follower: Follower, error: HeadraceError | None = None) -> None:
        self._followers.discard(follower)
        follower.close(error)

    # --- what subscriptions need (delivery.Context) ------------------------------------------
    def next_lease_id(self) -> int:
        self._lease_id += 1
        return self._lease_id

    def changed(self, cursor: Cursor) -> None:
        if not cursor.partition.log.durable:
            self.retention.trim(cursor.partition)
        self.state.changed(cursor)

    @property
    def keeps_positions(self) -> bool:
        return self.directory is not None

    def reserve(self, cursor: Cursor, done: Done) -> None:
        self.state.write(entries.reserve(cursor), done, counts=True, at=cursor.partition)

    def flush(self, done: Done) -> None:
        self.state.flush(done, counts=True)

    def serves(self, partition: Partition) -> bool:
        """Whether the cursors of the partition are here, and not at another node."""
        return not isinstance(self.state, SlotStates) or self.state.serves(partition)

    def joined(self, subscription: Subscription, member: Member) -> None:
        if self.cluster is not None:
            self.cluster.joined(subscription, member)

    def left(self, subscription: Subscription, member: Member, *, gives_back: bool) -> None:
        if self.cluster is not None:
            self.cluster.left(subscription, member, gives_back=gives_back)

    def is_sharing(self, subscription: Subscription) -> bool:
        return self.cluster is not None and self.cluster.is_sharing(subscription)

    def dead_letter(
        self, subscription: Subscription, cursor: Cursor, offset: int, attempt: int, reason: str
    ) -> None:
        self.dead_letters.bury(subscription, cursor, offset, attempt, reason)

"""All topics of a broker: making, changing, finding and deleting them.

Making and deleting touch a handful of small files and are done at once, on the loop; both are rare.
Deleting survives a crash half-way: the directory is first moved to ``@deleted`` in one step, and
whatever lies there at the next start is removed. A disk that refuses that step leaves the topic as it
was.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from headrace import limits
from headrace.broker import topic as topic_files
from headrace.broker.topic import Topic, log_options
from headrace.clock import Clock, Loop
from headrace.errors import (
    Conflict,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    TopicNotFound,
    refused_by_disk,
)
from headrace.files import Files
from headrace.log.batch import Batch
from headrace.log.cache import BatchCache
from headrace.log.memory import MemoryLog
from headrace.log.partition import PartitionLog
from headrace.log.segment import Readers
from headrace.log.workers import Workers
from headrace.model import TopicSettings, check_topic_name

logger = logging.getLogger("headrace.broker")
DELETED = "@deleted"


class Grave(NamedTuple):
    """Where the files of a deleted topic are, and whether that is certain."""

    path: Path | None
    unsure: OutcomeUnknown | None = None


class Topics:
    def __init__(
        self,
        directory: Path | None,
        defaults: TopicSettings,
        *,
        files: Files,
        clock: Clock,
        loop: Loop,
        random: Random,
        workers: Workers,
        on_failure: Callable[[HeadraceError], None],
    ):
        self.directory = directory
        self.defaults = defaults
        self._files, self._clock, self._loop = files, clock, loop
        self._random, self._workers = random, workers
        self._on_failure = on_failure
        self.readers = Readers(files)
        self.cache = BatchCache()
        self._topics: dict[str, Topic] = {}
        self._by_hash: dict[int, Topic] = {}
        self._partitions = 0
        self.watchers: list[Callable[[], None]] = []
        """Called when a topic or a partition is made, or a topic deleted."""
        self.on_sync: Callable[[float], None] = lambda seconds: None
        self.on_commit: Callable[[float, int], None] = lambda seconds, count: None

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._topics.values()))

    def __len__(self) -> int:
        return len(self._topics)

    def get(self, name: object) -> Topic | None:
        return self._topics.get(name) if isinstance(name, str) else None

    def find(self, name: object) -> Topic:
        topic = self.get(name)
        if topic is None:
            check_topic_name(name, internal=True)
            raise TopicNotFound(f"there is no topic {name!r}; create it, or publish to it")
        return topic

    def by_hash(self, number: int) -> Topic | None:
        return self._by_hash.get(number)

    # --- starting ---------------------------------------------------------------------------
    def load(self, *, suspect: bool) -> None:
        """Open every topic of the data directory."""
        if self.directory is None:
            return
        self._empty_graves(self.directory / DELETED)
        for name in self._files.names(self.directory):
            path = self.directory / name
            if name.startswith("@") or not self._files.is_directory(path):
                continue
            try:
                check_topic_name(name, internal=True)
                topic = topic_files.load(
                    self._files, path, self.defaults, self._incarnation(), self._clock.now_ms()
                )
            except (InvalidArgument, DataCorrupt) as error:
                logger.error("%s is left alone: %s", path, error)
                continue
            for number in range(topic.settings.partitions):
                topic.add_partition(self._open_log(topic, number, suspect=suspect))
            self._register(topic)

    def _empty_graves(self, graves: Path) -> None:
        try:
            if self._files.exists(graves):
                self._files.remove_tree(graves)
        except OSError as error:  # they are in nobody's way, and the next start tries again
            logger.warning("files of deleted topics: %s", error)

    # --- making, changing, deleting -----------------------------------------------------------
    def create(self, name: str, settings: TopicSettings, *, internal: bool = False) -> Topic:
        check_topic_name(name, internal=internal)
        if name in self._topics:
            raise Conflict(
                f"topic {name!r} exists already, with other settings", code="topic_exists"
            )
        if self.directory is None and settings.durable:
            settings = settings.but({"durable": False})
        self._check_partitions(settings.partitions)
        topic = Topic(name, settings, self._incarnation(), self._clock.now_ms())
        if topic.hash in self._by_hash:
            raise Conflict(
                f"topic {name!r} cannot be told from {self._by_hash[topic.hash].name!r} by its "
                "hash; choose another name",
                code="topic_exists",
            )
        path = None if self.directory is None else self.directory / name
        is_new = path is not None and not self._files.exists(path)
        try:
            if path is not None:
                self._files.make_directory(path)
                topic_files.save(self._files, path, topic)
            for number in range(settings.partitions):
                topic.add_partition(self._open_log(topic, number))
        except OSError as error:
            if path is not None and is_new:
                with contextlib.suppress(OSError):
                    self._files.remove_tree(path)
            raise refused_by_disk(error) from error
        self._register(topic)
        return topic

    def change(self, topic: Topic, settings: TopicSettings) -> None:
        """Apply new settings; partitions can be added but not taken away."""
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
        topic.apply(settings)
        try:
            logs = [self._open_log(topic, n) for n in range(old.partitions, settings.partitions)]
            if self.directory is not None:
                topic_files.save(self._files, self.directory / topic.name, topic)
        except OSError as error:
            topic.apply(old)
            raise refused_by_disk(error) from error
        for log in logs:
            topic.add_partition(log)
        self._partitions += added
        if added:
            self._changed()

    def bury(self, topic: Topic) -> Grave:
        """The first half of ``delete``: move the files away. Refused, nothing has changed."""
        if self.directory is None:
            return Grave(None)
        graves = self.directory / DELETED
        # The name is for people, and together with the number must be a file's name.
        grave = graves / f"{topic.name[:200]}@{topic.incarnation}"
        try:
            self._files.make_directory(graves)
            self._files.rename(self.directory / topic.name, grave)
        except OSError as error:
            raise refused_by_disk(error) from error
        try:
            self._files.sync_directory(self.directory)
            self._files.sync_directory(graves)
        except OSError as error:
            return Grave(
                grave,
                OutcomeUnknown(
                    f"topic {topic.name!r} is deleted, but may be back after a crash: {error}"
                ),
            )
        return Grave(grave)

    def delete(self, topic: Topic, grave: Path | None, done: Callable[[], None]) -> None:
        """Gone at once for everybody; the files, which are in the grave, follow."""
        del self._topics[topic.name]
        del self._by_hash[topic.hash]
        self._partitions -= len(topic.partitions)
        self._changed()
        waiting = len(topic.partitions)

        def closed() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                if grave is not None:
                    self._workers.submit(lambda: self._files.remove_tree(grave), removed)
                else:
                    done()

        def removed(_result: object, error: BaseException | None) -> None:
            if error is not None:  # the next start tries again
                logger.warning("files of the deleted topic %s: %s", topic.name, error)
            done()

        for partition in topic.partitions:
            partition.log.close(closed)

    def _check_partitions(self, more: int) -> None:
        if self._partitions + more > limits.PARTITIONS_TOTAL_MAX:
            raise InvalidArgument(
                f"the broker has {self._partitions} partitions; {more} more would be above the "
                f"limit of {limits.PARTITIONS_TOTAL_MAX}",
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

    def _incarnation(self) -> int:
        return self._random.getrandbits(53)

    def _open_log(
        self, topic: Topic, number: int, *, suspect: bool = False
    ) -> PartitionLog | MemoryLog:
        if self.directory is None or not topic.settings.durable:
            memory = MemoryLog(clock=self._clock, loop=self._loop)
            memory.on_commit = lambda seconds, count: self.on_commit(seconds, count)
            return memory
        path = self.directory / topic.name / str(number)
        self._files.make_directory(path)
        log = PartitionLog(
            path,
            log_options(topic.settings),
            files=self._files,
            clock=self._clock,
            loop=self._loop,
            workers=self._workers,
            readers=self.readers,
            cache=self.cache,
            on_failure=self._on_failure,
            suspect=suspect,
        )
        log.on_sync = lambda seconds: self.on_sync(seconds)
        log.on_commit = lambda seconds, count: self.on_commit(seconds, count)
        return log

    def close(self, done: Callable[[], None]) -> None:
        logs = [partition.log for topic in self for partition in topic.partitions]
        waiting = len(logs)
        if not waiting:
            done()
            return

        def closed() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                done()

        for log in logs:
            log.close(closed)


__all__ = ["Batch", "Topics"]

"""The topics of a broker on disk or in memory: creating, listing, opening and deleting them.

On disk a topic is a directory with ``topic.json`` and one directory per partition. The directories
decide which topics exist: a topic whose ``topic.json`` is lost or damaged gets default settings without
retention, because missing metadata must never cause the loss of data. It is marked as adopted until somebody sets its
settings again, and the damaged file is kept as ``topic.json.damaged``. A topic that is not durable has its settings there and its
records in memory.

To create a topic, or to add partitions, takes a few syncs and a directory for each partition: up to seconds.
``create``, ``add`` and ``save`` may therefore run in any thread; no two of them for one topic at a time. ``begin`` is for
topics that somebody needs now: it makes the logs, which are held until the directories exist.
A deletion survives a crash: the directory is first moved to ``@deleted`` in one step, and the next
start removes everything there. If the disk refuses that step, the topic is not changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from headrace.budget import Budget
from headrace.clock import Clock, Loop
from headrace.errors import (
    Conflict,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    refused_by_disk,
)
from headrace.files import Files
from headrace.log.cache import BatchCache
from headrace.log.directory import DELETED, TOPIC_SETTINGS
from headrace.log.fetching import Fetching
from headrace.log.interface import CLEAN, Creation, Deletion, LastStop, Log, TopicRecord
from headrace.log.memory import MemoryLog
from headrace.log.partition import PartitionLog
from headrace.log.rewriting import Rewriter
from headrace.log.sealed import seal, unseal
from headrace.log.segment import Readers
from headrace.log.workers import Workers
from headrace.model import TopicSettings, check_topic_name

logger = logging.getLogger("headrace.log")
_KNOWN = set(TopicSettings.__dataclass_fields__)
_UNSEALED = frozenset(("name", "incarnation", "created_ms", "settings"))
_KEEP_ALL: dict[str, Any] = {"retention_hours": None, "retention_bytes": None}


def parse_settings(name: str, raw: bytes) -> TopicRecord:
    """A topic from its ``topic.json``; :class:`DataCorrupt` if that is damaged."""
    meta = unseal(raw, _UNSEALED)
    try:
        known = {key: value for key, value in meta["settings"].items() if key in _KNOWN}
        settings = TopicSettings.of(known)
        owner = meta.get("owner")
        if not isinstance(owner, str | None):
            raise TypeError("an owner is a name")
        incarnation, adopted = int(meta["incarnation"]), meta.get("adopted") is True
        return TopicRecord(name, settings, incarnation, meta["created_ms"], owner, adopted)
    except (AttributeError, KeyError, TypeError, ValueError, InvalidArgument) as error:
        raise DataCorrupt(f"it makes no sense: {error}") from None


def settings_content(topic: TopicRecord) -> bytes:
    """What ``topic.json`` holds."""
    more: dict[str, Any] = {} if topic.owner is None else {"owner": topic.owner}
    if topic.adopted:
        more["adopted"] = True
    return seal(
        {
            "name": topic.name,
            "incarnation": topic.incarnation,
            "created_ms": topic.created_ms,
            "settings": topic.settings.as_dict(),
            **more,
        }
    )


class MemoryStorage:
    """See :class:`headrace.log.interface.Storage`. Nothing survives the end of the process."""

    durable = False
    rewriter: Rewriter | None = None
    slot_of: Callable[[str, int], int] | None = None

    def __init__(self, *, clock: Clock, loop: Loop, budget: Budget | None = None):
        self._clock, self._loop = clock, loop
        self.budget = budget or Budget()
        self.on_sync: Callable[[float], None] = lambda seconds: None
        self.on_commit: Callable[[float, int], None] = lambda seconds, count: None

    def topics(self, defaults: TopicSettings) -> list[TopicRecord]:
        return []

    def create(self, topic: TopicRecord) -> list[Log]:
        return self.add(topic, range(topic.settings.partitions))

    def begin(self, topic: TopicRecord) -> Creation:
        return Creation(self.create(topic), lambda: None, lambda error: None)

    def add(self, topic: TopicRecord, numbers: range) -> list[Log]:
        return [self.open(topic, number) for number in numbers]

    def save(self, topic: TopicRecord) -> None:
        pass

    def open(self, topic: TopicRecord, number: int, stop: LastStop = CLEAN) -> Log:
        return self._in_memory()

    def _in_memory(self) -> MemoryLog:
        log = MemoryLog(clock=self._clock, loop=self._loop, budget=self.budget)
        log.on_commit = lambda seconds, count: self.on_commit(seconds, count)
        return log

    def delete(self, topic: TopicRecord) -> Deletion:
        return Deletion(lambda done: done())

    def close(self) -> None:
        pass


class DiskStorage(MemoryStorage):
    """See :class:`headrace.log.interface.Storage`. One directory for each topic."""

    durable = True

    def __init__(
        self,
        directory: Path,
        *,
        files: Files,
        clock: Clock,
        loop: Loop,
        random: Random,
        workers: Workers,
        on_failure: Callable[[HeadraceError], None],
        budget: Budget | None = None,
        rewrite_segments: bool = True,
    ):
        super().__init__(clock=clock, loop=loop, budget=budget)
        self.rewriter = Rewriter(loop, workers, clock, enabled=rewrite_segments)
        self._directory = directory
        self._files, self._random, self._workers = files, random, workers
        self._on_failure = on_failure
        self._readers = Readers(files)
        self._fetching = Fetching(loop, workers)
        self.cache = BatchCache(budget=self.budget)

    # --- listing ----------------------------------------------------------------------------
    def topics(self, defaults: TopicSettings) -> list[TopicRecord]:
        self._remove_deleted(self._directory / DELETED)
        # A killed broker may have made names and not synced them; from now on they are relied on.
        self._files.sync_directory(self._directory)
        found = []
        for name in self._files.names(self._directory):
            path = self._directory / name
            if name.startswith("@") or not self._files.is_directory(path):
                continue
            try:
                check_topic_name(name, internal=True)
                found.append(self._load(path, defaults))
            except (InvalidArgument, DataCorrupt) as error:
                logger.error("%s is left alone: %s", path, error)
        return found

    def _remove_deleted(self, deleted: Path) -> None:
        try:
            if self._files.exists(deleted):
                self._files.remove_tree(deleted)
        except OSError as error:  # they do no harm, and the next start tries again
            logger.warning("files of deleted topics: %s", error)

    def _load(self, path: Path, defaults: TopicSettings) -> TopicRecord:
        """The topic of a directory; if its settings cannot be read, with defaults and a warning."""
        name = path.name
        try:
            return parse_settings(name, self._files.read_file(path / TOPIC_SETTINGS))
        except FileNotFoundError:
            why = "has no topic.json"
        except DataCorrupt as error:
            why = f"has a damaged topic.json ({error})"
            aside = path / f"{TOPIC_SETTINGS}.damaged"
            self._files.replace(aside, [self._files.read_file(path / TOPIC_SETTINGS)])
        names = self._files.names(path)
        numbers = [int(n) for n in names if n.isascii() and n.isdigit() and len(n) <= 4]
        if not numbers:
            raise DataCorrupt(f"{path} {why} and no partitions: it is not a topic")
        logger.error(
            "topic %s %s; it is adopted with default settings, and keeps all messages until you set "
            "its retention again",
            name, why, extra={"topic": name},
        )  # fmt: skip
        settings = defaults.but({"partitions": max(numbers) + 1, "durable": True, **_KEEP_ALL})
        incarnation, now_ms = self._random.getrandbits(53), self._clock.now_ms()
        topic = TopicRecord(name, settings, incarnation, now_ms, adopted=True)
        self.save(topic)
        return topic

    # --- creating and changing ----------------------------------------------------------------
    def create(self, topic: TopicRecord) -> list[Log]:
        with self._new_directory(topic):
            return self.add(topic, range(topic.settings.partitions))

    def begin(self, topic: TopicRecord) -> Creation:
        numbers, durable = range(topic.settings.partitions), topic.settings.durable
        logs: list[PartitionLog | MemoryLog] = [
            self._open(topic, number, is_new=True) if durable else self._in_memory()
            for number in numbers
        ]
        for log in logs:
            log.hold()

        def store() -> None:
            path = self._directory / topic.name
            if durable and self._files.exists(path):
                self._check_empty([path / str(number) for number in numbers])
            with self._new_directory(topic):
                if durable:
                    self._files.make_directories(path, map(str, numbers))

        def finish(error: HeadraceError | None) -> None:
            for log in logs:
                if error is None:
                    log.release()
                else:
                    log.abandon(error)

        return Creation([*logs], store, finish)

    @contextlib.contextmanager
    def _new_directory(self, topic: TopicRecord) -> Iterator[None]:
        """The directory of a topic, with its settings. If what follows fails, it is removed again."""
        path = self._directory / topic.name
        is_new = not self._files.exists(path)
        try:
            self._files.make_directory(path)
            self.save(topic)
            yield
        except OSError:
            if is_new:
                with contextlib.suppress(OSError):
                    self._files.remove_tree(path)
            raise

    def _check_empty(self, paths: list[Path]) -> None:
        """Somebody may have put files there since the start; only a start adopts them."""
        for path in paths:
            if self._files.exists(path) and self._files.names(path):
                raise Conflict(
                    f"{path} has files that the broker did not write; move them away, or start the broker "
                    "again: then it opens them",
                    code="topic_exists",
                )

    def add(self, topic: TopicRecord, numbers: range) -> list[Log]:
        if not topic.settings.durable:
            return super().add(topic, numbers)
        # One sync for all, and nothing to recover in what is new.
        made = self._files.make_directories(self._directory / topic.name, map(str, numbers))
        return [self._open(topic, number, is_new=str(number) in made) for number in numbers]

    def save(self, topic: TopicRecord) -> None:
        content = settings_content(topic)
        self._files.replace(self._directory / topic.name / TOPIC_SETTINGS, [content])

    def open(self, topic: TopicRecord, number: int, stop: LastStop = CLEAN) -> Log:
        if stop.unclean and number == 0:  # the names of topic.json and of the partitions, likewise
            self._files.sync_directory(self._directory / topic.name)
        if not topic.settings.durable:
            return super().open(topic, number)
        self._files.make_directory(self._directory / topic.name / str(number))
        return self._open(topic, number, stop=stop)

    def _open(self, topic: TopicRecord, number: int, **how: Any) -> PartitionLog:
        log = PartitionLog(
            self._directory / topic.name / str(number),
            topic.settings,
            files=self._files,
            clock=self._clock,
            loop=self._loop,
            workers=self._workers,
            readers=self._readers,
            cache=self.cache,
            fetching=self._fetching,
            on_failure=self._on_failure,
            rewriter=self.rewriter,
            **how,
        )
        log.on_sync = lambda seconds: self.on_sync(seconds)
        log.on_commit = lambda seconds, count: self.on_commit(seconds, count)
        return log

    # --- deleting ---------------------------------------------------------------------------
    def delete(self, topic: TopicRecord) -> Deletion:
        deleted = self._directory / DELETED
        # The name is for people; name and number together must be a valid file name.
        grave = deleted / f"{topic.name[:200]}@{topic.incarnation}"
        try:
            self._files.make_directory(deleted)
            self._files.rename(self._directory / topic.name, grave)
        except OSError as error:
            raise refused_by_disk(error) from error
        unsure = None
        try:
            self._files.sync_directory(self._directory)
            self._files.sync_directory(deleted)
        except OSError as error:
            unsure = OutcomeUnknown(
                f"topic {topic.name!r} is deleted, but may be back after a crash: {error}"
            )

        def finish(done: Callable[[], None]) -> None:
            def removed(_result: object, error: BaseException | None) -> None:
                if error is not None:  # the next start tries again
                    logger.warning(
                        "files of the deleted topic %s: %s",
                        topic.name,
                        error,
                        extra={"topic": topic.name},
                    )
                done()

            self._workers.submit(lambda: self._files.remove_tree(grave), removed)

        return Deletion(finish, unsure)

"""A topic: its settings and its partitions.

On disk a topic is a directory with ``topic.json`` and one directory per partition. The directories
are the truth: a topic whose ``topic.json`` is lost is adopted with default settings, because data is
never given up for want of metadata.

``incarnation`` tells a topic from an earlier one of the same name, so that a subscription's position
in the deleted one is not mistaken for a position in the new.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import orjson

from headrace.errors import DataCorrupt, InvalidArgument
from headrace.files import Files
from headrace.log.interface import Log
from headrace.log.memory import MemoryLog
from headrace.log.partition import LogOptions, PartitionLog
from headrace.model import TopicSettings, topic_hash
from headrace.partitioning import Partitioner, partition_of_key

logger = logging.getLogger("headrace.broker")
META_NAME = "topic.json"


PUMPED_AT_ONCE_MAX = 4
"""So many get a new record in the turn of the loop that stored it; more would hold up the answer to
whoever published it, so then all of them are woken for the next turn."""


class Watcher(Protocol):
    """A subscription or a follower."""

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None: ...


class Partition:
    """One partition with those who wait for its next record."""

    __slots__ = ("consumed", "first_end", "log", "message_ttl_ms", "number", "topic", "watchers")

    def __init__(self, topic: str, number: int, log: PartitionLog | MemoryLog):
        self.topic = topic
        self.number = number
        self.log = log
        self.message_ttl_ms: int | None = None
        self.watchers: list[Watcher] = []
        self.first_end = log.end_offset
        """Where the log ended when it was opened: what is beyond was published since."""
        self.consumed = 0
        """Messages acknowledged or followed since then, all subscriptions together."""
        log.on_advance = self._advanced

    def _advanced(self) -> None:
        watchers = self.watchers
        at_once = len(watchers) <= PUMPED_AT_ONCE_MAX
        for watcher in tuple(watchers):
            watcher.on_advance(self.topic, self.number, at_once)


class Topic:
    def __init__(self, name: str, settings: TopicSettings, incarnation: int, created_ms: int):
        self.name = name
        self.hash = topic_hash(name)
        self.settings = settings
        self.incarnation = incarnation
        self.created_ms = created_ms
        self.partitions: list[Partition] = []
        self.published = 0
        self.published_bytes = 0
        self.refused = 0
        self.appending = 0
        """Records on their way into the log; they count against ``max_queue_size``."""
        self._partitioner = Partitioner()

    def add_partition(self, log: PartitionLog | MemoryLog) -> Partition:
        partition = Partition(self.name, len(self.partitions), log)
        partition.message_ttl_ms = self.settings.message_ttl_ms
        self.partitions.append(partition)
        return partition

    def apply(self, settings: TopicSettings) -> None:
        self.settings = settings
        for partition in self.partitions:
            partition.message_ttl_ms = settings.message_ttl_ms
            if isinstance(partition.log, PartitionLog):
                partition.log.options = log_options(settings)

    def partition(self, number: int) -> Partition:
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgument(
                f"a partition is a whole number, not {number!r}", code="invalid_partition"
            )
        if not 0 <= number < len(self.partitions):
            raise InvalidArgument(
                f"topic {self.name!r} has no partition {number}: it has 0 to "
                f"{len(self.partitions) - 1}",
                code="invalid_partition",
            )
        return self.partitions[number]

    # --- where a record goes ----------------------------------------------------------------
    def partition_of_key(self, key: bytes) -> int:
        return partition_of_key(key, len(self.partitions))

    def next_partition(self) -> int:
        """For a batch without keys: the next partition in turn."""
        return self._partitioner.next(len(self.partitions))

    # --- asking -----------------------------------------------------------------------------
    def end_offsets(self) -> list[int]:
        return [partition.log.end_offset for partition in self.partitions]

    def published_total(self) -> int:
        return sum(p.log.end_offset - p.first_end for p in self.partitions)

    def consumed_total(self) -> int:
        return sum(partition.consumed for partition in self.partitions)

    def size_bytes(self) -> int:
        return sum(partition.log.size_bytes() for partition in self.partitions)

    def as_json(self) -> bytes:
        return orjson.dumps(
            {
                "name": self.name,
                "incarnation": self.incarnation,
                "created_ms": self.created_ms,
                "settings": self.settings.as_dict(),
            },
            option=orjson.OPT_INDENT_2,
        )


def log_options(settings: TopicSettings) -> LogOptions:
    return LogOptions(
        durability=settings.durability,
        sync_interval_ms=settings.sync_interval_ms,
        compression=settings.compression,
        segment_bytes=settings.segment_bytes,
        segment_hours=settings.segment_hours,
    )


def save(files: Files, directory: Path, topic: Topic) -> None:
    files.replace(directory / META_NAME, [topic.as_json()])


def load(
    files: Files, directory: Path, defaults: TopicSettings, incarnation: int, now_ms: int
) -> Topic:
    """The topic as its directory says; with defaults and a warning where it does not."""
    name = directory.name
    try:
        meta = orjson.loads(files.read_file(directory / META_NAME))
        known = {key: value for key, value in meta["settings"].items() if key in _KNOWN}
        return Topic(name, TopicSettings.of(known), int(meta["incarnation"]), meta["created_ms"])
    except FileNotFoundError:
        why = "has no topic.json"
    except (AttributeError, KeyError, TypeError, ValueError, InvalidArgument) as error:
        why = f"has a damaged topic.json ({error})"
    names = files.names(directory)
    numbers = [int(name) for name in names if name.isascii() and name.isdigit() and len(name) <= 4]
    if not numbers:
        raise DataCorrupt(f"{directory} {why} and no partitions: it is not a topic")
    logger.error("topic %s %s; it is adopted with default settings", name, why)
    settings = defaults.but({"partitions": max(numbers) + 1, "durable": True})
    topic = Topic(name, settings, incarnation, now_ms)
    save(files, directory, topic)
    return topic


_KNOWN = set(TopicSettings.__dataclass_fields__)

__all__ = ["Log", "Partition", "Topic", "Watcher", "load", "log_options", "save"]

"""A whole broker into a cluster: from the directory of a stopped broker, or from a generation of a backup.

Three steps, over a :class:`Destination`, so that nothing here knows how a cluster stores things::

    copy      log.append(copied=True)                     every batch at its own offset, byte for byte
    verify    the cluster is opened anew and read back    counts and checksums of each partition (digest.py)
    finish    subscriptions, positions, named producers and commits of staged batches, as the source's journal has them

From the first step to the last, the cluster is marked: no node starts on it, and an import into it continues: a partition goes on where
it ends. So the cluster is whole or refused, and an import that was killed is repeated with the same command. A cluster without
the mark must be new.

A partition whose first messages were deleted begins with *lost* batches up to its first offset, which are then dropped as retention
does it. These batches carry the table of the partition's idempotent producers, so that a repetition is still recognized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.backup.sources import BackupSource, PointInTime, SourceTopic, lost_batches
from headrace.broker.state import MAGIC, Loaded
from headrace.errors import Conflict, DataCorrupt
from headrace.log.batch import Batch
from headrace.log.interface import Append, Log, TopicRecord, completed
from headrace.log.producers import Producers
from headrace.moving.digest import MessageDigest

Opened = dict[str, tuple[TopicRecord, list[Log]]]
"""Name -> a topic, and its partitions."""
Progress = Callable[[str, int, int], None]
"""Told what is done now, and how many messages of how many."""
DROP_S = 30.0
LOOK_AGAIN_S = 0.01


class Destination(Protocol):
    """A cluster that is being filled."""

    async def open(self) -> Opened:
        """Mark a new cluster, or open what an earlier import into it has brought; nobody else may write to it."""

    async def create(self, topic: TopicRecord) -> list[Log]:
        """An empty topic, with its incarnation."""

    async def finish(self, loaded: Loaded, *, clean: bool) -> None:
        """Store what is not messages, and remove the mark. ``clean``: the source was stopped in good order."""

    async def close(self) -> None:
        """Let go of the cluster. The logs are closed."""


MakeDestination = Callable[[], Destination]


@dataclass
class Imported:
    """What an import has brought."""

    topics: int
    partitions: int
    messages: int
    bytes: int = 0
    subscriptions: int = 0
    producers: int = 0
    continued: int = 0
    """Messages that an earlier run had copied."""
    damaged: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(topic, partition, first, end) that the source could not read."""


async def import_broker(
    source: BackupSource,
    make: MakeDestination,
    *,
    progress: Progress = lambda what, done, total: None,
) -> Imported:
    point = source.begin()
    try:
        return await _BrokerImport(source, point, make, progress).run()
    finally:
        source.end()


class _BrokerImport:
    def __init__(
        self,
        source: BackupSource,
        point: PointInTime,
        make: MakeDestination,
        progress: Progress,
    ):
        self._source, self._point, self._make = source, point, make
        self._progress = progress
        self._topics = point.topics
        self._total = sum(end - start for topic in self._topics for start, end in topic.extents)
        self._digests: dict[tuple[str, int], MessageDigest] = {}
        self.done = Imported(
            len(self._topics), sum(len(topic.extents) for topic in self._topics), self._total
        )

    async def run(self) -> Imported:
        loaded = self._loaded()

        async def verify_and_finish(destination: Destination, opened: Opened) -> None:
            await self._verify(opened)
            self._progress("subscriptions", self._total, self._total)
            await destination.finish(loaded, clean=self._point.clean)

        await self._over_cluster(self._copy)
        await self._over_cluster(verify_and_finish)
        return self.done

    async def _over_cluster(self, work: Callable[[Destination, Opened], Awaitable[None]]) -> None:
        """Open every partition of the cluster, work, and close them."""
        destination = self._make()
        try:
            opened = await destination.open()
            await work(destination, opened)
            for _, logs in opened.values():
                for log in logs:
                    await _called(log.close)
        finally:
            await destination.close()

    # --- copying ------------------------------------------------------------------------------
    async def _copy(self, destination: Destination, opened: Opened) -> None:
        done = 0
        for topic in self._topics:
            record = topic.record
            known = opened.get(record.name)
            if known is not None and known[0].incarnation != record.incarnation:
                raise Conflict(
                    f"an unfinished import has another topic {record.name}: it was of another broker. Continue that "
                    "one, or import into a new cluster (another --cluster)",
                    code="cluster_not_empty",
                )
            if known is None:
                known = opened[record.name] = record, await destination.create(record)
            for number, (start, end) in enumerate(topic.extents):
                log = known[1][number]
                self.done.continued += max(log.end_offset - start, 0)
                await self._copy_partition(topic, number, start, end, log, done)
                done += end - start

    async def _copy_partition(
        self, topic: SourceTopic, number: int, start: int, end: int, log: Log, done: int
    ) -> None:
        digest = self._digests[topic.record.name, number] = MessageDigest()
        waiting: list[asyncio.Future[None]] = []
        for batches in self._source.read(topic.record, number, start, end):
            first = batches[0].base_offset
            if log.end_offset < first and not digest.records:
                await self._fill(topic.record, number, log, first)
            for batch in batches:
                digest.add(batch, max(start - batch.base_offset, 0))
            new = [batch for batch in batches if batch.base_offset >= log.end_offset]
            for each in waiting:
                await each
            waiting = [_append(log, batch) for batch in new]
            self.done.bytes += sum(batch.stored_bytes for batch in new)
            self._progress("copying", done + batches[-1].end_offset - start, self._total)
        for each in waiting:
            await each
        if not digest.records and end:  # there are only offsets
            await self._fill(topic.record, number, log, end)
        for first, last in self._source.damaged:
            self.done.damaged.append((topic.record.name, number, first, last))

    async def _fill(self, record: TopicRecord, number: int, log: Log, first: int) -> None:
        """Let the partition begin at an offset."""
        rows = [row for row in self._source.producers(record, number).rows() if row[-1] < first]
        for batch in lost_batches(0, first, 0):
            table = Producers()
            for row in rows:
                if batch.base_offset <= row[-1] and row[-1] + row[-2] <= batch.end_offset:
                    table.add(*row)
            batch.origins = table.origins(batch.base_offset)
            if batch.base_offset >= log.end_offset:
                await _append(log, batch)
        deadline = asyncio.get_running_loop().time() + DROP_S
        while not any(each.end_offset == first for each in log.closed_segments()):
            log.roll_soon(0)
            if asyncio.get_running_loop().time() > deadline:
                raise DataCorrupt(f"{record.name}/{number} cannot begin at offset {first}")
            await asyncio.sleep(LOOK_AGAIN_S)
        log.drop_before(first)

    # --- verifying ----------------------------------------------------------------------------
    async def _verify(self, opened: Opened) -> None:
        done = 0
        for topic in self._topics:
            record = topic.record
            for number, (start, end) in enumerate(topic.extents):
                log = opened[record.name][1][number]
                found = MessageDigest()
                if (log.start_offset, log.end_offset) != (start, end) and start < end:
                    raise _differs(record.name, number, f"it has {log.start_offset} to {log.end_offset - 1}, not {start} to {end - 1}")  # fmt: skip
                at = start
                while at < end:
                    for batch in await completed(lambda log=log, at=at: log.read(at)):  # type: ignore[misc]
                        found.add(batch, max(at - batch.base_offset, 0))
                        at = batch.end_offset
                    self._progress("verifying", done + at - start, self._total)
                wanted = self._digests[record.name, number]
                if found != wanted:
                    raise _differs(
                        record.name,
                        number,
                        f"{found.records} messages with checksum {found.checksum:08x}, not {wanted.records} with "
                        f"{wanted.checksum:08x}",
                    )
                done += end - start

    # --- subscriptions ------------------------------------------------------------------------
    def _loaded(self) -> Loaded:
        loaded = Loaded()
        for entry in self._point.journal:
            if entry != MAGIC:
                try:
                    loaded.add(entry)
                except (KeyError, ValueError):
                    loaded.damaged += 1
        in_memory = {topic.record.name for topic in self._topics if not topic.extents}
        for number, item in list(loaded.cursors.items()):
            if item["topic"] in in_memory:  # it comes without messages
                del loaded.cursors[number]
        self.done.subscriptions = sum(
            not item["name"].startswith("__") for item in loaded.subscriptions.values()
        )
        self.done.producers = len(loaded.producers)
        return loaded


def _differs(topic: str, number: int, how: str) -> DataCorrupt:
    return DataCorrupt(
        f"{topic}/{number} is not the same in the cluster: {how}. The cluster is not usable; delete it, and import again",
        code="import_differs",
    )


def _append(log: Log, batch: Batch) -> asyncio.Future[None]:
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(entry: Append) -> None:
        if not stored.done():
            if entry.error is not None:
                stored.set_exception(entry.error)
            else:
                stored.set_result(None)

    log.append(Append(None, batch, done, copied=True))
    return stored


async def _called(work: Callable[[Callable[[], None]], None]) -> None:
    """Until ``work`` calls back."""
    finished = asyncio.Event()
    work(finished.set)
    await finished.wait()

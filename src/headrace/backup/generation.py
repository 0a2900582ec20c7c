"""A generation of a backup as a source: what it holds can be copied elsewhere without restoring it first."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.backup.manifest import (
    ACCESS,
    JOURNAL,
    READ_BYTES,
    BackupDirectory,
    KeptPartition,
    KeptTopic,
    Manifest,
)
from headrace.backup.sources import PointInTime, SourceTopic, lost_batches
from headrace.errors import DataCorrupt
from headrace.log.batch import Batch, parse
from headrace.log.interface import TopicRecord
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.segment import Damage, scan


class GenerationSource:
    """See :class:`~headrace.backup.sources.BackupSource`."""

    def __init__(self, directory: BackupDirectory, generation: int | None = None):
        self.name = str(directory.path.absolute())
        self.damaged: list[tuple[int, int]] = []
        self._directory, self._generation = directory, generation
        self._lock = directory.locked()
        self._kept: dict[str, KeptTopic] = {}

    def begin(self) -> PointInTime:
        directory = self._directory
        directory.check()
        self._lock.__enter__()
        manifest: Manifest = directory.load(self._generation)
        folder = directory.folder(manifest.generation)
        journal: list[bytes] = []
        if manifest.journal is not None:
            journal = entries_in(directory.read(folder / JOURNAL, manifest.journal))[0]
        access = None
        if manifest.access is not None:
            access = directory.read(folder / ACCESS, manifest.access)
        self._kept = {topic.topic: topic for topic in manifest.topics}
        topics = [
            SourceTopic(topic.record(), [(kept.start, kept.end) for kept in topic.partitions])
            for topic in manifest.topics
        ]
        return PointInTime(manifest.time, topics, journal, access, manifest.clean)

    def _partition(self, topic: TopicRecord, number: int) -> KeptPartition:
        return self._kept[topic.name].partitions[number]

    def read(
        self, topic: TopicRecord, partition: int, start: int, end: int
    ) -> Iterator[list[Batch]]:
        self.damaged = []
        files, at, time = self._directory.files, start, 0
        home = self._directory.partition(self._kept[topic.name], partition)
        for kept in self._partition(topic, partition).files:
            if kept.end <= at or kept.base >= end:
                continue
            handle = files.open(home / kept.name)
            try:
                some: list[Batch] = []
                size = 0
                for part in scan(files, handle, kept.bytes, base_offset=kept.base):
                    if isinstance(part, Damage) or part.batch.end_offset <= at:
                        continue
                    if part.batch.base_offset > at:
                        some += self._lost(at, part.batch.base_offset, time)
                    whole = parse(files.read_at(handle, part.position, part.size))
                    if whole is None:
                        raise DataCorrupt(f"{home / kept.name} does not read the same twice")
                    some.append(whole)
                    at, time = whole.end_offset, whole.max_timestamp
                    size += part.size
                    if size >= READ_BYTES:
                        yield some
                        some, size = [], 0
                if at < kept.end:
                    some += self._lost(at, kept.end, time)
                    at = kept.end
                if some:
                    yield some
            finally:
                handle.close()

    def _lost(self, first: int, end: int, time: int) -> list[Batch]:
        self.damaged.append((first, end))
        return lost_batches(first, end, time)

    def batch_at(self, topic: TopicRecord, partition: int, offset: int) -> Batch | None:
        for found in self.read(topic, partition, offset, offset + 1):
            return found[0]
        return None

    def producers(self, topic: TopicRecord, partition: int) -> Producers:
        kept = self._partition(topic, partition).producers
        if kept is None:
            return Producers()
        home = self._directory.partition(self._kept[topic.name], partition)
        return Producers.load(self._directory.read(home / kept.name, kept)) or Producers()

    def renew(self) -> None:
        pass

    def end(self) -> None:
        if self._kept:
            self._kept = {}
            self._lock.__exit__(None, None, None)

"""A generation of a backup as a source: what it holds can be copied elsewhere without restoring it first."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.backup.manifest import (
    ACCESS,
    JOURNAL,
    BackupDirectory,
    KeptPartition,
    KeptTopic,
    Manifest,
)
from headrace.backup.sources import FileSource, PointInTime, SourceTopic
from headrace.log.batch import Batch
from headrace.log.interface import TopicRecord
from headrace.log.journal import entries_in
from headrace.log.producers import Producers


class GenerationSource(FileSource):
    """See :class:`~headrace.backup.sources.BackupSource`."""

    def __init__(self, directory: BackupDirectory, generation: int | None = None):
        super().__init__(directory.path, directory.files)
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
        at, time = start, 0
        home = self._directory.partition(self._kept[topic.name], partition)
        for kept in self._partition(topic, partition).files:
            if kept.end <= at or kept.base >= end:
                continue
            path = home / kept.name
            at, time = yield from self._read_file(
                path, kept.base, at, kept.end, time, size=kept.bytes
            )

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

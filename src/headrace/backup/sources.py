"""Where a backup is taken from: a broker over the network, or the directory of a stopped broker.

A source fixes a point in time (``begin``), and then reads batches up to the ends that it named. Batches come
byte for byte as they are stored; in the place of damaged records come batches that are marked as lost, and
``damaged`` tells of them.

A broker's messages are read by :class:`~headrace.client.reader.BatchReader`: from the broker's own files where
they can be read on this machine, otherwise over the socket, with TLS and a login like any client. A directory
is read under its lock, and nothing in it is changed: a torn tail is left out, by the rule of recovery.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace import limits
from headrace.access.file import NAME as ACCESS_FILE
from headrace.client.reader import BatchReader
from headrace.client.threads import BrokerClient
from headrace.clock import Clock
from headrace.errors import (
    BrokerFailed,
    Closed,
    ConnectFailed,
    ConnectionLost,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
)
from headrace.files import Files, Handle
from headrace.log import batch as batches
from headrace.log.batch import Batch
from headrace.log.directory import JOURNAL, RUN, SUSPECT, TOPIC_SETTINGS, DataDirectory
from headrace.log.interface import TopicRecord
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.recovery import LastSegment, producers_before, read_last, segments_of
from headrace.log.segment import Damage, Found, log_name, scan
from headrace.log.storage import parse_settings
from headrace.log.witness import Witnesses
from headrace.model import TopicSettings, check_topic_name

READ_BYTES = 2 << 20
RENEW_S = 10.0
"""How often the broker hears that the backup goes on; it waits for a minute."""


class SourceTopic(NamedTuple):
    record: TopicRecord
    extents: list[tuple[int, int]]
    """(start, end) of each partition; none of a topic in memory."""


class PointInTime(NamedTuple):
    time: int
    topics: list[SourceTopic]
    journal: list[bytes]
    """Its entries; the first is the format's name. Empty if there is no journal."""
    access: bytes | None
    """The access file; empty if there is none, None if it was not to be copied."""
    clean: bool


class BackupLost(NotFound, code="backup_not_found", retryable=True):
    """The point in time cannot be read any more; begin again."""


class BackupSource(Protocol):
    name: str
    damaged: list[tuple[int, int]]
    """Offsets (first, end) that the last ``read`` could not read."""

    def begin(self) -> PointInTime: ...

    def read(
        self, topic: TopicRecord, partition: int, start: int, end: int
    ) -> Iterator[list[Batch]]:
        """The batches from ``start`` to ``end``. :class:`TopicNotFound` if the topic was deleted."""

    def batch_at(self, topic: TopicRecord, partition: int, offset: int) -> Batch | None:
        """The batch that holds the offset; None if it is damaged."""

    def producers(self, topic: TopicRecord, partition: int) -> Producers:
        """The idempotent producers that the source knows, perhaps with batches after the end."""

    def renew(self) -> None:
        """Called again and again while the backup is taken."""

    def end(self) -> None: ...


# --- a broker -------------------------------------------------------------------------------------
class BrokerSource:
    def __init__(
        self, name: str, client: BrokerClient, reader: BatchReader, *, access: bool = True
    ):
        self.name = name
        self.damaged: list[tuple[int, int]] = []
        self._client, self._reader, self._access = client, reader, access
        self._id: str | None = None
        self._renewed = 0.0

    def begin(self) -> PointInTime:
        begun = self._ask(lambda: self._client.begin_backup(access=self._access))
        self._id = begun["backup"]
        topics: list[SourceTopic] = []
        entries: list[bytes] = []
        access: list[bytes] = []
        for number in range(begun["pages"]):
            page = self._ask(lambda number=number: self._client.read_backup(self._id or "", number))
            topics += map(_topic, page["topics"])
            entries += map(b64decode, page["entries"])
            access.append(b64decode(page["access"]))
        self._renewed = time.monotonic()
        rules = b"".join(access) if self._access else None
        return PointInTime(begun["time"], topics, entries, rules, True)

    def _ask(self, ask: Any) -> Any:
        try:
            return ask()
        except NotFound as error:
            if error.code == "backup_not_found":
                raise BackupLost(error.message) from None
            raise
        except ConnectFailed as error:
            if self._id is None:
                raise  # it was not there to begin with
            raise BackupLost(error.message) from None
        except (BrokerFailed, Closed, ConnectionLost, OutcomeUnknown) as error:
            raise BackupLost(f"the broker was lost during the backup: {error.message}") from None

    def read(
        self, topic: TopicRecord, partition: int, start: int, end: int
    ) -> Iterator[list[Batch]]:
        self.damaged = []
        while start < end:
            try:
                for found in self._reader.read(
                    topic.name, partition, start, end, incarnation=topic.incarnation
                ):
                    yield found
                    start = found[-1].end_offset
            except DataCorrupt:
                readable = min(self._partition(topic, partition, start)["readable"], end)
                self.damaged.append((start, readable))
                yield lost_batches(start, readable, 0)
                start = readable

    def batch_at(self, topic: TopicRecord, partition: int, offset: int) -> Batch | None:
        try:
            for found in self._reader.read(
                topic.name, partition, offset, offset + 1, incarnation=topic.incarnation
            ):
                return found[-1]
        except DataCorrupt:
            pass
        return None

    def producers(self, topic: TopicRecord, partition: int) -> Producers:
        raw = self._partition(topic, partition, None)["producers"]
        return Producers.load(b64decode(raw)) or Producers()

    def _partition(self, topic: TopicRecord, partition: int, offset: int | None) -> Any:
        number = self._id or ""
        return self._ask(
            lambda: self._client.read_backup_partition(number, topic.name, partition, offset=offset)
        )

    def renew(self) -> None:
        if time.monotonic() - self._renewed >= RENEW_S:
            self._ask(lambda: self._client.read_backup(self._id or ""))
            self._renewed = time.monotonic()

    def end(self) -> None:
        number, self._id = self._id, None
        if number is not None:
            with suppress(HeadraceError):  # it ends by itself, too
                self._client.end_backup(number)


def _topic(item: Any) -> SourceTopic:
    settings = {
        k: v for k, v in item["settings"].items() if k in TopicSettings.__dataclass_fields__
    }
    record = TopicRecord(
        check_topic_name(item["topic"], internal=True),
        TopicSettings.of(settings),
        item["incarnation"],
        item["created_ms"],
        item["owner"],
    )
    return SourceTopic(record, [(start, end) for start, end in item["extents"]])


def lost_batches(first: int, end: int, time: int) -> list[Batch]:
    """Batches that stand for destroyed records."""
    step = limits.BATCH_RECORDS_MAX
    return [batches.lost(at, min(step, end - at), time) for at in range(first, end, step)]


class FileSource:
    """What sources on a disk share: they read files of batches, and tell what is destroyed in them."""

    def __init__(self, path: Path, files: Files):
        self.name = str(path.absolute())
        self.damaged: list[tuple[int, int]] = []
        self._files = files

    def _read_file(
        self, path: Path, base: int, at: int, limit: int, time: int, size: int | None = None
    ) -> Generator[list[Batch], None, tuple[int, int]]:
        """The batches from ``at`` to ``limit``; returns where they end, and the time of the last one."""
        files = self._files
        handle = files.open(path)
        try:
            some: list[Batch] = []
            read = 0
            length = files.size(handle) if size is None else size
            for part in scan(files, handle, length, base_offset=base):
                if isinstance(part, Damage) or part.batch.end_offset <= at:
                    continue
                if part.batch.base_offset >= limit:
                    break
                if part.batch.base_offset > at:
                    some += self._lost(at, part.batch.base_offset, time)
                whole = self._whole(handle, part)
                some.append(whole)
                at, time = whole.end_offset, whole.max_timestamp
                read += part.size
                if read >= READ_BYTES:
                    yield some
                    some, read = [], 0
            if some:
                yield some
            if at < limit:
                yield self._lost(at, limit, time)
                at = limit
        finally:
            handle.close()
        return at, time

    def _lost(self, first: int, end: int, time: int) -> list[Batch]:
        self.damaged.append((first, end))
        return lost_batches(first, end, time)

    def _whole(self, handle: Handle, part: Found) -> Batch:
        found = batches.parse(self._files.read_at(handle, part.position, part.size))
        if found is None:
            raise DataCorrupt(f"{handle.path} does not read the same twice at byte {part.position}")
        return found


# --- a directory ----------------------------------------------------------------------------------
class DirectorySource(FileSource):
    """The directory of a stopped broker."""

    def __init__(self, data_dir: Path, *, access: bool = True, files: Files | None = None):
        super().__init__(data_dir, files or Files())
        self._path, self._access = data_dir, access
        self._clock = Clock()
        self._lock: DataDirectory | None = None
        self._witnesses = Witnesses()
        self._open: dict[tuple[str, int], tuple[LastSegment | None, Producers]] = {}

    def begin(self) -> PointInTime:
        files = self._files
        if not files.exists(self._path / RUN) and not files.exists(self._path / JOURNAL):
            raise InvalidArgument(
                f"{self._path} is not a data directory: no broker has written to it",
                code="not_a_data_directory",
            )
        directory = DataDirectory(self._path, files, self._clock)
        directory.acquire(to_read=True)
        self._lock = directory
        if directory.is_suspect:
            raise DataCorrupt(
                f"{self._path / SUSPECT} says that a sync has failed; start the broker once, and back it "
                "up then",
                code="suspect",
            )
        run = directory.last_run()
        raw = files.read_file(self._path / JOURNAL) if files.exists(self._path / JOURNAL) else b""
        entries, places, _ = entries_in(raw)
        if places:
            raise DataCorrupt(
                f"{self._path / JOURNAL} is damaged; start the broker once, which skips the damage and "
                "says what that means",
                code="journal_damaged",
            )
        self._witnesses = Witnesses({} if run is None else run.ends)
        for entry in entries:
            with suppress(KeyError, ValueError):
                self._witnesses.add(entry)
        topics = [self._topic(record) for record in self._records()]
        access = self._path / ACCESS_FILE
        rules = None
        if self._access:
            rules = files.read_file(access) if files.exists(access) else b""
        clean = run is not None and run.clean
        return PointInTime(self._clock.now_ms(), topics, entries, rules, clean)

    def _records(self) -> Iterator[TopicRecord]:
        files = self._files
        for name in files.names(self._path):
            path = self._path / name
            if name.startswith("@") or not files.exists(path / TOPIC_SETTINGS):
                continue
            try:
                check_topic_name(name, internal=True)
                yield parse_settings(name, files.read_file(path / TOPIC_SETTINGS))
            except DataCorrupt as error:
                raise DataCorrupt(
                    f"{path / TOPIC_SETTINGS} is damaged: {error}; 'headrace doctor' says more"
                ) from None

    def _topic(self, record: TopicRecord) -> SourceTopic:
        if not record.settings.durable:
            return SourceTopic(record, [])
        reached = self._witnesses.ends(record)
        extents = []
        for number in range(record.settings.partitions):
            segments = self._segments(record, number)
            last, producers = self._last(record, number, reached[number])
            end = reached[number] if last is None else last.end_offset
            extents.append((segments[0][0] if segments else end, end))
            if last is not None or producers:
                self._open[(record.name, number)] = (last, producers)
        return SourceTopic(record, extents)

    def _home(self, record: TopicRecord, partition: int) -> Path:
        return self._path / record.name / str(partition)

    def _segments(self, record: TopicRecord, partition: int) -> list[tuple[int, int]]:
        home = self._home(record, partition)
        return segments_of(self._files, home) if self._files.exists(home) else []

    def _last(
        self, record: TopicRecord, partition: int, reached: int
    ) -> tuple[LastSegment | None, Producers]:
        segments = self._segments(record, partition)
        if not segments:
            return None, Producers()
        home, base = self._home(record, partition), segments[-1][0]
        producers = producers_before(self._files, home, segments)
        handle = self._files.open(home / log_name(base))
        try:
            last, _, _ = read_last(self._files, handle, handle.path, base, producers, reached)
        finally:
            handle.close()
        return last, producers

    def read(
        self, topic: TopicRecord, partition: int, start: int, end: int
    ) -> Iterator[list[Batch]]:
        self.damaged = []
        home = self._home(topic, partition)
        bases = [base for base, _ in self._segments(topic, partition)]
        at, last_time = start, 0
        for number, base in enumerate(bases):
            limit = min(bases[number + 1], end) if number + 1 < len(bases) else end
            if limit <= at or base >= end:
                continue
            path = home / log_name(base)
            at, last_time = yield from self._read_file(path, base, at, limit, last_time)
        if at < end:
            yield self._lost(at, end, last_time)

    def batch_at(self, topic: TopicRecord, partition: int, offset: int) -> Batch | None:
        for found in self._batches_from(topic, partition, offset):
            return found
        return None

    def _batches_from(self, topic: TopicRecord, partition: int, offset: int) -> Iterator[Batch]:
        base = max((b for b, _ in self._segments(topic, partition) if b <= offset), default=None)
        if base is None:
            return
        files = self._files
        handle = files.open(self._home(topic, partition) / log_name(base))
        try:
            for part in scan(files, handle, files.size(handle), base_offset=base):
                if isinstance(part, Found) and part.batch.end_offset > offset:
                    if part.batch.base_offset <= offset:
                        yield self._whole(handle, part)
                    return
        finally:
            handle.close()

    def producers(self, topic: TopicRecord, partition: int) -> Producers:
        return self._open.get((topic.name, partition), (None, Producers()))[1]

    def renew(self) -> None:
        pass

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

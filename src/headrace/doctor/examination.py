"""Looks at every file of a data directory and reports findings.

The checks: every checksum of every batch, its columns, that offsets are gapless within and across
segments, that times do not run backwards, that indexes, snapshots, the journal and the settings can
be read. A finding that can be repaired is offered with its remedy.

The rules for what is tolerated are those of recovery and the journal: a torn write must not be called
damage here if the next start calls it torn, nor the other way round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace import limits
from headrace.doctor.findings import (
    Finding,
    PartitionState,
    Report,
    Severity,
    count,
    offsets,
    worst,
)
from headrace.doctor.remedies import (
    FillGap,
    MoveAside,
    Remedy,
    RemoveLeftover,
    RewriteSegment,
    WriteIndex,
)
from headrace.doctor.survey import Gone, Survey, survey
from headrace.errors import InvalidArgument
from headrace.files import Files
from headrace.log.directory import DELETED, JOURNAL, LOCK, SUSPECT, TOPIC_SETTINGS
from headrace.log.index import Index
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.segment import base_offset_of, log_name
from headrace.model import check_topic_name

_ASIDE = re.compile(r"\d{20}\.torn-\d+|(\d{20}|@)[.a-z]*\.damaged(-\d+)?")
_LEFTOVER = re.compile(rf"(\d{{20}}\..+|@.+|{re.escape(TOPIC_SETTINGS)})\.tmp")

LOST_RECORDS_MAX = limits.SEGMENT_BATCHES_MAX * limits.BATCH_RECORDS_MAX
"""The most offsets that one repair gives up in one place: beyond it, a file name is what is wrong."""

Progress = Callable[[str, int, int], None]
"""Told the file, the bytes read so far and the bytes there are to read."""


def looks_like_data(data_dir: Path, files: Files) -> bool:
    for name in files.names(data_dir):
        if name in (LOCK, SUSPECT, DELETED, JOURNAL):
            return True
        path = data_dir / name
        if _is_topic_name(name) and files.is_directory(path) and _looks_like_topic(path, files):
            return True
    return False


def _looks_like_topic(path: Path, files: Files) -> bool:
    """Settings, or a partition with a segment; other programs number their directories too."""
    return any(
        name == TOPIC_SETTINGS
        or (
            partition_number(name) is not None
            and files.is_directory(path / name)
            and any(base_offset_of(file) is not None for file in files.names(path / name))
        )
        for name in files.names(path)
    )


def _is_topic_name(name: str) -> bool:
    try:
        check_topic_name(name, internal=True)
    except InvalidArgument:
        return False
    return True


def partition_number(name: str) -> int | None:
    """The number of a partition's directory; None for any other name."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,3}", name):
        return None
    return int(name) if int(name) < limits.PARTITIONS_PER_TOPIC_MAX else None


def printable(name: str) -> str:
    """A file name as it can be shown on any terminal."""
    text = name.encode("utf-8", "backslashreplace").decode()
    return text if text.isprintable() else ascii(text)[1:-1]


class Examination:
    def __init__(self, data_dir: Path, files: Files, progress: Progress | None = None):
        self.data_dir, self.files = data_dir, files
        self.report = Report(data_dir)
        self.offered: list[tuple[Finding, Remedy]] = []
        self._progress = progress
        self._read = self._total = 0
        self._topic: str | None = None
        self._partition: int | None = None

    def run(self, only: set[tuple[str | None, int | None]] | None = None) -> None:
        """All of it, or ``only`` some (topic, partition); (None, None) is what belongs to no topic."""
        topics = []
        for name in self.files.names(self.data_dir):
            path = self.data_dir / name
            if _is_topic_name(name) and self.files.is_directory(path):
                topics.append(path)
            elif only is None or (None, None) in only:
                self._look_at_top(name, path)
        if self._progress is not None:
            self._total = sum(map(self._log_bytes, topics))
        for path in topics:
            self._look_at_topic(path, only)

    def add(
        self,
        severity: Severity,
        code: str,
        path: Path,
        sentence: str,
        remedy: Remedy | None = None,
        *,
        first: int | None = None,
        end: int | None = None,
        bytes: int = 0,
    ) -> None:
        finding = Finding(
            severity,
            code,
            sentence,
            printable(str(path.relative_to(self.data_dir))),
            self._topic,
            self._partition,
            first,
            end,
            bytes,
            repairable=remedy is not None,
        )
        self.report.findings.append(finding)
        if remedy is not None:
            self.offered.append((finding, remedy))

    def advance(self, path: Path, size: int) -> None:
        if self._progress is not None:
            self._read += size
            self._progress(str(path.relative_to(self.data_dir)), self._read, self._total)

    def _log_bytes(self, topic: Path) -> int:
        return sum(
            self.files.file_size(topic / partition / name)
            for partition in self.files.names(topic)
            if partition_number(partition) is not None
            for name in self.files.names(topic / partition)
            if base_offset_of(name) is not None
        )

    # --- files in any directory --------------------------------------------------------------
    def add_other(self, path: Path) -> None:
        """A file that does not belong in its directory."""
        directory = self.files.is_directory(path)
        size = 0 if directory else self.files.file_size(path)
        if _LEFTOVER.fullmatch(path.name) and not directory:
            self.add(
                "note", "leftover_tmp", path,
                "left by a write that never took place; nothing is missing, and the next start "
                "or a repair removes it",
                RemoveLeftover(path), bytes=size,
            )  # fmt: skip
        elif _ASIDE.fullmatch(path.name):
            self.add(
                "note", "kept_aside", path,
                "kept by an earlier recovery or repair; nothing reads it, remove it when you no "
                "longer need it",
                bytes=size,
            )  # fmt: skip
        else:
            self.add(
                "note", "unknown_file", path,
                "nothing that Headrace writes there has such a name; it is left alone",
                bytes=size,
            )  # fmt: skip

    def add_unreadable(self, path: Path, error: OSError) -> None:
        self.add(
            "damage", "unreadable_file", path,
            f"the disk or its permissions do not let it be read ({error.strerror or error}); "
            "see to that first, for example by copying it with ddrescue, and examine again",
        )  # fmt: skip

    # --- what lies at the top ---------------------------------------------------------------
    def _look_at_top(self, name: str, path: Path) -> None:
        if name == LOCK:
            return
        if name == SUSPECT:
            self.add(
                "warning", "suspect", path,
                "a sync failed and the broker stopped; the next start writes the end of every "
                "partition anew before it trusts it. Look at the disk first",
            )  # fmt: skip
        elif name == DELETED and self.files.is_directory(path):
            for topic in self.files.names(path):
                self.add(
                    "note", "half_deleted", path / topic,
                    "a topic that was being deleted; the next start finishes that",
                )  # fmt: skip
        elif name == JOURNAL:
            self._look_at_journal(path)
        else:
            self.add_other(path)

    def _look_at_journal(self, path: Path) -> None:
        """By the rules of ``Journal.open``, but without touching anything."""
        try:
            raw = self.files.read_file(path)
        except OSError as error:
            self.add_unreadable(path, error)
            return
        entries, places, end = entries_in(raw)
        torn = len(raw[end:].rstrip(b"\0"))
        if not entries:
            self.add(
                "damage", "journal_damaged", path,
                "not one entry of the subscription journal can be read. Move it aside to start "
                "without it: subscriptions are then gone, and begin at the earliest message when "
                "they are made again",
                bytes=len(raw),
            )  # fmt: skip
            return
        if places:
            self.add(
                "damage", "journal_damaged", path,
                f"{count(places, 'damaged place')} among {len(entries):,} entries of the subscription "
                "journal; the next start skips that and keeps a copy. Some positions are then older "
                "than they were, and messages are delivered again",
                bytes=len(raw),
            )  # fmt: skip
        if torn:
            self.add(
                "warning", "journal_torn", path,
                f"the last {torn:,} bytes of the subscription journal were never completed; the "
                "next start cuts them off",
                bytes=torn,
            )  # fmt: skip

    # --- topics -----------------------------------------------------------------------------
    def _look_at_topic(
        self, path: Path, only: set[tuple[str | None, int | None]] | None = None
    ) -> None:
        if not _looks_like_topic(path, self.files):
            if only is None:
                self.add_other(path)
            return
        self.report.topics += 1
        self._topic = path.name
        partitions = []
        others = []
        for name in self.files.names(path):
            number = partition_number(name)
            if number is not None and self.files.is_directory(path / name):
                partitions.append(number)
            elif name != TOPIC_SETTINGS:
                others.append(path / name)
        records = 0
        for number in sorted(partitions):
            if only is None or (path.name, number) in only:
                self._partition = number
                state = _PartitionCheck(self, path / str(number)).look()
                self.report.partitions.append(state)
                records += state.end_offset
        self._partition = None
        if only is None or (path.name, None) in only:
            self._look_at_settings(path / TOPIC_SETTINGS, in_use=records > 0)
            for other in others:
                self.add_other(other)
        self._topic = None

    def _look_at_settings(self, path: Path, *, in_use: bool) -> None:
        consequence = (
            "the next start takes the topic over with default settings, and its subscriptions "
            "begin again at the earliest message. Put the file back from a backup if you have one"
        )
        try:
            good = isinstance(json.loads(self.files.read_file(path)), dict)
        except FileNotFoundError:
            self.add(
                "damage" if in_use else "warning", "settings_missing", path,
                f"the topic's settings do not exist: {consequence}",
            )  # fmt: skip
            return
        except OSError as error:
            self.add_unreadable(path, error)
            return
        except (ValueError, RecursionError):
            good = False
        if not good:
            self.add(
                "damage", "settings_damaged", path,
                f"the topic's settings are not JSON: {consequence}",
                bytes=self.files.file_size(path),
            )  # fmt: skip


@dataclass(slots=True)
class _SegmentFile:
    base: int
    path: Path
    size: int


class _PartitionCheck:
    """One partition under examination."""

    def __init__(self, examination: Examination, directory: Path):
        self.examination = examination
        self.files = examination.files
        self.add = examination.add
        self.directory = directory
        self.state = PartitionState(directory.parent.name, int(directory.name))
        self.segments: list[_SegmentFile] = []
        self.time = 0
        """The newest time so far."""

    def look(self) -> PartitionState:
        had = len(self.examination.report.findings)
        self._list_files()
        expected = self.state.start_offset = self.segments[0].base if self.segments else 0
        number = 0
        while number < len(self.segments):
            segment = self.segments[number]
            if segment.base > expected:
                self._add_missing(expected, segment.base)
            found, index = self._survey(number)
            if found is None:
                expected = max(expected, segment.base, self._limit(number) or 0)
            else:
                limit = self._limit(number)
                self._count(found)
                if segment.base < expected or (limit is not None and found.end_offset > limit):
                    self._add_overlap(found)
                else:
                    self._judge(found)
                    self._judge_index(found, index)
                self.time = max(self.time, found.last_time)
                expected = max(expected, found.end_offset)
            number += 1
        self.state.end_offset = expected
        findings = self.examination.report.findings[had:]
        self.state.severity = worst(finding.severity for finding in findings)
        return self.state

    # --- files ------------------------------------------------------------------------------
    def _list_files(self) -> None:
        others = []
        for name in self.files.names(self.directory):
            path = self.directory / name
            base = base_offset_of(name)
            if base is not None and base <= limits.OFFSET_MAX and not self.files.is_directory(path):
                self.segments.append(_SegmentFile(base, path, self.files.file_size(path)))
            else:
                others.append(path)
        bases = {segment.base for segment in self.segments}
        for path in others:
            stem, _, suffix = path.name.partition(".")
            base = base_offset_of(f"{stem}.log")
            if suffix == "producers" and base is not None:
                self._judge_producers(path)
            elif suffix != "idx" or base is None:
                self.examination.add_other(path)
            elif base not in bases:
                self.add(
                    "note", "index_orphan", path,
                    "an index without its segment; nothing reads it",
                    bytes=self.files.file_size(path),
                )  # fmt: skip
        self.segments.sort(key=lambda segment: segment.base)
        self.state.segments = len(self.segments)
        self.state.bytes = sum(segment.size for segment in self.segments)

    def _limit(self, number: int) -> int | None:
        """Where the next segment begins; None for the last."""
        return self.segments[number + 1].base if number + 1 < len(self.segments) else None

    def _judge_producers(self, path: Path) -> None:
        try:
            good = Producers.load(self.files.read_file(path)) is not None
        except OSError as error:
            self.examination.add_unreadable(path, error)
            return
        if not good:
            self.add(
                "warning", "producers_damaged", path,
                "what is remembered of idempotent producers fails its checksum; the next start "
                "ignores it and reads older segments instead, which takes longer",
                MoveAside(path), bytes=self.files.file_size(path),
            )  # fmt: skip

    def _survey(self, number: int) -> tuple[Survey | None, str | None]:
        """The segment, and the trouble with its index: None for none, '' if it does not exist."""
        segment = self.segments[number]
        try:
            index, trouble = self._load_index(segment)
            while True:
                limit = self._limit(number)
                found = survey(
                    self.files,
                    segment.path,
                    segment.base,
                    limit=limit,
                    previous_time=self.time,
                    index=index,
                    progress=lambda size: self.examination.advance(segment.path, size),
                )
                if limit is None or found.end_offset <= limit or not self._set_aside(number + 1):
                    return found, trouble if trouble is not None else found.disagreement
        except OSError as error:
            self.examination.add_unreadable(segment.path, error)
            return None, None

    def _set_aside(self, number: int) -> bool:
        """Forget a file that only its name makes a segment, so that it limits no other one."""
        stray = self.segments[number]
        if survey(self.files, stray.path, stray.base, limit=None).runs:
            return False
        del self.segments[number]
        self.add(
            "damage" if stray.size else "warning", "not_a_segment", stray.path,
            "it is named like a segment, but holds no valid batch, and the segment before it has "
            "its offsets; a repair moves it out of the way",
            MoveAside(stray.path), bytes=stray.size,
        )  # fmt: skip
        return True

    def _load_index(self, segment: _SegmentFile) -> tuple[Index | None, str | None]:
        path = segment.path.with_suffix(".idx")
        if not self.files.exists(path):
            return None, ""
        index = Index.load(self.files.read_file(path), segment.base, segment.size)
        return index, None if index else "it fails its checksum, or is of a log of another size"

    def _judge_index(self, found: Survey, trouble: str | None) -> None:
        # The last segment needs none yet, and that of a damaged one is made anew with it.
        if trouble is None or not found.closed or found.gone or found.newer_at is not None:
            return
        path = found.path.with_suffix(".idx")
        found.index.log_bytes = found.size
        if trouble:
            self.add(
                "warning", "index_wrong", path,
                f"the index is not this segment's ({trouble}); no record is lost, but finding one "
                "takes longer",
                WriteIndex(path, found.index),
            )  # fmt: skip
        else:
            self.add(
                "note", "index_missing", path,
                "the index of this segment does not exist; the next read there makes it",
                WriteIndex(path, found.index),
            )  # fmt: skip

    # --- what a segment holds ---------------------------------------------------------------
    def _count(self, found: Survey) -> None:
        for run in found.runs:
            self.state.batches += run.batches
            self.state.records += run.end - run.first - run.lost_records
            self.state.lost_records += run.lost_records
            for first, end in run.lost:
                self.add(
                    "note", "records_lost", found.path,
                    f"{offsets(first, end)}: given up by an earlier repair; consumers skip what is lost",
                    first=first, end=end,
                )  # fmt: skip

    def _add_overlap(self, found: Survey) -> None:
        self.add(
            "damage", "overlap", found.path,
            f"it holds {offsets(found.base_offset, found.end_offset)}, and another segment has some "
            "of that too; compare both with --dump and move the wrong one aside",
            first=found.base_offset, end=found.end_offset, bytes=found.size,
        )  # fmt: skip

    def _judge(self, found: Survey) -> None:
        remedy: Remedy | None = RewriteSegment(found, self.time)
        if found.newer_at is not None:
            remedy = None
            self.add(
                "damage", "newer_format", found.path,
                f"the batch at byte {found.newer_at} was written by a newer version of Headrace; "
                "use that version, this one would take it for damage",
            )  # fmt: skip
        elif found.torn is not None:
            self._add_torn(found)
        for gone in found.gone:
            self._add_gone(found, gone, remedy)
        if found.backwards_at is not None:
            self.add(
                "warning", "time_backwards", found.path,
                f"the times of records run backwards at offset {found.backwards_at}; looking for a "
                "time may lead to a place nearby",
                first=found.backwards_at, end=found.backwards_at + 1,
            )  # fmt: skip
        if found.trailing_bytes:
            self.add(
                "warning", "trailing_bytes", found.path,
                f"{found.trailing_bytes:,} bytes after the last batch are no batch; no offset is "
                "missing, and nothing reads them",
                bytes=found.trailing_bytes,
            )  # fmt: skip

    def _add_gone(self, found: Survey, gone: Gone, remedy: Remedy | None) -> None:
        records = gone.end - gone.first
        self.state.damaged_records += records
        size = gone.end_position - gone.position
        code = "damaged_range"
        if gone.cause == "columns":
            code, why = "columns_invalid", "the checksum matches, but the columns make no sense"
        elif size:
            why = "the checksum fails"
        else:
            why = "the segment is empty"
        if records > LOST_RECORDS_MAX:
            remedy, what = None, "; that is more than can be true, look at the next segment's name"
        else:
            what = "; a repair gives up what is destroyed and keeps a copy" if remedy else ""
        self.add(
            "damage", code, found.path,
            f"{offsets(gone.first, gone.end)} cannot be read, {count(size, 'byte')}: {why}{what}",
            remedy, first=gone.first, end=gone.end, bytes=size,
        )  # fmt: skip

    def _add_torn(self, found: Survey) -> None:
        torn = found.torn
        assert torn is not None
        whole = ""
        if torn.records:
            whole = f", {count(torn.records, 'whole record')} that no sync vouches for among them,"
        self.add(
            "warning", "torn_tail", found.path,
            f"the last {count(torn.bytes, 'byte')} were being written when the broker stopped; nobody was "
            f"promised them. The next start cuts them off{whole} and keeps them in a file beside it",
            first=found.end_offset, bytes=torn.bytes,
        )  # fmt: skip

    def _add_missing(self, first: int, end: int) -> None:
        self.state.damaged_records += end - first
        path = self.directory / log_name(first)
        fits = end - first <= LOST_RECORDS_MAX
        what = (
            "put it back from a backup, or let a repair give up what was in it"
            if fits
            else f"that is more than can be true, look at the name of {log_name(end)}"
        )
        self.add(
            "damage", "segment_missing", path,
            f"{offsets(first, end)}: in no file, a segment was removed or cut short; {what}",
            FillGap(path, first, end, self.time) if fits else None,
            first=first, end=end,
        )  # fmt: skip

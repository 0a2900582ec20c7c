"""Reads every file of a data directory and reports findings.

The checks: every checksum of every batch and its columns; offsets without gaps, within and across
segments; times in order; indexes, snapshots, the journal and the settings. A finding that can be
repaired is offered with its remedy.

The rules for what is tolerated are those of recovery and the journal: a torn write must not be called
damage here if the next start calls it torn, nor the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from headrace import limits
from headrace.doctor import remedies
from headrace.doctor.findings import (
    CODES,
    Finding,
    PartitionState,
    Report,
    Severity,
    count,
    offsets,
    worst,
)
from headrace.doctor.remedies import Remedy
from headrace.doctor.survey import Survey, survey
from headrace.errors import DataCorrupt, InvalidArgument
from headrace.files import Files
from headrace.log.directory import (
    DELETED,
    JOURNAL,
    LOCK,
    RUN,
    SUSPECT,
    TOPIC_SETTINGS,
    LastRun,
    parse_run,
)
from headrace.log.interface import TopicRecord
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.recovery import segments_of
from headrace.log.segment import base_offset_of, log_name
from headrace.log.storage import parse_settings
from headrace.log.witness import Witnesses
from headrace.model import check_topic_name

_ASIDE = re.compile(r"\d{20}\.torn-\d+|(\d{20}|@)[.a-z]*\.damaged(-\d+)?")
_LEFTOVER = re.compile(rf"(\d{{20}}\..+|@.+|{re.escape(TOPIC_SETTINGS)})\.tmp")

LOST_RECORDS_MAX = 200_000 * limits.BATCH_RECORDS_MAX
"""The most offsets that one repair gives up in one place: beyond it, a file name is wrong."""

_WITHOUT_JOURNAL = (
    "Move it aside to start without it: all subscriptions are then gone, and begin at the earliest "
    "message when they are created again"
)
_OLDER_JOURNAL = (
    "The next start skips the damage and keeps a copy. Some positions are then older than they were, "
    "and messages are delivered again"
)

Progress = Callable[[str, int, int], None]
"""Called with the file, the bytes read so far and the bytes in total."""


def looks_like_data(data_dir: Path, files: Files) -> bool:
    return any(
        name in (LOCK, RUN, SUSPECT, DELETED, JOURNAL) or _is_topic(data_dir / name, files)
        for name in files.names(data_dir)
    )


def _is_topic(path: Path, files: Files) -> bool:
    """Whether it has settings, or a partition with a segment: other programs number their
    directories too."""
    try:
        check_topic_name(path.name, internal=True)
    except InvalidArgument:
        return False
    if not files.is_directory(path):
        return False
    return files.exists(path / TOPIC_SETTINGS) or any(
        segments_of(files, partition) for partition in _partitions_of(path, files)
    )


def _partitions_of(topic: Path, files: Files) -> list[Path]:
    numbers = [
        int(name)
        for name in files.names(topic)
        if re.fullmatch(r"0|[1-9][0-9]{0,3}", name) and files.is_directory(topic / name)
    ]
    return [topic / str(n) for n in sorted(numbers) if n < limits.PARTITIONS_PER_TOPIC_MAX]


def _printable(name: str) -> str:
    """A file name that any terminal can show."""
    text = name.encode("utf-8", "backslashreplace").decode()
    return text if text.isprintable() else ascii(text)[1:-1]


class Examination:
    def __init__(self, data_dir: Path, files: Files, progress: Progress | None = None):
        self.data_dir, self.files = data_dir, files
        self.report = Report(data_dir)
        self.offered: dict[Remedy, list[Finding]] = {}
        self._progress = progress
        self._read = self._total = 0

    def run(self, only: set[Path] | None = None) -> None:
        """Examine everything, or ``only`` the files of some directories: the data directory, topics
        and partitions."""
        files, partitions = self.files, dict[Path, list[Path]]()
        witnesses = self._witnesses()
        for path in [self.data_dir / name for name in files.names(self.data_dir)]:
            if _is_topic(path, files):
                partitions[path] = _partitions_of(path, files)
            elif only is None or self.data_dir in only:
                self._examine_top(path)
        self.report.topics = len(partitions)
        every = [path for found in partitions.values() for path in found]
        self._total = sum(size for path in every for _, size in segments_of(files, path))
        for topic, found in partitions.items():
            record = self._record(topic)
            reached = [] if record is None else witnesses.ends(record)
            for path in found:
                if only is None or path in only:
                    number = int(path.name)
                    at_least = reached[number] if number < len(reached) else 0
                    self.report.partitions.append(_PartitionExamination(self, path, at_least).run())
            if only is None or topic in only:
                self._examine_settings(topic / TOPIC_SETTINGS)
                for path in [topic / name for name in files.names(topic)]:
                    if path.name != TOPIC_SETTINGS and path not in found:
                        self.add_other(path)

    def add(
        self,
        code: str,
        path: Path,
        remedy: Remedy | None = None,
        *,
        severity: Severity | None = None,
        first: int | None = None,
        end: int | None = None,
        bytes: int = 0,
        **words: Any,
    ) -> None:
        """Report a finding; ``words`` are those that its sentence in ``CODES`` needs."""
        usual, sentence = CODES[code]
        if first is not None and end is not None:
            words["offsets"] = offsets(first, end)
        inside = path.relative_to(self.data_dir)
        in_topic = len(inside.parts) > 1 and inside.parts[0] != DELETED
        finding = Finding(
            severity or usual,
            code,
            sentence.format(first=first, size=count(bytes, "byte"), **words),
            _printable(str(inside)),
            inside.parts[0] if in_topic else None,
            int(inside.parts[1]) if len(inside.parts) > 2 else None,
            first,
            end,
            bytes,
            repairable=remedy is not None,
        )
        self.report.findings.append(finding)
        if remedy is not None:
            self.offered.setdefault(remedy, []).append(finding)

    def advance(self, path: Path, size: int) -> None:
        self._read += size
        if self._progress is not None:
            self._progress(str(path.relative_to(self.data_dir)), self._read, self._total)

    def read(self, path: Path) -> bytes | None:
        """A small file; None, and a finding, when it cannot be read."""
        try:
            return self.files.read_file(path)
        except OSError as error:
            self.add_unreadable(path, error)
            return None

    def add_unreadable(self, path: Path, error: OSError) -> None:
        self.add("unreadable_file", path, error=error.strerror or error)

    def add_other(self, path: Path) -> None:
        """Report a file that the broker does not read."""
        directory = self.files.is_directory(path)
        size = 0 if directory else self.files.file_size(path)
        if _LEFTOVER.fullmatch(path.name) and not directory:
            remedy = Remedy(partial(remedies.remove_leftover, path))
            self.add("leftover_tmp", path, remedy, bytes=size)
        elif _ASIDE.fullmatch(path.name):
            self.add("kept_aside", path, bytes=size)
        else:
            self.add("unknown_file", path, bytes=size)

    # --- what the files say about each other --------------------------------------------------
    def _witnesses(self) -> Witnesses:
        """How far the partitions once reached, as the next start will see it."""
        try:
            run = parse_run(self.files.read_file(self.data_dir / RUN))
        except (OSError, DataCorrupt):
            run = LastRun()
        found = Witnesses(run.ends)
        try:
            entries = entries_in(self.files.read_file(self.data_dir / JOURNAL))[0]
        except OSError:
            entries = []
        for payload in entries:
            with suppress(KeyError, ValueError):
                found.add(payload)
        return found

    def _record(self, topic: Path) -> TopicRecord | None:
        try:
            return parse_settings(topic.name, self.files.read_file(topic / TOPIC_SETTINGS))
        except (OSError, DataCorrupt):
            return None

    # --- files outside of partitions ----------------------------------------------------------
    def _examine_top(self, path: Path) -> None:
        if path.name == SUSPECT:
            self.add("suspect", path)
        elif path.name == RUN:
            self._examine_run(path)
        elif path.name == DELETED and self.files.is_directory(path):
            for topic in self.files.names(path):
                self.add("half_deleted", path / topic)
        elif path.name == JOURNAL:
            self._examine_journal(path)
        elif path.name != LOCK:
            self.add_other(path)

    def _examine_run(self, path: Path) -> None:
        raw = self.read(path)
        if raw is None:
            return
        try:
            run = parse_run(raw)
        except DataCorrupt:
            self.add("run_damaged", path, bytes=len(raw))
            return
        if not run.clean:
            self.add("unclean_stop", path, severity="warning" if run.may_have_failed else "note")

    def _examine_journal(self, path: Path) -> None:
        """By the rules of ``Journal.open``, but without touching anything."""
        raw = self.read(path)
        if raw is None:
            return
        entries, places, end = entries_in(raw)
        torn = len(raw[end:].rstrip(b"\0"))
        if places or not entries:
            readable, then = "no entry", _WITHOUT_JOURNAL
            if entries:
                readable = f"{len(entries):,} entries around {count(places, 'damaged place')}"
                then = _OLDER_JOURNAL
            self.add("journal_damaged", path, bytes=len(raw), readable=readable, then=then)
        if entries and torn:
            self.add("journal_torn", path, bytes=torn)

    def _examine_settings(self, path: Path) -> None:
        if not self.files.exists(path):
            self.add("settings_missing", path)
            return
        raw = self.read(path)
        if raw is None:
            return
        try:
            parse_settings(path.parent.name, raw)
        except DataCorrupt as error:
            self.add("settings_damaged", path, bytes=len(raw), error=error)


class _PartitionExamination:
    def __init__(self, examination: Examination, directory: Path, reached: int):
        self.examination = examination
        self.reached = reached
        """All offsets before it were once on disk."""
        self.files = examination.files
        self.add = examination.add
        self.directory = directory
        self.state = PartitionState(directory.parent.name, int(directory.name))
        bases = [base for base, _ in segments_of(self.files, directory)]
        self.bases = [base for base in bases if base <= limits.OFFSET_MAX]
        self.time = 0
        """The newest time so far."""

    def run(self) -> PartitionState:
        earlier = len(self.examination.report.findings)
        self._examine_others()
        self.state.segments = len(self.bases)
        self.state.bytes = sum(self.files.file_size(self._path(base)) for base in self.bases)
        expected = self.state.start_offset = self.bases[0] if self.bases else 0
        # The loop may remove bases after the current one.
        for number, base in enumerate(self.bases):
            if base > expected:
                path = self._path(expected)
                remedy = Remedy(partial(remedies.fill_gap, path, expected, base, self.time))
                self._add_gone("segment_missing", path, expected, base, remedy)
            try:
                found = self._survey(number)
            except OSError as error:
                self.examination.add_unreadable(self._path(base), error)
                expected = max(expected, base, self._limit(number) or 0)
                continue
            limit = self._limit(number)
            self._count(found)
            if base < expected or (limit is not None and found.end_offset > limit):
                self.add("overlap", found.path, first=base, end=found.end_offset, bytes=found.size)
            else:
                self._judge(found)
                self._judge_index(found)
            self.time = max(self.time, found.last_time)
            expected = max(expected, found.end_offset)
        if expected < self.reached:  # not a single file is left, or the last one cannot be read
            path = self._path(expected)
            remedy = Remedy(partial(remedies.fill_gap, path, expected, self.reached, self.time))
            unreadable = None if self.bases else remedy
            self._add_gone("segment_missing", path, expected, self.reached, unreadable)
            expected = self.reached
        self.state.end_offset = expected
        findings = self.examination.report.findings[earlier:]
        self.state.severity = worst(finding.severity for finding in findings)
        return self.state

    def _path(self, base: int) -> Path:
        return self.directory / log_name(base)

    def _limit(self, number: int) -> int | None:
        """Where the next segment begins; None for the last."""
        return self.bases[number + 1] if number + 1 < len(self.bases) else None

    def _examine_others(self) -> None:
        """The files that are not segments, but for the indexes of segments."""
        for name in self.files.names(self.directory):
            path = self.directory / name
            stem, _, suffix = name.partition(".")
            base = base_offset_of(f"{stem}.log")
            if suffix == "producers" and base is not None:
                raw = self.examination.read(path)
                if raw is not None and Producers.load(raw) is None:
                    remedy = Remedy(partial(remedies.move_aside, path))
                    self.add("producers_damaged", path, remedy, bytes=len(raw))
            elif suffix == "idx" and base is not None:
                if base not in self.bases:
                    self.add("index_orphan", path, bytes=self.files.file_size(path))
            elif suffix != "log" or base not in self.bases:
                self.examination.add_other(path)

    def _survey(self, number: int) -> Survey:
        base = self.bases[number]
        while True:
            limit = self._limit(number)
            found = survey(
                self.files,
                self._path(base),
                base,
                limit=limit,
                previous_time=self.time,
                reached=self.reached,
            )
            self.examination.advance(found.path, found.size)
            if limit is None or found.end_offset <= limit or not self._set_aside(limit):
                return found

    def _set_aside(self, base: int) -> bool:
        """Forget a file that is a segment only by its name, so that it limits no other segment."""
        stray = survey(self.files, self._path(base), base, limit=None)
        if not all(piece.damaged for piece in stray.pieces):
            return False
        self.bases.remove(base)
        remedy = Remedy(partial(remedies.move_aside, stray.path))
        severity: Severity = "damage" if stray.size else "warning"
        self.add("not_a_segment", stray.path, remedy, severity=severity, bytes=stray.size)
        return True

    # --- judging a segment ------------------------------------------------------------------
    def _count(self, found: Survey) -> None:
        for piece in found.pieces:
            self.state.batches += 0 if piece.damaged else piece.batches
            if piece.state == "valid":
                self.state.records += piece.records
            elif piece.state == "lost":
                self.state.lost_records += piece.records
                self.add("records_lost", found.path, first=piece.first, end=piece.end)

    def _judge(self, found: Survey) -> None:
        remedy: Remedy | None = Remedy(
            partial(remedies.rewrite_segment, found, self.time), bytes_written=found.size
        )
        if found.newer_at is not None:
            remedy = None
            self.add("newer_format", found.path, position=found.newer_at)
        elif found.torn_bytes:
            whole = count(found.torn_records, "whole record")
            at, size = found.end_offset, found.torn_bytes
            self.add("torn_tail", found.path, first=at, bytes=size, whole=whole)
        for piece in found.damaged:
            code = "columns_invalid" if piece.state == "columns" else "damaged_range"
            size = piece.end_position - piece.position
            self._add_gone(code, found.path, piece.first, piece.end, remedy, size)
        if found.backwards_at is not None:
            at = found.backwards_at
            self.add("time_backwards", found.path, first=at, end=at + 1)
        if found.trailing_bytes:
            self.add("trailing_bytes", found.path, bytes=found.trailing_bytes)

    def _judge_index(self, found: Survey) -> None:
        # The last segment needs none yet, and a repair of a damaged segment writes its index too.
        if not found.closed or found.damaged or found.newer_at is not None:
            return
        path = found.path.with_suffix(".idx")
        found.index.log_bytes = found.size
        index = found.index.dump()
        remedy = Remedy(partial(remedies.write_index, path, index), bytes_written=len(index))
        if not self.files.exists(path):
            self.add("index_missing", path, remedy)
        elif self.examination.read(path) not in (index, None):
            self.add("index_wrong", path, remedy)

    def _add_gone(
        self, code: str, path: Path, first: int, end: int, remedy: Remedy | None, size: int = 0
    ) -> None:
        """Report offsets that cannot be read."""
        self.state.damaged_records += end - first
        advice = "; a repair gives these records up" if remedy is not None else ""
        if end - first > LOST_RECORDS_MAX:
            remedy, advice = None, "; that is too many to be true, check the next segment's name"
        self.add(code, path, remedy, first=first, end=end, bytes=size, advice=advice)

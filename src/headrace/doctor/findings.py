"""The report of an examination: findings, partitions, totals.

A finding has a stable ``code``, a severity and a sentence that says what it means and what to do:

- ``note``: nothing is wrong; worth knowing.
- ``warning``: the broker copes with it by itself, or only speed is concerned.
- ``damage``: records or settings that were once safely stored cannot be read.

``docs/format.md`` explains every code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

Severity = Literal["ok", "note", "warning", "damage"]
_ORDER: tuple[Severity, ...] = get_args(Severity)

_ADOPTED = (
    "The next start adopts the topic with default settings, without retention, and its subscriptions "
    "begin again at the earliest message. Restore the file from a backup if you have one"
)
# fmt: off
CODES: dict[str, tuple[Severity, str]] = {
    "damaged_range": ("damage",
        "{offsets} cannot be read: {size} in their place are no valid batch{advice}"),
    "columns_invalid": ("damage",
        "{offsets} cannot be read: the checksum matches, but the columns make no sense{advice}"),
    "segment_missing": ("damage",
        "no file holds {offsets}: a segment was removed or cut short. Restore it from a backup if "
        "you have one{advice}"),
    "not_a_segment": ("damage",
        "it is named like a segment, but holds no valid batch, and the segment before it has its "
        "offsets; a repair moves it aside"),
    "overlap": ("damage",
        "it holds {offsets}, and another segment holds some of them too; compare both with --dump "
        "and move the wrong one aside"),
    "newer_format": ("damage",
        "a newer version of Headrace wrote the batch at byte {position}; use that version, because "
        "this one would take it for damage"),
    "unreadable_file": ("damage",
        "the disk or its permissions prevent reading it ({error}); fix that first, for example by "
        "copying it with ddrescue, and examine again"),
    "journal_damaged": ("damage", "{readable} of the subscription journal can be read. {then}"),
    "settings_missing": ("damage", f"the topic's settings do not exist. {_ADOPTED}"),
    "settings_damaged": ("damage", f"the topic's settings cannot be used: {{error}}. {_ADOPTED}"),
    "torn_tail": ("warning",
        "the broker stopped while it wrote the last {size}, and never confirmed them. The next "
        "start cuts them off ({whole} among them) and keeps them in a file beside the segment"),
    "journal_torn": ("warning",
        "the last {size} of the subscription journal were never completed; the next start cuts "
        "them off"),
    "suspect": ("warning",
        "a sync failed and the broker stopped; the next start rewrites the end of every partition "
        "before it trusts it. Check the disk first"),
    "unclean_stop": ("warning",
        "the last broker did not stop cleanly: it was killed, it failed, or the machine stopped. The "
        "next start writes the end of every partition again before it trusts it, unless the machine "
        "was started again since"),
    "run_damaged": ("warning",
        "the record of how the last broker stopped fails its checksum; the next start takes it that "
        "it did not stop cleanly"),
    "index_wrong": ("warning",
        "the index does not match this segment; no record is lost, but finding one takes longer"),
    "producers_damaged": ("warning",
        "the snapshot of idempotent producers fails its checksum; the next start ignores it and "
        "reads older segments instead, which takes longer"),
    "time_backwards": ("warning",
        "the times of records run backwards at offset {first}; a search for a time may end at a "
        "record nearby"),
    "trailing_bytes": ("warning",
        "{size} after the last batch are not a batch; no offset is missing, and nothing reads them"),
    "records_lost": ("note",
        "{offsets}: an earlier repair gave them up; consumers skip lost records"),
    "index_missing": ("note", "this segment has no index; the next read there creates it"),
    "index_orphan": ("note", "this index has no segment; nothing reads it"),
    "leftover_tmp": ("note",
        "an unfinished write left it; nothing is missing, and the next start or a repair removes "
        "it"),
    "kept_aside": ("note",
        "an earlier recovery or repair kept it; nothing reads it, remove it when you no longer need "
        "it"),
    "half_deleted": ("note", "a topic that was being deleted; the next start finishes that"),
    "unknown_file": ("note", "Headrace writes no file with such a name here; it is left alone"),
}
"""Code -> severity and sentence. The sentence may use any word given to ``Examination.add``."""
# fmt: on


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    code: str
    sentence: str
    file: str
    """Relative to the data directory."""
    topic: str | None = None
    partition: int | None = None
    first: int | None = None
    """The first offset concerned, and ``end`` the one after the last."""
    end: int | None = None
    bytes: int = 0
    repairable: bool = False
    """``repair`` can do something about it."""

    @property
    def records(self) -> int:
        return 0 if self.first is None or self.end is None else self.end - self.first


def offsets(first: int, end: int) -> str:
    return f"offset {first}" if end - first == 1 else f"offsets {first} to {end - 1}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def worst(severities: Iterable[Severity]) -> Severity:
    return max(severities, key=_ORDER.index, default="ok")


@dataclass(slots=True, kw_only=True)
class Counts:
    segments: int = 0
    batches: int = 0
    records: int = 0
    """Records that can be read."""
    bytes: int = 0
    damaged_records: int = 0
    """Records that cannot be read and have not been given up."""
    lost_records: int = 0
    """Records that an earlier repair has given up."""


@dataclass(slots=True)
class PartitionState(Counts):
    topic: str
    partition: int
    start_offset: int = 0
    end_offset: int = 0
    severity: Severity = "ok"


@dataclass(slots=True)
class Totals(Counts):
    topics: int
    partitions: int


@dataclass
class Report:
    data_dir: Path
    findings: list[Finding] = field(default_factory=list)
    partitions: list[PartitionState] = field(default_factory=list)
    topics: int = 0

    @property
    def severity(self) -> Severity:
        return worst(finding.severity for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """Whether every record that was safely stored can be read, or was given up by a repair."""
        return self.severity != "damage"

    @property
    def repairable(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.repairable]

    @property
    def totals(self) -> Totals:
        names = [column.name for column in fields(Counts)]
        sums = {name: sum(getattr(state, name) for state in self.partitions) for name in names}
        return Totals(self.topics, len(self.partitions), **sums)

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "data_dir": str(self.data_dir),
            "severity": self.severity,
            "healthy": self.healthy,
            "totals": asdict(self.totals),
            "partitions": [asdict(partition) for partition in self.partitions],
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Action:
    """Something that ``repair`` did."""

    code: str
    """Of the finding that it answers."""
    file: str
    sentence: str

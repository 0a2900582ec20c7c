"""The report of an examination: findings, partitions, totals.

A finding has a stable ``code``, a severity and a sentence that says what it means and what to do:

- ``note``: nothing is wrong; worth knowing.
- ``warning``: the broker copes with it by itself, or only speed is concerned.
- ``damage``: records or settings that were once safely stored cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Severity = Literal["ok", "note", "warning", "damage"]
_ORDER: tuple[Severity, ...] = get_args(Severity)


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


@dataclass(slots=True)
class PartitionState:
    """One partition as it lies there."""

    topic: str
    partition: int
    start_offset: int = 0
    end_offset: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    """Records that can be read."""
    bytes: int = 0
    damaged_records: int = 0
    """Records that cannot be read and have not been given up."""
    lost_records: int = 0
    """Records that an earlier repair has given up."""
    severity: Severity = "ok"


@dataclass(frozen=True, slots=True)
class Totals:
    topics: int
    partitions: int
    segments: int
    batches: int
    records: int
    bytes: int
    damaged_records: int
    lost_records: int


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
        """Whether all that was ever safely stored can be read, or was given up by a repair."""
        return self.severity != "damage"

    @property
    def repairable(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.repairable]

    @property
    def totals(self) -> Totals:
        def total(name: str) -> int:
            return sum(getattr(partition, name) for partition in self.partitions)

        return Totals(
            topics=self.topics,
            partitions=len(self.partitions),
            segments=total("segments"),
            batches=total("batches"),
            records=total("records"),
            bytes=total("bytes"),
            damaged_records=total("damaged_records"),
            lost_records=total("lost_records"),
        )

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

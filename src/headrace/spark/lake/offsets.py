"""Which offsets a table holds: ranges per topic and partition, joined where they touch.

A range is half open, ``(start, end)``, so ``end`` is the next offset to come. The ranges of a partition
are sorted, do not overlap and do not touch. They are exact: a gap is a gap in the table.

The same text form is used everywhere (commit logs, file footers, ``--json``)::

    {"orders": {"0": [[0, 1000]], "1": [[0, 400], [402, 980]]}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Consecutive offsets of one partition."""

    topic: str
    partition: int
    start: int
    end: int

    def __str__(self) -> str:
        last = f"-{self.end - 1}" if self.end > self.start + 1 else ""
        return f"{self.topic}/{self.partition}@{self.start}{last}"


class Offsets:
    """A set of offsets, kept as ranges."""

    def __init__(self, spans: Iterable[Span] = ()):
        self._ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for span in spans:
            self.add(*span)

    # --- building -------------------------------------------------------------------------------
    def add(self, topic: str, partition: int, start: int, end: int) -> None:
        """Put ``start`` to ``end - 1`` in; offsets that it holds already are held once."""
        if end <= start:
            return
        ranges = self._ranges.setdefault((topic, partition), [])
        if ranges and ranges[-1][1] == start:  # the usual case: it continues where it ended
            ranges[-1] = (ranges[-1][0], end)
        elif not ranges or ranges[-1][1] < start:
            ranges.append((start, end))
        else:
            self._ranges[topic, partition] = _join([*ranges, (start, end)])

    def add_all(self, other: Offsets) -> Offsets:
        for span in other:
            self.add(*span)
        return self

    # --- asking ---------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Span]:
        for (topic, partition), ranges in sorted(self._ranges.items()):
            for start, end in ranges:
                yield Span(topic, partition, start, end)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offsets) and self._ranges == other._ranges

    def __repr__(self) -> str:
        return f"<Offsets {', '.join(map(str, self)) or 'none'}>"

    @property
    def count(self) -> int:
        return sum(span.end - span.start for span in self)

    def partitions(self) -> list[tuple[str, int]]:
        return sorted(self._ranges)

    def of(self, topic: str, partition: int) -> list[tuple[int, int]]:
        return list(self._ranges.get((topic, partition), ()))

    def ends(self) -> dict[str, dict[int, int]]:
        """The offset after the last one of each partition: where a reader continues."""
        found: dict[str, dict[int, int]] = {}
        for (topic, partition), ranges in sorted(self._ranges.items()):
            found.setdefault(topic, {})[partition] = ranges[-1][1]
        return found

    def hull(self) -> Offsets:
        """One range for each partition, from its first offset to its last."""
        return Offsets(
            Span(*key, ranges[0][0], ranges[-1][1]) for key, ranges in self._ranges.items()
        )

    def common(self, other: Offsets) -> Offsets:
        """The offsets that both hold."""
        found = Offsets()
        for key, mine in self._ranges.items():
            theirs = other._ranges.get(key, [])
            here = there = 0
            while here < len(mine) and there < len(theirs):
                (start, end), (low, high) = mine[here], theirs[there]
                found.add(*key, max(start, low), min(end, high))
                if end <= high:
                    here += 1
                else:
                    there += 1
        return found

    def without(self, other: Offsets) -> Offsets:
        """The offsets that this holds and the other does not."""
        found = Offsets()
        for key, ranges in self._ranges.items():
            taken = other._ranges.get(key, [])
            for start, end in ranges:
                for low, high in taken:
                    if high <= start:
                        continue
                    if low >= end:
                        break
                    found.add(*key, start, low)
                    start = max(start, high)
                found.add(*key, start, end)
        return found

    def gaps(self) -> Offsets:
        """The offsets missing between the first and the last of each partition."""
        found = Offsets()
        for key, ranges in self._ranges.items():
            for (_, before), (after, _) in pairwise(ranges):
                found.add(*key, before, after)
        return found

    # --- as text --------------------------------------------------------------------------------
    def as_document(self) -> dict[str, dict[str, list[list[int]]]]:
        document: dict[str, dict[str, list[list[int]]]] = {}
        for topic, partition, start, end in self:
            document.setdefault(topic, {}).setdefault(str(partition), []).append([start, end])
        return document

    def as_text(self) -> str:
        return json.dumps(self.as_document(), separators=(",", ":"))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Offsets:
        found = cls()
        for topic, partitions in document.items():
            for partition, ranges in partitions.items():
                for start, end in ranges:
                    found.add(topic, int(partition), int(start), int(end))
        return found

    @classmethod
    def of_text(cls, text: str | bytes) -> Offsets:
        return cls.of_document(json.loads(text))


def _join(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges.sort()
    joined = [ranges[0]]
    for start, end in ranges[1:]:
        last_start, last_end = joined[-1]
        if start <= last_end:
            joined[-1] = (last_start, max(last_end, end))
        else:
            joined.append((start, end))
    return joined

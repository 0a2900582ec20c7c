"""Where offsets of a partition are in Kafka: a sparse index, and the marks up to which records can be deleted.

A *place* is a stretch: our first offset, Kafka's offset, the epoch and the time and size so far. A reader begins at a
place and applies the rule from there. A *mark* is a valid checkpoint; between two marks lies what
retention can delete at once, like a closed segment on disk.

Both lists are bounded: when there are too many, every second of the older ones goes, and reads there begin
a little earlier than they had to. The first mark stays, because it says which offset the partition begins with. Both
are part of a checkpoint, so a start does not read what lies before it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import NamedTuple, TypeVar

from headrace.log.interface import ClosedSegment

PLACES_MAX = 2048
MARKS_MAX = 512
_ROW = struct.Struct("<5Q")
_COUNTS = struct.Struct("<II")
Thing = TypeVar("Thing")


class StretchPlace(NamedTuple):
    offset: int
    position: int
    """Kafka's offset."""
    epoch: int
    time: int
    """The newest time of the stretch."""
    size: int
    """Bytes of all stretches before it."""


class Mark(NamedTuple):
    offset: int
    position: int
    epoch: int
    time: int
    """The newest time before it."""
    size: int


class Places:
    def __init__(self) -> None:
        self.places: list[StretchPlace] = []
        self.marks: list[Mark] = []
        self.size = 0
        self.time = 0

    def add(self, offset: int, position: int, epoch: int, time: int, size: int) -> None:
        """A valid stretch."""
        self.time = max(self.time, time)
        self.places.append(StretchPlace(offset, position, epoch, self.time, self.size))
        self.size += size
        if len(self.places) > PLACES_MAX:
            self.places = _thinned(self.places)

    def mark(self, offset: int, position: int, epoch: int) -> None:
        """A valid checkpoint, all of it."""
        if self.marks and self.marks[-1].offset == offset:
            self.marks[-1] = Mark(offset, position, epoch, self.time, self.size)
            return
        self.marks.append(Mark(offset, position, epoch, self.time, self.size))
        if len(self.marks) > MARKS_MAX:
            self.marks = _thinned(self.marks)

    def before(self, offset: int) -> StretchPlace:
        """The last known place at or before the offset; a mark is one, too."""
        at = bisect_right(self.places, offset, key=_offset) - 1
        place = self.places[at] if at >= 0 else StretchPlace(0, 0, 0, 0, 0)
        mark = self.drop_before(offset)
        return place if mark is None or mark.offset <= place.offset else StretchPlace(*mark)

    def at_time(self, time: int) -> StretchPlace | None:
        """The last known place before which everything is older."""
        at = bisect_left(self.places, time, key=lambda place: place.time)
        return None if at == len(self.places) else self.places[at]

    def begin_at(self, position: int) -> int:
        """Forget what Kafka has deleted; returns the first offset that is left."""
        self.marks = [mark for mark in self.marks if mark.position >= position]
        first = self.marks[0].offset if self.marks and position else 0
        self.places = [place for place in self.places if place.offset >= first]
        return first

    def drop_before(self, offset: int) -> Mark | None:
        """The last mark at or before the offset."""
        at = bisect_right(self.marks, offset, key=_offset) - 1
        return self.marks[at] if at >= 0 else None

    def closed(self, start: int) -> list[ClosedSegment]:
        """What lies between the marks, from an offset on."""
        found = []
        before = start, self.size_at(start)
        for mark in self.marks:
            if mark.offset > before[0]:
                found.append(
                    ClosedSegment(before[0], mark.offset, mark.size - before[1], mark.time)
                )
                before = mark.offset, mark.size
        return found

    def size_at(self, offset: int) -> int:
        """Bytes before an offset at which a partition begins."""
        at = bisect_right(self.marks, offset, key=_offset) - 1
        return self.marks[at].size if at >= 0 and self.marks[at].offset == offset else 0

    # --- as bytes -----------------------------------------------------------------------------
    def dump(self) -> bytes:
        rows = [_ROW.pack(*row) for row in (*self.places, *self.marks)]
        return _COUNTS.pack(len(self.places), len(self.marks)) + b"".join(rows)

    def load(self, raw: bytes, size: int, time: int) -> None:
        places, _ = _COUNTS.unpack_from(raw)
        rows = list(_ROW.iter_unpack(raw[_COUNTS.size :]))
        self.places = [StretchPlace(*row) for row in rows[:places]]
        self.marks = [Mark(*row) for row in rows[places:]]
        self.size, self.time = size, time


def _offset(thing: StretchPlace | Mark) -> int:
    return thing.offset


def _thinned(things: list[Thing]) -> list[Thing]:
    """Without every second of the older half; the first one stays."""
    half = len(things) // 2
    return things[:half:2] + things[half:]

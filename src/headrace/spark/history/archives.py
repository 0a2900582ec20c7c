"""The table of an archive, read without Spark: which files hold which offsets, and the offset at a time.

The statistics of a file are a box: its least and greatest partition, offset and time. A box may hold more than the
file does, so it only says which files need not be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import NotFound
from headrace.model import pattern_matches
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.stores import FileStore
from headrace.spark.lake.table import StoredFile, TableSnapshot
from headrace.spark.options import wrong

if TYPE_CHECKING:
    from headrace.client.threads import BrokerClient

SINK = "table "
"""With this an archive's report says where its table is (``builtin.archive``)."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Place = tuple[str, int]
"""A topic and a partition."""


def is_path(history: str) -> bool:
    """Whether this is the path of a table, and not the name of an archive."""
    return "/" in history


def table_of(name: str, client: BrokerClient | None) -> str:
    """Where the table of an archive is: as the archive has reported it to the broker."""
    if client is None:
        raise wrong("history", f"a data directory knows no archive {name!r}: give its table's path")
    try:
        queries = client.pipeline_stats(name)["queries"]
    except NotFound:
        raise NotFound(
            f"no archive {name!r} has reported to this broker: give the name that 'headrace archive run' has "
            "(its --name, else its --group), or the path of its table",
            code="archive_not_found",
        ) from None
    for query in queries:
        sink = query.get("sink") or ""
        if sink.startswith(SINK):
            return sink.removeprefix(SINK)
    raise NotFound(
        f"pipeline {name!r} is no archive, or has not started yet: give the path of its table",
        code="archive_not_found",
    )


# --- files ------------------------------------------------------------------------------------------
class FilePiece(NamedTuple):
    """Rows of one file that one task reads."""

    name: str
    """As the table's store names it."""
    constants: dict[str, Any]
    """The columns that are not in the file."""
    wanted: tuple[Span, ...] | None = None
    """The only offsets that are read; None: all rows."""
    part: int = 0
    parts: int = 1
    """Of ``parts`` parts of the file's row groups, this one."""
    bytes: int = 0
    rows: int = 0


def _range(file: StoredFile, column: str, low: Any, high: Any) -> tuple[Any, Any]:
    """The least and the greatest value that the file can hold."""
    if column in file.partition:
        return file.partition[column], file.partition[column]
    return file.least.get(column, low), file.greatest.get(column, high)


def _may_hold(file: StoredFile, span: Span) -> bool:
    for column, first, last in (
        ("topic", span.topic, span.topic),
        ("partition", span.partition, span.partition),
        ("offset", span.start, span.end - 1),
    ):
        low, high = _range(file, column, first, last)
        if low is None or low > last or high < first:  # None: the partition of rows without it
            return False
    return True


class _Box(NamedTuple):
    """The rows that a file can hold, if its statistics say so."""

    topic: str
    partitions: range
    start: int
    end: int

    @classmethod
    def of(cls, file: StoredFile) -> _Box | None:
        topics = _range(file, "topic", None, None)
        partitions = _range(file, "partition", None, None)
        offsets = _range(file, "offset", None, None)
        if None in (*topics, *partitions, *offsets) or topics[0] != topics[1]:
            return None
        return cls(topics[0], range(partitions[0], partitions[1] + 1), offsets[0], offsets[1] + 1)


def pieces(snapshot: TableSnapshot, wanted: Offsets) -> list[FilePiece]:
    """What must be read of the table's files to get these offsets, and no others."""
    by_topic: dict[str, list[Span]] = {}
    for span in wanted:
        by_topic.setdefault(span.topic, []).append(span)
    found = []
    for file in snapshot.files:
        box = _Box.of(file)
        spans: Iterable[Span] = wanted if box is None else by_topic.get(box.topic, ())
        some = tuple(span for span in spans if _may_hold(file, span))
        if some:
            is_whole = box is not None and _is_whole(box, wanted, snapshot.offsets)
            found.append(
                FilePiece(
                    file.name,
                    dict(file.partition),
                    None if is_whole else some,
                    bytes=file.bytes,
                    rows=file.rows,
                )
            )
    return found


def _is_whole(box: _Box, wanted: Offsets, held: Offsets) -> bool:
    """Whether every row of a file is wanted."""
    for partition in box.partitions:
        ranges = wanted.of(box.topic, partition)
        covers = any(start <= box.start and box.end <= end for start, end in ranges)
        if not covers and ranges != held.of(box.topic, partition):
            return False
    return True


# --- files that cannot be read ----------------------------------------------------------------------
def offsets_of(
    lost: Sequence[StoredFile], snapshot: TableSnapshot, store: FileStore
) -> list[Offsets]:
    """The offsets that each of these files held: those of its box that no other file has.

    If several are lost, their boxes may overlap: then an offset counts for each of them.
    """
    from headrace.spark.history.files import offsets_in

    boxes = [_spans(file, snapshot.offsets) for file in lost]
    names = {file.name for file in lost}
    everything = Offsets(span for spans in boxes for span in spans)
    for file in snapshot.files:
        if file.name in names or not any(_may_hold(file, span) for span in everything):
            continue
        box = _Box.of(file)
        if box is not None and len(box.partitions) == 1 and box.end - box.start == file.rows:
            found = Offsets([Span(box.topic, box.partitions[0], box.start, box.end)])
        else:
            wanted = tuple(span for span in everything if _may_hold(file, span))
            found = offsets_in(store, FilePiece(file.name, dict(file.partition), wanted))
        everything = everything.without(found)
    return [spans.common(everything) for spans in boxes]


def _spans(file: StoredFile, held: Offsets) -> Offsets:
    """The offsets that the file can hold."""
    found = Offsets()
    for span in held:
        if _may_hold(file, span):
            low, high = _range(file, "offset", span.start, span.end - 1)
            found.add(span.topic, span.partition, max(span.start, low), min(span.end, high + 1))
    return found


# --- topics and times -------------------------------------------------------------------------------
def topics_in(held: Offsets, wanted: Sequence[str]) -> set[str]:
    """The topics of a table that match names or wildcards."""
    names = {topic for topic, _ in held.partitions()}
    return {name for name in names if any(pattern_matches(each, name) for each in wanted)}


def offsets_at(
    snapshot: TableSnapshot, store: FileStore, places: Iterable[Place], time_ms: int
) -> dict[Place, int | None]:
    """The first offset of each partition at or after a time; None: all of its records are older.

    Times never run backwards in a partition. So one record before the time and the next one after it decide. Files that
    are nearest to the time are looked into first, and only until all partitions are decided.
    """
    from headrace.spark.history.files import times_in

    at = _EPOCH + timedelta(milliseconds=time_ms)
    search = {place: _Search(snapshot.offsets, place) for place in places}
    unread: list[tuple[timedelta, StoredFile]] = []
    for file in snapshot.files:
        first, last = _range(file, "timestamp", None, None)
        box = _Box.of(file)
        if first is None or last is None or first < at <= last or box is None:
            unread.append((timedelta(0), file))
        elif len(box.partitions) > 1:
            unread.append((at - last if last < at else first - at, file))
        elif (box.topic, box.partitions[0]) in search:
            found = search[box.topic, box.partitions[0]]
            found.saw(box.end - 1 if last < at else box.start, is_after=last >= at)
    for _, file in sorted(unread, key=lambda each: each[0]):
        open_ = [place for place, each in search.items() if not each.is_decided]
        if not open_:
            break
        whole = [Span(*place, 0, 1 << 62) for place in open_]
        if any(_may_hold(file, span) for span in whole):
            piece = FilePiece(file.name, dict(file.partition), tuple(whole))
            for place, last_before, first_after in times_in(store, piece, at):
                if last_before is not None:
                    search[place].saw(last_before, is_after=False)
                if first_after is not None:
                    search[place].saw(first_after, is_after=True)
    return {place: each.after for place, each in search.items()}


class _Search:
    """The last offset before a time and the first one after it, as far as they are known."""

    def __init__(self, held: Offsets, place: Place):
        self._ranges = held.of(*place)
        self._before: int | None = None
        self.after: int | None = None

    def saw(self, offset: int, *, is_after: bool) -> None:
        if is_after:
            self.after = offset if self.after is None else min(self.after, offset)
        else:
            self._before = offset if self._before is None else max(self._before, offset)

    @property
    def is_decided(self) -> bool:
        """No offset that the table holds lies between the two."""
        low = -1 if self._before is None else self._before
        high = 1 << 62 if self.after is None else self.after
        return not any(max(start, low + 1) < min(end, high) for start, end in self._ranges)

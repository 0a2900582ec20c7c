"""Log and archive as one store of topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import Conflict, NotFound, OffsetOutOfRange, TopicNotFound
from headrace.log.batch import Batch
from headrace.model import is_pattern
from headrace.spark.history.archives import is_path, offsets_at, pieces, table_of, topics_in
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.stores import FileStore
from headrace.spark.lake.table import Table, TableSnapshot
from headrace.spark.lake.tables import find_table
from headrace.spark.source.directory import DirectoryStore
from headrace.spark.source.positions import Extent, Known, TaskSpan, TopicExtents
from headrace.spark.source.stores import BrokerStore, existing_topics


class HistoryStore:
    """What the log holds and what its archive holds. The end is the log's; the start is the older one's.

    :meth:`read` reads the log, and the table only where the log has nothing any more. A query reads the rest of the
    table by its files (``reader.py``), which is faster.
    """

    def __init__(self, log: BrokerStore | DirectoryStore, history: str):
        self.log = log
        self._history = history
        self._snapshot: TableSnapshot | None = None
        self._table: Table | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (HistoryStore, (self.log, self._history))

    def close(self) -> None:
        self.log.close()

    @property
    def path(self) -> str:
        """The table's path."""
        if not is_path(self._history):
            client = self.log.client if isinstance(self.log, BrokerStore) else None
            self._history = table_of(self._history, client)
        return self._history

    @property
    def _is_copy(self) -> bool:
        """Whether the log may be a copy, which is older than the archive."""
        return isinstance(self.log, DirectoryStore)

    def look(self) -> TableSnapshot:
        """The table as it is now."""
        self._table = find_table(self.path)
        self._snapshot = self._table.snapshot()
        return self._snapshot

    def files(self) -> FileStore:
        """Where the table's files are."""
        self._table = self._table or find_table(self.path)
        return self._table.store()

    @property
    def snapshot(self) -> TableSnapshot:
        """The table as it was after the last look at the log."""
        return self._snapshot or self.look()

    # --- the driver's part ------------------------------------------------------------------
    def names(self) -> list[str]:
        archived = {topic for topic, _ in self.look().offsets.partitions()}
        return sorted({*self.log.names(), *archived})

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        known = existing_topics(self.log, wanted, at_ms)
        held = (
            self.look().offsets
        )  # after the log: what the log has deleted by then is in the table
        archived = topics_in(held, wanted)
        for each in wanted:
            if not is_pattern(each) and each not in known and each not in archived:
                raise TopicNotFound(f"there is no topic {each!r} in the log, nor in {self.path}")
        self._check_same_log(wanted, known, held)
        found = {}
        for topic in sorted({*known, *archived}):
            state = known.get(topic, TopicExtents(0, {}))
            numbers = {*state.partitions, *(n for name, n in held.partitions() if name == topic)}
            extents = {
                number: _joined(
                    state.partitions.get(number), held.of(topic, number), is_copy=self._is_copy
                )
                for number in sorted(numbers)
            }
            found[topic] = TopicExtents(state.incarnation, extents)
        return found if at_ms is None else self._with_times(found, known, at_ms)

    def _check_same_log(self, wanted: Sequence[str], known: Known, held: Offsets) -> None:
        """An archive cannot hold offsets that its log does not have yet."""
        if self._is_copy or not _ahead(held, known):
            return
        known = existing_topics(self.log, wanted)  # the archive has moved on since the first look
        for topic, number in _ahead(held, known):
            raise Conflict(
                f"{self.path} holds offsets of {topic}/{number} that the log does not have: the topic was deleted and "
                "created again, or this is another broker. Read the log and the table one by one",
                code="other_log",
            )

    def _with_times(self, found: dict[str, TopicExtents], known: Known, at_ms: int) -> Known:
        """Extents whose ``at`` may be in the table: the log does not know what is older than its start."""
        places = {}
        for topic, state in found.items():
            for number, extent in state.partitions.items():
                stored = known[topic].partitions.get(number) if topic in known else None
                if stored is None or (stored.at or 0) >= stored.end < extent.end:
                    places[topic, number] = extent.end
                elif (stored.at or 0) <= stored.start > extent.start:
                    places[topic, number] = stored.start
        times = offsets_at(self.snapshot, self.files(), places, at_ms) if places else {}
        timed = {}
        for topic, state in found.items():
            extents = {}
            for number, extent in state.partitions.items():
                at = extent.at
                if (topic, number) in places:
                    latest, first = places[topic, number], times[topic, number]
                    at = latest if first is None else min(first, latest)
                extents[number] = Extent(extent.start, extent.end, extent.bytes, at)
            timed[topic] = TopicExtents(state.incarnation, extents)
        return timed

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        return self.log.wait(known, wanted, seconds)

    # --- an executor's part -----------------------------------------------------------------
    def read(self, span: TaskSpan) -> Iterator[list[Batch]]:
        offset = span.start
        while offset < span.end:
            try:
                for batches in self.log.read(span._replace(start=offset)):
                    yield batches
                    offset = max(offset, batches[-1].end_offset)
                return
            except (OffsetOutOfRange, NotFound):
                archived = self._archived(span, offset)
                if archived is None:
                    raise
            for batch in self._from_table(archived):
                yield [batch]
                offset = batch.end_offset

    def _archived(self, span: TaskSpan, offset: int) -> Span | None:
        """The offsets from this one on that the table holds by now."""
        for start, end in self.look().offsets.of(span.topic, span.partition):
            if start <= offset < end:
                return Span(span.topic, span.partition, offset, min(end, span.end))
        return None

    def _from_table(self, span: Span) -> Iterator[Batch]:
        from headrace.spark.history.files import batches

        return batches(self.files(), pieces(self.snapshot, Offsets([span])), span)

    def bounds(self, span: TaskSpan) -> tuple[int, int]:
        return self.log.bounds(span)


def _joined(extent: Extent | None, ranges: list[tuple[int, int]], *, is_copy: bool) -> Extent:
    """The extent of a partition in the log, and its ranges in the table, as one."""
    if not ranges:
        assert extent is not None
        return extent
    first, last = ranges[0][0], ranges[-1][1]
    if extent is None:
        return Extent(first, last)
    # The end is the log's, unless the log is a copy that is older than the archive.
    end = max(extent.end, last) if is_copy else extent.end
    return Extent(min(first, extent.start), end, extent.bytes, extent.at)


def _ahead(held: Offsets, known: Known) -> list[tuple[str, int]]:
    """The partitions of which the table holds more than the log has."""
    found = []
    for topic, ends in held.ends().items():
        state = known[topic].partitions if topic in known else {}
        found += [
            (topic, number)
            for number, end in ends.items()
            if topic in known and (number not in state or end > state[number].end)
        ]
    return found

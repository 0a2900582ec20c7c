"""``option("history", …)``: the batch reader over log and archive.

The range of a query is planned as for any batch (``source/data_source.py``), over the extents of both. Then each offset
goes to one side: those that the table holds become pieces of its files, the others spans of the log. Filters on topic,
partition, offset and time have narrowed the range before, so they reach both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace import limits
from headrace.spark.history.archives import FilePiece, pieces
from headrace.spark.history.files import ArchivedRows
from headrace.spark.history.store import HistoryStore
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.source.data_source import FilteringReader, HeadraceReader, SpanPartition
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import TaskSpan, split

TASK_BYTES = 32 << 20
"""Of files, which are compressed: one task reads about this much."""
TASK_FILES = 100


def of(options: SourceOptions, schema: StructType, *, filtering: bool) -> DataSourceReader:
    return (FilteringHistoryReader if filtering else HistoryReader)(options, schema)


class PiecesPartition(InputPartition):
    """Pieces of files that one task reads."""

    def __init__(self, pieces: list[FilePiece]):
        self.pieces = pieces


class HistoryReader(HeadraceReader):
    _store: HistoryStore

    def __init__(self, options: SourceOptions, schema: StructType):
        super().__init__(options, schema)
        self._archived = ArchivedRows(schema, options.value_format)

    def _tasks(self, found: list[TaskSpan]) -> list[InputPartition]:
        snapshot = self._store.snapshot
        wanted = Offsets(Span(*span[:4]) for span in found)
        in_table = wanted.common(snapshot.offsets)
        incarnations = {(span.topic, span.partition): span.incarnation for span in found}
        in_log = [
            TaskSpan(*span, incarnations[span.topic, span.partition])
            for span in wanted.without(in_table)
        ]
        at_least = self._options.min_partitions or 0
        share = -(-at_least * in_table.count // max(wanted.count, 1))
        files = grouped(pieces(snapshot, in_table), share)
        tasks: list[InputPartition] = [PiecesPartition(each) for each in files]
        rest = max(at_least - len(tasks), 1)
        return [*tasks, *(SpanPartition(span) for span in split(in_log, rest))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, PiecesPartition):
            yield from super().read(partition)
            return
        limits.keep_freed_memory()
        files = self._store.files()
        for piece in partition.pieces:
            yield from self._archived.read(files, piece)


class FilteringHistoryReader(FilteringReader, HistoryReader):
    """The same, when Spark hands filters over."""


def grouped(found: list[FilePiece], at_least: int) -> list[list[FilePiece]]:
    """Files cut and joined into tasks of about the same size, ``at_least`` of them if they are large enough."""
    size = TASK_BYTES
    if at_least > 1:
        size = max(1, min(size, sum(each.bytes for each in found) // at_least))
    groups: list[list[FilePiece]] = []
    room = 0
    for each in found:
        parts = max(1, round(each.bytes / size))
        for part in range(parts):
            piece = each._replace(part=part, parts=parts, bytes=each.bytes // parts)
            if not groups or room < piece.bytes or len(groups[-1]) >= TASK_FILES:
                groups.append([])
                room = size
            groups[-1].append(piece)
            room -= piece.bytes
    return groups

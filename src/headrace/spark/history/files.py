"""Rows of an archive's files, as the columns that a query asks for.

A file is read by its row groups, and of those only the columns that are needed; nothing is done per record. A
file of which only some offsets are wanted is read by the row groups that can hold them, and filtered.

Rejected: ``pyarrow.dataset``, which filters and fills in the columns of directories by itself, but takes 1.6 times
the processor time for the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from headrace.contents import null_headers
from headrace.errors import Conflict, DataCorrupt
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.log.columns import pieces as cut
from headrace.model import parse_id
from headrace.spark.history.archives import FilePiece, Place
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.schemas import to_arrow
from headrace.spark.lake.stores import FileStore, explained, is_missing
from headrace.spark.lake.writing import offsets_of
from headrace.spark.options import ValueFormat
from headrace.spark.source.arrow import LOG_APPEND_TIME, TIMESTAMP_TYPE, as_text
from headrace.spark.source.rows import CORRUPT, PREFIX, RECORD, BatchMaker

BATCH_ROWS = 20_000
BATCH_BYTES = 8 << 20
WINDOW = 50_000
"""Offsets that are put in order at a time, when records are read as batches of the log."""
ARCHIVED: pa.Schema = to_arrow(reduce(lambda s, each: s.add(*each), RECORD.items(), StructType()))


class ArchivedRows(BatchMaker):
    """Makes Arrow batches of one schema from the rows of an archive."""

    def __init__(self, schema: StructType, value_format: ValueFormat):
        super().__init__(schema, value_format)
        prefix = PREFIX if value_format == "json" else ""
        self._names = [
            None if column is None else field.name.removeprefix(prefix)
            for field, column in zip(self._schema, self._columns, strict=True)
        ]
        """The column of the archive; None: a field of the JSON value."""
        self._needed = {"value" if name is None else name for name in self._names}
        # It is the same for all records, and not archived.
        self._needed = (self._needed - {TIMESTAMP_TYPE}) or {"offset"}

    def __reduce__(self) -> tuple[object, ...]:
        return (ArchivedRows, (self._struct, self._value_format))

    def read(self, store: FileStore, piece: FilePiece) -> Iterator[pa.RecordBatch]:
        for rows in read_rows(store, piece, self._needed):
            if self._json is not None:
                fields, corrupt = self._json.decode(rows.column("value"))
                found = iter(fields)
            arrays = [
                pa.repeat(pa.scalar(LOG_APPEND_TIME, field.type), rows.num_rows)
                if name == TIMESTAMP_TYPE
                else converted(rows.column(name), field.type)
                if name is not None
                else corrupt if field.name == CORRUPT else next(found)
                for field, name in zip(self._schema, self._names, strict=True)
            ]  # fmt: skip
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def converted(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """A column of an archive, in one of the types that the source offers for it."""
    if column.type == type_:
        return column
    if pa.types.is_binary(column.type) and pa.types.is_string(type_):
        return as_text(column)
    if pa.types.is_timestamp(column.type) and pa.types.is_int64(type_):
        return pc.divide(column.cast(pa.int64()), 1000)
    if pa.types.is_map(type_):
        pairs = column.flatten()
        items = (pairs.field(0), as_text(pairs.field(1)))
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
        return pa.MapArray.from_arrays(ends, *items, type=type_, mask=column.is_null())
    return column.cast(type_)


# --- files ------------------------------------------------------------------------------------------
_DAMAGE = re.compile(
    "[Pp]arquet|thrift|[Cc]orrupt|ZSTD|[Dd]ecompress|magic bytes|Unexpected end of stream"
)


@contextmanager
def _opened(store: FileStore, name: str) -> Iterator[pq.ParquetFile]:
    """A file whose reading fails says so in one sentence."""
    shown = f"{store.place}/{name}"
    with explained(store.place):
        try:
            with (
                store.filesystem.open_input_file(store.path(name)) as opened,
                pq.ParquetFile(opened, pre_buffer=not store.is_local) as file,
            ):
                yield file
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError) or is_missing(error):
                raise Conflict(
                    f"{shown} is gone: it was removed, or vacuumed while the query ran. Run the query again; if that "
                    "does not help, 'headrace archive verify' names the offsets that the file held",
                    code="file_missing",
                ) from None
            if not store.is_local and not _DAMAGE.search(str(error)):
                raise
            raise DataCorrupt(
                f"{shown} cannot be read ({str(error).splitlines()[0]}): 'headrace archive verify' names the offsets "
                "that it held"
            ) from None


def read_rows(store: FileStore, piece: FilePiece, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """The wanted rows of a piece, with these columns of a record."""
    names = set(names)
    needed = names | ({"topic", "partition", "offset"} if piece.wanted is not None else set())
    with _opened(store, piece.name) as file:
        metadata = file.metadata
        stored = [name for name in ARCHIVED.names if name in needed - piece.constants.keys()]
        first = metadata.num_row_groups * piece.part // piece.parts
        end = metadata.num_row_groups * (piece.part + 1) // piece.parts
        for group in range(first, end):
            found = metadata.row_group(group)
            if piece.wanted is not None and not _may_hold(found, piece.wanted):
                continue
            each = max(found.total_byte_size // max(found.num_rows, 1), 1)
            count = max(1, min(BATCH_ROWS, BATCH_BYTES // each))
            columns = stored or [
                "offset"
            ]  # only constants are asked for: their number is the file's
            for batch in file.iter_batches(count, [group], columns, use_threads=False):
                rows = _with_constants(batch, piece.constants, needed)
                if piece.wanted is not None:
                    rows = rows.filter(_is_within(rows, piece.wanted))
                if rows.num_rows:
                    yield rows


def _with_constants(
    batch: pa.RecordBatch, constants: dict[str, Any], needed: set[str]
) -> pa.RecordBatch:
    arrays, fields = [], []
    for field in ARCHIVED:
        if field.name not in needed:
            continue
        if field.name in constants:
            value = pa.scalar(constants[field.name], field.type)
            arrays.append(pa.repeat(value, batch.num_rows))
        else:
            column = batch.column(field.name)
            arrays.append(column if column.type == field.type else column.cast(field.type))
        fields.append(field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _may_hold(group: pq.RowGroupMetaData, wanted: tuple[Span, ...]) -> bool:
    """Whether a row group can hold one of these offsets, going by its statistics."""
    for index in range(group.num_columns):
        column = group.column(index)
        found = column.statistics if column.path_in_schema == "offset" else None
        if found is not None and found.has_min_max:
            return any(span.start <= found.max and found.min < span.end for span in wanted)
    return True


def _is_within(rows: pa.RecordBatch, wanted: tuple[Span, ...]) -> pa.Array:
    inside = None
    for topic, partition, start, end in wanted:
        offset = rows.column("offset")
        here = pc.and_(pc.greater_equal(offset, start), pc.less(offset, end))
        here = pc.and_(here, pc.equal(rows.column("partition"), partition))
        here = pc.and_(here, pc.equal(rows.column("topic"), topic))
        inside = here if inside is None else pc.or_(inside, here)
    return inside


def times_in(
    store: FileStore, piece: FilePiece, at: datetime
) -> Iterator[tuple[Place, int | None, int | None]]:
    """Of each partition in a file: its last offset before a time, and its first one at it or after."""
    for rows in read_rows(store, piece, ("topic", "partition", "offset", "timestamp")):
        is_after = pc.greater_equal(
            rows.column("timestamp"), pa.scalar(at, rows.column("timestamp").type)
        )
        table = pa.table(
            {
                "topic": rows.column("topic"),
                "partition": rows.column("partition"),
                "before": pc.if_else(is_after, None, rows.column("offset")),
                "after": pc.if_else(is_after, rows.column("offset"), None),
            }
        )
        found = table.group_by(["topic", "partition"]).aggregate(
            [("before", "max"), ("after", "min")]
        )
        for each in found.to_pylist():
            yield (each["topic"], each["partition"]), each["before_max"], each["after_min"]


def offsets_in(store: FileStore, piece: FilePiece) -> Offsets:
    """The wanted offsets that a file holds."""
    found = Offsets()
    for rows in read_rows(store, piece, ("topic", "partition", "offset")):
        found.add_all(offsets_of(rows))
    return found


def why_unreadable(store: FileStore, name: str, *, footer: bool = False) -> str | None:
    """What is wrong with a file; None: all of it, or at least its ``footer``, can be read."""
    try:
        with _opened(store, name) as file:
            for _ in () if footer else file.iter_batches(BATCH_ROWS, use_threads=False):
                pass
    except Conflict:
        return "is missing"
    except DataCorrupt:
        return "is damaged"
    return None


# --- as batches of the log --------------------------------------------------------------------------
def batches(store: FileStore, found: Iterable[FilePiece], span: Span) -> Iterator[Batch]:
    """The records of a span, which the files hold, in order, as the log has them."""
    found = list(found)
    for start in range(span.start, span.end, WINDOW):
        window = span._replace(start=start, end=min(start + WINDOW, span.end))
        rows = [
            rows
            for piece in found
            for rows in read_rows(store, piece._replace(wanted=(window,)), ARCHIVED.names)
        ]
        table = pa.Table.from_batches(rows, ARCHIVED).sort_by("offset")
        if table["offset"].to_pylist() != list(range(window.start, window.end)):
            raise DataCorrupt(
                f"the archive does not hold all of {window}, or some of it twice: 'headrace archive verify' says more"
            )
        yield from _encoded(table, window.start)


def _encoded(table: pa.Table, offset: int) -> Iterator[Batch]:
    times = pc.divide(table["timestamp"].cast(pa.int64()), 1000).to_pylist()
    headers: list[Mapping[str, str]] = [
        {each["key"]: each["value"].decode() for each in some or ()}
        for some in table["headers"].to_pylist()
    ]
    values, keys = table["value"].to_pylist(), table["key"].to_pylist()
    for index, value in enumerate(values):
        if value is None:  # a tombstone, as the log has it
            values[index], headers[index] = b"", null_headers(headers[index], keys[index])
    columns = Columns(
        values,
        keys,
        headers,
        times,
        [parse_id(each).bytes for each in table["id"].to_pylist()],
    )
    for each in cut(columns):
        batch = encode(each)
        assert each.times is not None
        batch.base_offset, offset = offset, offset + batch.count
        batch.base_timestamp, batch.max_timestamp = each.times[0], each.times[-1]
        yield batch

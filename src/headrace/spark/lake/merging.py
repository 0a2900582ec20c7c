"""Upserts: the rows of a batch replace the rows of a table that have the same key, or delete them.

::

    executors:  rows ──▶ the last one of each key ──▶ files of new rows, files of deleted keys
    driver:     new rows, deleted keys ──▶ the last one of each key over all tasks
                files of the table that hold any of the keys ──▶ the same without those rows
                one commit: these files out, the rewritten and the new ones in

Which row is the last one? Rows of a partition of a topic come in the order of the log: a task reads them so, and the
pieces of a partition are in order, too. So the later row wins, as long as the records of a key are in one
partition. With ``order_by``, the row with the greatest value of that column wins instead, also against
the row that the table holds; between equal ones, the later row.

A file of new rows is taken as it is if all of its rows win. Only files of the table that hold a key of the batch are
rewritten; those whose statistics exclude all keys are not even opened. Rows are rewritten in a stream, so
memory holds the keys of one batch, and some rows.

Both formats share this. It works for tables that other engines read: there are no delete files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from headrace.errors import InvalidArgument
from headrace.spark.lake import schemas
from headrace.spark.lake.stores import FileStore
from headrace.spark.lake.table import DataFile, WrittenFiles

DELETED = "_deleted"
"""A column of the rows: true deletes the row of the table with this key."""
CHUNK_BYTES = 128 * 1024 * 1024
"""Of the rows that an executor gathers to find the last one of each key."""
_KINDS = (
    pa.types.is_string, pa.types.is_binary, pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp,
    pa.types.is_decimal, pa.types.is_boolean,
)  # fmt: skip


@dataclass(frozen=True)
class MergeRule:
    """Which rows are the same, and which of them is the last one."""

    keys: tuple[str, ...]
    order_by: str | None = None

    @property
    def columns(self) -> list[str]:
        more = [self.order_by] if self.order_by and self.order_by not in self.keys else []
        return [*self.keys, *more]

    def check(self, schema: pa.Schema) -> None:
        """Raise an error if rows of this schema cannot be merged."""
        for name in self.columns:
            if name not in schema.names:
                raise schemas.invalid(
                    f"there is no column {name!r} to merge by; there are {', '.join(schema.names)}"
                )
        for name in self.keys:
            kind = schema.field(name).type
            if not any(accepts(kind) for accepts in _KINDS):
                raise schemas.invalid(
                    f"column {name!r} of type {kind} cannot be a key; merge on strings, binaries, whole "
                    "numbers, decimals, dates, times or booleans"
                )

    def key_of(self, rows: pa.Table) -> pa.Array:
        """One value for each row, equal for equal keys."""
        if len(self.keys) == 1:
            return _whole(rows[self.keys[0]])
        # Zero bytes inside of a value are marked, so no two keys are joined to the same bytes.
        parts = [
            pc.replace_substring(_as_binary(_whole(rows[name])), b"\0", b"\0\1")
            for name in self.keys
        ]
        return pc.binary_join_element_wise(*parts, b"\0\2")

    def last_rows(self, rows: pa.Table) -> pa.Array | None:
        """The positions of the last row of each key, ascending. None: all rows are."""
        codes = self.key_of(rows).dictionary_encode()
        if len(codes.dictionary) == len(codes):
            return None
        positions = pa.arange(0, rows.num_rows)
        order = positions
        if self.order_by is not None:  # nothing is older than null
            values = rows[self.order_by]
            known = pc.is_valid(values).cast(pa.int8())
            sorted_by = pa.table({"known": known, "value": values, "position": positions})
            keys = [(name, "ascending") for name in sorted_by.column_names]
            order = pc.sort_indices(sorted_by, sort_keys=keys).cast(pa.int64())
        ranked = pa.table({"code": codes.indices.take(order), "rank": positions})
        last = order.take(ranked.group_by("code").aggregate([("rank", "max")])["rank_max"])
        return _sorted(last)


def _sorted(values: Any) -> pa.Array:
    whole = _whole(values)
    return whole.take(pc.sort_indices(whole))


def _whole(column: Any) -> pa.Array:
    """One array; a column of a table may be in pieces."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _as_binary(values: pa.Array) -> pa.Array:
    if pa.types.is_binary(values.type):
        return values
    return (values if pa.types.is_string(values.type) else values.cast(pa.string())).cast(
        pa.binary()
    )


# --- on executors -----------------------------------------------------------------------------------
def write_changes(
    batches: Iterator[pa.RecordBatch],
    rule: MergeRule,
    schema: pa.Schema,
    write: Callable[[Iterator[pa.RecordBatch]], WrittenFiles],
    write_keys: Callable[[pa.Table], str],
) -> list[WrittenFiles]:
    """The changes of a task in order, each piece without repeated keys.

    ``write`` writes rows to files, ``write_keys`` the keys of deleted rows to a file, of which it returns the name.
    """
    found = []
    for rows in _chunks(batches):
        for name in rule.keys:
            if rows[name].null_count:
                raise InvalidArgument(
                    f"a row has no {name}, which is its key (merge_on): leave such rows out, or give the "
                    "pipeline a topic for rows that fail (failed)",
                    code="merge_key_null",
                )
        last = rule.last_rows(rows)
        rows = rows if last is None else rows.take(last)
        deleted = None
        if DELETED in rows.column_names:
            is_deleted = pc.fill_null(rows[DELETED], False)
            gone = rows.filter(is_deleted).select(rule.columns)
            rows = rows.filter(pc.invert(is_deleted)).drop_columns([DELETED])
            if gone.num_rows:
                deleted = write_keys(gone)
        written = write(iter(rows.cast(schema).to_batches()))
        found.append(WrittenFiles(written.files, deleted=deleted))
    return found


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if size:
        yield pa.Table.from_batches(gathered)


# --- in the driver ----------------------------------------------------------------------------------
@dataclass
class FileExchange:
    """The files that leave a table, and those that come into it."""

    removed: list[str] = field(default_factory=list)
    added: list[DataFile] = field(default_factory=list)


class Merge:
    """The changes of one batch, and the table that they are for."""

    def __init__(
        self,
        rule: MergeRule,
        schema: pa.Schema,
        store: FileStore,
        partition_by: Sequence[str] = (),
    ):
        """``partition_by``: the columns that are in the names of directories, and not in the files."""
        self._rule = rule
        self._schema = schema
        self._store = store
        self._partitioning = (
            ds.partitioning(pa.schema([schema.field(name) for name in partition_by]), flavor="hive")
            if partition_by
            else None
        )

    def exchange(
        self,
        current: Sequence[str],
        changes: Sequence[WrittenFiles],
        write: Callable[[Iterator[pa.RecordBatch]], WrittenFiles],
    ) -> FileExchange:
        """What to exchange so that the table holds the last row of each key."""
        last, origins = self._last(changes)
        found = FileExchange()
        rewritten: list[tuple[str, pa.Array]] = []
        keys = self._rule.key_of(last)
        bounds = self._bounds(last)
        lost = None
        for name in current:
            if bounds is not None and not self._may_hold(name, *bounds):
                continue
            kept, beaten = self._kept(name, last, keys)
            if beaten is not None:
                lost = beaten if lost is None else pc.or_(lost, beaten)
            if kept is not None:
                found.removed.append(name)
                rewritten.append((name, kept))
        if lost is not None:
            last = last.filter(pc.invert(lost))
        for number, (file, rows) in enumerate(origins):
            mine = last.filter(pc.equal(last["file"], number))
            if mine.num_rows == rows:
                found.added.append(file)
            elif mine.num_rows:
                wins = pc.is_in(pa.arange(0, rows), value_set=_whole(mine["row"]))
                rewritten.append((file.path, wins))
        found.added += write(self._survivors(rewritten)).files
        return found

    def _last(self, changes: Sequence[WrittenFiles]) -> tuple[pa.Table, list[tuple[DataFile, int]]]:
        """The last row of each key: its key, its order, and the file and row that hold it.

        The file of a deleted key is null.
        """
        parts: list[pa.Table] = []
        origins: list[tuple[DataFile, int]] = []
        for change in changes:
            if change.deleted is not None:
                gone = pq.read_table(
                    self._store.path(change.deleted),
                    filesystem=self._store.filesystem,
                    partitioning=None,
                )
                parts.append(self._placed(gone.cast(self._key_schema()), None))
            for file in change.files:
                rows = self._rows(file.path).to_table(columns=self._rule.columns)
                parts.append(self._placed(rows, len(origins)))
                origins.append((file, rows.num_rows))
        everything = pa.concat_tables(parts)
        last = self._rule.last_rows(everything)
        return (everything if last is None else everything.take(last)), origins

    def _key_schema(self) -> pa.Schema:
        return pa.schema([self._schema.field(name) for name in self._rule.columns])

    @staticmethod
    def _placed(rows: pa.Table, number: int | None) -> pa.Table:
        files = pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)
        positions = pa.arange(0, rows.num_rows)
        return rows.append_column("file", files).append_column("row", positions)

    def _kept(
        self, name: str, last: pa.Table, keys: pa.Array
    ) -> tuple[pa.Array | None, pa.Array | None]:
        """Which rows of a file stay (None: all), and which changes are older than its rows."""
        rows = self._rows(name).to_table(columns=self._rule.columns)
        places = pc.index_in(self._rule.key_of(rows), value_set=keys)
        if places.null_count == len(places):
            return None, None
        kept = pc.is_null(places)
        beaten = None
        if self._rule.order_by is not None:
            mine = _whole(rows[self._rule.order_by])
            theirs = _whole(last[self._rule.order_by]).take(places)
            is_newer = pc.fill_null(
                pc.greater(mine, theirs), pc.and_(pc.is_valid(mine), pc.is_null(theirs))
            )
            is_newer = pc.and_(is_newer, pc.is_valid(places))
            kept = pc.or_(kept, is_newer)
            losers = places.filter(is_newer)
            if len(losers):
                beaten = pc.is_in(pa.arange(0, last.num_rows).cast(pa.int32()), value_set=losers)
        return (None if pc.all(kept).as_py() else kept), beaten

    def _survivors(self, files: Sequence[tuple[str, pa.Array]]) -> Iterator[pa.RecordBatch]:
        """The rows of each file that stay."""
        for name, kept in files:
            at = 0
            for batch in self._rows(name).to_batches(use_threads=True, fragment_readahead=1):
                rows = batch.filter(kept.slice(at, batch.num_rows))
                at += batch.num_rows
                if rows.num_rows:
                    yield rows

    def _rows(self, name: str) -> ds.Dataset:
        return ds.dataset(
            [self._store.path(name)],
            self._schema,
            format="parquet",
            filesystem=self._store.filesystem,
            partitioning=self._partitioning,
            partition_base_dir=self._store.root,
        )

    # --- statistics -----------------------------------------------------------------------------
    def _bounds(self, last: pa.Table) -> tuple[str, Any, Any] | None:
        """The first key column of the batch, its least and its greatest value."""
        name = self._rule.keys[0]
        if not last.num_rows or name not in self._file_columns():
            return None
        ends = pc.min_max(last[name]).as_py()
        return name, ends["min"], ends["max"]

    def _file_columns(self) -> list[str]:
        hidden = self._partitioning.schema.names if self._partitioning is not None else []
        return [name for name in self._schema.names if name not in hidden]

    def _may_hold(self, file: str, name: str, least: Any, greatest: Any) -> bool:
        """False if the file's statistics exclude all keys of the batch."""
        footer = pq.read_metadata(self._store.path(file), filesystem=self._store.filesystem)
        for group in range(footer.num_row_groups):
            row_group = footer.row_group(group)
            for index in range(row_group.num_columns):
                column = row_group.column(index)
                if column.path_in_schema != name:
                    continue
                found = column.statistics
                if found is None or not found.has_min_max:
                    return True
                try:
                    if found.min <= greatest and found.max >= least:
                        return True
                except TypeError:  # values that Python does not compare
                    return True
                break
            else:
                return True  # the file is older than the column
        return False

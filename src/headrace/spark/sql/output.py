"""The result of a query, as rows for people (a table) and for programs (CSV, JSON, Parquet).

A table is for reading, so it has a limit, and its rows are fetched at once. The other formats may be of
any size: Spark writes the result, all tasks at once, into Parquet files in a folder beside, and from
there it goes batch by batch, in order, to where it is wanted. So memory is bounded, and what is written
into a file appears there whole, or not at all.

======================  ===============================  ==================================
\\                       CSV                              JSON, a row an object a line
======================  ===============================  ==================================
null                    nothing                          null
timestamp               2026-01-31T12:00:00.250Z         the same, as a string
bytes                   base64                           base64
struct, array, map      their JSON                       themselves
decimal                 all its digits                   a number with all its digits
NaN, infinity           NaN, Infinity, -Infinity         the same, as strings
======================  ===============================  ==================================
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from headrace.errors import InvalidArgument
from headrace.spark.json_texts import EXACT

Format = Literal["table", "csv", "json", "parquet"]
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_ROWS = 10_000
_PLAIN = {
    *("boolean", "byte", "short", "integer", "long", "float", "double", "decimal", "string"),
    *("binary", "date", "timestamp", "timestamp_ntz"),
}
"""Types that Arrow, Parquet and Python all know. Others (intervals, variants, …) are shown as text."""


class ResultRows(NamedTuple):
    """Some rows, to be shown."""

    batch: pa.RecordBatch
    is_all: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.batch.schema.names)

    @classmethod
    def of(cls, columns: dict[str, list[Any]]) -> ResultRows:
        """Rows that do not come from Spark."""
        return cls(pa.RecordBatch.from_pydict(columns))


# --- fetching -----------------------------------------------------------------------------------------
def fetch(frame: DataFrame, limit: int | None) -> ResultRows:
    """The first rows, or all of them."""
    if not frame.columns:
        return ResultRows.of({})
    plain = _plain(frame)
    found = (plain if limit is None else plain.limit(limit + 1)).toArrow()
    is_all = limit is None or found.num_rows <= limit
    columns = [each.combine_chunks() for each in found.slice(0, limit).columns]
    return ResultRows(pa.RecordBatch.from_arrays(columns, names=frame.columns), is_all)


def _plain(frame: DataFrame) -> DataFrame:
    """Columns with names that differ, and of types that everybody knows."""
    fields = frame.schema.fields
    frame = frame.toDF(*(f"c{number}" for number in range(len(fields))))
    return frame.select(
        *(
            F.col(name) if _is_plain(field.dataType) else F.col(name).cast("string").alias(name)
            for name, field in zip(frame.columns, fields, strict=True)
        )
    )


def _is_plain(type_: DataType) -> bool:
    kind = type_.typeName()
    inner: list[Any] = []
    if kind == "struct":
        inner = [field.dataType for field in type_.fields]  # type: ignore[attr-defined]
    elif kind == "array":
        inner = [type_.elementType]  # type: ignore[attr-defined]
    elif kind == "map":
        inner = [type_.keyType, type_.valueType]  # type: ignore[attr-defined]
    elif kind.startswith("decimal"):
        return True
    else:
        return kind in _PLAIN
    return all(map(_is_plain, inner))


class Spool(NamedTuple):
    """A result on disk, to be read once and removed."""

    folder: Path
    names: list[str]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in order. One batch at least, so that a result without rows has its columns."""
        if not self.names:  # of a command, which has been carried out
            return
        schema = None
        # The number of the task that wrote it is in a file's name.
        for path in sorted(self.folder.glob("part-*.parquet")):
            with pq.ParquetFile(path) as file:
                if schema is None:
                    fields = zip(file.schema_arrow, self.names, strict=True)
                    schema = pa.schema([field.with_name(name) for field, name in fields])
                for batch in file.iter_batches(_ROWS):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
        assert schema is not None, "Spark writes a file even if there is no row"
        yield pa.RecordBatch.from_pylist([], schema=schema)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def spool(frame: DataFrame, limit: int | None = None) -> Spool:
    """Lets Spark write the result, or its first rows."""
    found = Spool(Path(tempfile.mkdtemp(prefix="headrace-sql-")), frame.columns)
    if found.names:
        plain = _plain(frame)
        with _exact_times(frame):
            (plain if limit is None else plain.limit(limit)).write.mode("overwrite").parquet(
                found.folder.as_uri()
            )
    return found


@contextmanager
def _exact_times(frame: DataFrame) -> Iterator[None]:
    """Spark's default for Parquet is an old form of times that knows no zone and ends in 2262."""
    conf, name = frame.sparkSession.conf, "spark.sql.parquet.outputTimestampType"
    before = str(conf.get(name))
    conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        conf.set(name, before)


# --- formats ------------------------------------------------------------------------------------------
Batches = Iterable[pa.RecordBatch]


def cells(batch: pa.RecordBatch) -> list[list[str | None]]:
    """The columns as texts: what CSV has, and what a table shows."""
    return [EXACT.cells(column).to_pylist() for column in batch.columns]


def _write_csv(batches: Batches, stream: IO[bytes]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, batch in enumerate(batches):
        if not number:
            writer.writerow(batch.schema.names)
        writer.writerows(zip(*cells(batch), strict=True))
        stream.write(text.getvalue().encode())
        text.seek(0)
        text.truncate()


def _write_json(batches: Batches, stream: IO[bytes]) -> None:
    """A row is an object on a line of its own; a null is written, so that all rows have all columns."""
    for batch in batches:
        stream.writelines([f"{row}\n".encode() for row in EXACT.rows(batch).to_pylist()])


def _write_parquet(batches: Batches, stream: IO[bytes]) -> None:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        return  # a command has no rows, and not even columns
    with pq.ParquetWriter(stream, first.schema, compression="zstd") as writer:
        waiting = [first]
        for batch in batches:
            waiting.append(batch)
            if sum(each.num_rows for each in waiting) >= 10 * _ROWS:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
        if any(each.num_rows for each in waiting):
            writer.write_table(pa.Table.from_batches(waiting))


_WRITERS: dict[str, Callable[[Batches, IO[bytes]], None]] = {
    "csv": _write_csv,
    "json": _write_json,
    "parquet": _write_parquet,
}


def check_names(names: Sequence[str], format_: Format) -> None:
    """A CSV may have two columns of one name; the others have no way to say so."""
    if format_ == "csv":
        return
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidArgument(
            f"two columns are called {twice[0]!r}: tell them apart with AS", code="invalid_sql"
        )


def write(batches: Iterator[pa.RecordBatch], stream: IO[bytes], format_: Format) -> int:
    """All rows; how many they were."""
    count = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for batch in batches:
            count += batch.num_rows
            yield batch

    _WRITERS[format_](counted(), stream)
    stream.flush()
    return count


def format_of(format_: str | None, output: Path | None) -> Format:
    """As said, else by the file's name, else a table."""
    if format_ is None:
        if output is None:
            return "table"
        if output.suffix.lower() not in ENDINGS:
            raise InvalidArgument(f"say with --format what {output} is to be: csv, json or parquet")
        return ENDINGS[output.suffix.lower()]
    if format_ not in ("table", *_WRITERS):
        raise InvalidArgument(f"--format is table, csv, json or parquet, not {format_!r}")
    found: Any = format_
    return found  # type: ignore[no-any-return]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that is replaced by a whole new one, or stays as it was."""
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with half.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(half, path)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        half.unlink(missing_ok=True)

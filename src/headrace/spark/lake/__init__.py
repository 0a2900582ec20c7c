"""Lake tables, written exactly once: Delta and Iceberg. No jar, no service.

::

    table       what both formats share: options, files, descriptions, the lock
    tables      which format a path holds
    stores      directories and object stores: paths, file systems, errors
    delta       through deltalake
    iceberg     through pyiceberg
    schemas     Spark to Arrow, and what may be added to a table
    offsets     ranges of offsets: what an archive holds
    merging     upserts: rows that replace others by their key
    writing     Arrow batches to Parquet files, on executors
    sink        the Spark data source over all of it
    scan        the same for reading, where Spark itself cannot reach the files

Exactly once: executors write files that no reader sees, named so that no two attempts share one. The
driver adds the files of a batch to the table in one atomic commit, which carries the query's id and
the batch's number and is not made twice. So whatever is killed whenever, the table holds each batch
once: before the commit it holds nothing of the batch, after the commit it holds all of it, and a
repeated commit changes nothing. ``vacuum`` deletes what failed attempts leave, after a day.

A query's id lives in its checkpoint. With a new checkpoint (or another ``app_id``) a query is another
writer: what it reads again it writes again, unless the table keeps ``offsets`` and refuses them.

Tables lie in an object store (``s3://``, ``abfss://``, ``gs://``), or on a file system with locks that the driver and
all executors share.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.table import KEEP_S, KINDS, Compacted, Description, Options
from headrace.spark.lake.tables import find_table, open_table
from headrace.spark.sessions.active_session import active, start_query
from headrace.spark.sessions.arrow_batches import unmeasured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "KINDS",
    "Compacted",
    "Description",
    "Offsets",
    "Options",
    "Span",
    "compact",
    "describe",
    "prepare",
    "read",
    "start",
    "vacuum",
    "write",
]


class TableChoice(TypedDict, total=False):
    """How a table is written: the last arguments of ``prepare``."""

    kind: str
    partition_by: Sequence[str]
    options: Mapping[str, Any] | None


def start(
    df: DataFrame,
    *,
    name: str | None = None,
    path: str,
    checkpoint: str,
    trigger: Mapping[str, Any] | None = None,
    mode: str = "append",
    **table: Unpack[TableChoice],
) -> StreamingQuery:
    """Start a query that adds its rows to a table, or merges them into it, exactly once.

    ``options`` are those of :class:`Options`. The table is created, or checked against the rows, before
    the query starts.
    """
    from headrace.spark.lake.sink import FORMAT

    chosen = prepare(df, path=path, **table)
    options = chosen.as_options()
    return start_query(df, FORMAT, options, checkpoint, name=name, trigger=trigger, mode=mode)


def write(df: DataFrame, *, path: str, **table: Unpack[TableChoice]) -> None:
    """Add the rows of a batch in one commit. Repeated with the same ``app_id`` it adds nothing."""
    from headrace.spark.lake.sink import FORMAT

    chosen = prepare(df, path=path, **table)
    writer = df.write.format(FORMAT).options(**chosen.as_options())
    with active(df.sparkSession), unmeasured(df.sparkSession):
        writer.mode("append").save()


def prepare(
    df: DataFrame,
    *,
    path: str,
    kind: str = KINDS[0],
    partition_by: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Options:
    """Create the table, or check that these rows can be added to it; nothing is written yet."""
    from headrace.spark.lake.sink import table_schema

    given = {"path": path, "kind": kind, "partition_by": ",".join(partition_by)}
    chosen = Options.of({**(options or {}), **given})
    open_table(chosen).prepare(table_schema(chosen, df.schema))
    return chosen


def read(
    spark: SparkSession,
    path: str,
    kind: str | None = None,
    *,
    without: Collection[str] = (),
    **options: Any,
) -> DataFrame:
    """A table as it is now, of either format and without that format's jar.

    ``without``: the names of files that are left out, because they cannot be read.
    """
    table = find_table(path, kind, **options)
    schema = table.describe().schema
    if not table.is_local:  # Spark needs jars and credentials of its own for a store
        from headrace.spark.lake.sink import FORMAT

        with active(spark):
            return (
                spark.read.format(FORMAT)
                .options(**table.options.as_options(), without=json.dumps(sorted(without)))
                .schema(schema)
                .load()
            )
    left_out = {str(table.files_root / name) for name in without}
    paths = [each for each in table.paths() if each not in left_out]
    if not paths:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema).option("basePath", str(table.files_root))
    return reader.parquet(*paths).select(*schema.fieldNames())


def describe(path: str, kind: str | None = None, **options: Any) -> Description:
    """What a table holds: files, rows, bytes, schema, offset ranges."""
    return find_table(path, kind, **options).describe()


def compact(
    path: str, kind: str | None = None, *, target_bytes: int | None = None, **options: Any
) -> Compacted:
    """Join small files. Readers see the old files or the new ones, never both."""
    table = find_table(path, kind, **options)
    return table.compact(target_bytes or table.options.target_file_bytes)


def vacuum(path: str, kind: str | None = None, *, keep_s: float = KEEP_S, **options: Any) -> int:
    """Delete files of failed attempts and files that were joined, older than ``keep_s``; how many."""
    return find_table(path, kind, **options).vacuum(keep_s)

"""The lake sink: executors write files, the driver commits them. ``format("headrace_lake")``.

One class for streams and one for batches over the same work. ``write`` runs on executors and touches
only files with names of its own; ``commit`` runs in the driver and is the only thing that changes the
table, once for each (writer, batch). When Spark repeats a batch after a crash, its files are new ones;
the commit finds that the number was committed, and leaves them to ``vacuum``.

``abort`` may be called after a commit whose answer was lost. So it deletes only files that the table
does not name.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.errors import HeadraceError, InvalidArgument, refused_by_disk
from headrace.spark.checkpoints import sync_offsets
from headrace.spark.lake import schemas
from headrace.spark.lake.merging import DELETED, write_changes
from headrace.spark.lake.scan import LakeReader
from headrace.spark.lake.table import KEEP_S, Options, Table, WrittenFiles
from headrace.spark.lake.tables import open_table
from headrace.spark.versions import StreamArrowWriter

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "headrace_lake"
TIER = 8
"""Every compaction joins the files below 1/64 of the target size, every eighth those below 1/8, and
every sixty-fourth all that are smaller. So a file is rewritten a few times while it grows, not with
every compaction."""
VACUUM_EVERY = 10
"""Compactions of an Iceberg table between two looks for old snapshots."""
logger = logging.getLogger(__name__)


@dataclass
class TaskFiles(WriterCommitMessage):
    """What a task wrote, and for which query."""

    query_id: str | None
    written: list[WrittenFiles]
    """In the order of the rows."""


class LakeSource(DataSource):
    """``format("headrace_lake")``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return open_table(Options.of(self.options)).shape()[0]

    def reader(self, schema: StructType) -> LakeReader:
        given = dict(self.options)
        without = json.loads(given.pop("without", "[]"))
        return LakeReader(Options.of(given), schema, without)

    def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:
        options = Options.of(self.options)
        if overwrite and not options.merge_on:
            raise InvalidArgument(
                "a lake table is appended to: use outputMode('append'), or mergeOn",
                code="invalid_option",
            )
        return LakeStreamWriter(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> LakeWriter:
        if overwrite:
            raise InvalidArgument(
                "a lake table is appended to: use mode('append')", code="invalid_option"
            )
        options = Options.of(self.options)
        open_table(options).prepare(table_schema(options, schema))
        return LakeWriter(options, schema)


def table_schema(options: Options, schema: StructType) -> StructType:
    """The columns of the table: all but the mark of rows that are deleted."""
    if not options.merge_on:
        return schema
    return StructType([field for field in schema.fields if field.name != DELETED])


def write_files(
    table: Table, schema: StructType, batches: Iterator[pa.RecordBatch], label: str
) -> list[WrittenFiles]:
    """Write all rows into files of the table's directory. They are not in the table yet."""
    options = table.options
    arrow = schemas.to_arrow(table_schema(options, schema))
    if not options.merge_on:
        return [table.file_writer(arrow, label).write_all(batches)]
    return write_changes(
        batches,
        options.rule,
        arrow,
        lambda rows: table.file_writer(arrow, label).write_all(rows),
        lambda keys: table.write_keys(keys, label),
    )


def commit_files(table: Table, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
    """Make these files part of the table; False when this number was committed before."""
    if table.options.merge_on:
        return table.merge(app_id, number, written)
    return table.commit(app_id, number, written)


class _Writing:
    """What both writers share."""

    def __init__(self, options: Options, schema: StructType):
        self.options = options
        self.schema = self.incoming = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskFiles:
        """On an executor."""
        context = TaskContext.get()
        query_id, label = None, "part"
        if context is not None:
            query_id = context.getLocalProperty("sql.streaming.queryId")
            batch = context.getLocalProperty("streaming.sql.batchId")
            number = f"{int(batch):09d}" if batch is not None else "batch"
            label = f"{number}-{context.partitionId():05d}"
        rows = self.rows(iterator)
        return TaskFiles(query_id, write_files(open_table(self.options), self.schema, rows, label))

    def rows(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that are written, of those that Spark hands over."""
        return iterator

    def _written(self, messages: Sequence[WriterCommitMessage | None]) -> list[WrittenFiles]:
        """Of each task that wrote any rows."""
        return [
            written
            for message in messages
            if isinstance(message, TaskFiles)
            for written in message.written
            if written.paths
        ]

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        if written := self._written(messages):
            open_table(self.options).forget(written)


class LakeStreamWriter(_Writing, StreamArrowWriter):
    """Of a streaming query."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = self._written(messages)
        if not written:
            return
        query_ids = {message.query_id for message in messages if isinstance(message, TaskFiles)}
        app_id = self.options.app_id or next(iter(query_ids))
        if app_id is None:
            raise InvalidArgument(
                "the query has no id here: set the option appId", code="invalid_option"
            )
        table = open_table(self.options)
        try:
            sync_offsets(self.options.checkpoint_location, batchId)
            is_new = commit_files(table, app_id, batchId, written)
        except OSError as error:
            raise refused_by_disk(error) from error
        if is_new:
            upkeep(table, batchId)


class LakeWriter(_Writing, DataSourceArrowWriter):
    """Of a batch: one commit, under ``appId`` or a name of its own."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if written := self._written(messages):
            table = open_table(self.options)
            commit_files(table, self.options.app_id or uuid.uuid4().hex, 0, written)


def upkeep(table: Table, number: int) -> None:
    """Now and then, after a commit: join small files. A failure here fails no batch."""
    every = table.options.compact_every
    if not every or (number + 1) % every:
        return
    times = (number + 1) // every
    tier = 1 if times % TIER**2 == 0 else TIER if times % TIER == 0 else TIER**2
    try:
        table.compact(table.options.target_file_bytes // tier)
        # Delta's history is left to its users: 'headrace archive compact --vacuum' deletes it. Iceberg
        # writes all snapshots with every commit, so they must not become many; and every merge leaves the
        # files that it replaced.
        keeps_less = table.kind == "iceberg" or table.options.merge_on
        if keeps_less and times % VACUUM_EVERY == 0:
            table.vacuum(KEEP_S)
    except (HeadraceError, OSError) as error:
        logger.warning("%s was not compacted: %s", table.path, error)

"""The lake sink: executors write files, the driver commits them. ``format("headrace_lake")``.

One class for streams and one for batches over the same work. ``write`` runs on executors and touches
only files with names of its own; ``commit`` runs in the driver and is the only thing that changes the
table, once for each (writer, batch). When Spark repeats a batch after a crash, its files are new ones;
the commit finds that the number was committed, and leaves them to ``vacuum``.

``abort`` may be called after a commit whose answer was lost. So it deletes only files that the table
does not name.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.errors import HeadraceError, InvalidArgument, refused_by_disk
from headrace.spark.checkpoints import sync_offsets
from headrace.spark.lake import schemas
from headrace.spark.lake.table import KEEP_S, Options, Table, WrittenFiles
from headrace.spark.lake.tables import open_table
from headrace.spark.lake.writing import FileWriter

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
    written: WrittenFiles


class LakeSource(DataSource):
    """``format("headrace_lake")``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:
        if overwrite:
            raise InvalidArgument(
                "a lake table is appended to: use outputMode('append')", code="invalid_option"
            )
        return LakeStreamWriter(Options.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> LakeWriter:
        if overwrite:
            raise InvalidArgument(
                "a lake table is appended to: use mode('append')", code="invalid_option"
            )
        options = Options.of(self.options)
        open_table(options).prepare(schema)
        return LakeWriter(options, schema)


def write_files(
    table: Table, schema: StructType, batches: Iterator[pa.RecordBatch], label: str
) -> WrittenFiles:
    """Write all rows into files of the table's directory. They are not in the table yet."""
    options = table.options
    writer = FileWriter(
        table.files_root,
        schemas.to_arrow(schema),
        options.partition_by,
        label=label,
        keep_partition_columns=table.keeps_partition_columns,
        offsets=options.offsets,
        target_file_bytes=options.target_file_bytes,
        compression=options.compression,
    )
    return writer.write_all(batches)


class _Writing:
    """What both writers share."""

    def __init__(self, options: Options, schema: StructType):
        self.options = options
        self.schema = schema

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
            message.written
            for message in messages
            if isinstance(message, TaskFiles) and message.written.files
        ]

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        if written := self._written(messages):
            open_table(self.options).forget(written)


class LakeStreamWriter(_Writing, DataSourceStreamArrowWriter):
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
            is_new = table.commit(app_id, batchId, written)
        except OSError as error:
            raise refused_by_disk(error) from error
        if is_new:
            upkeep(table, batchId)


class LakeWriter(_Writing, DataSourceArrowWriter):
    """Of a batch: one commit, under ``appId`` or a name of its own."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if written := self._written(messages):
            open_table(self.options).commit(self.options.app_id or uuid.uuid4().hex, 0, written)


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
        # writes all snapshots with every commit, so they must not become many.
        if table.kind == "iceberg" and times % VACUUM_EVERY == 0:
            table.vacuum(KEEP_S)
    except (HeadraceError, OSError) as error:
        logger.warning("%s was not compacted: %s", table.path, error)

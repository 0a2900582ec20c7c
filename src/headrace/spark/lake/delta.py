"""A Delta table, through ``deltalake`` (Rust, no jar).

Executors write Parquet files into the table's directory, where no reader looks for them before the
Delta log names them. The driver adds all files of a batch in one Delta transaction that carries
``txn(appId, version)``: Delta's own idempotence, which every Delta engine understands.

The offset ranges of the whole table stand in the ``commitInfo`` of each commit that Headrace makes
(``headrace.offsets``), so the newest one that has them is the manifest: atomic with the files, and no
file beside the log can disagree with it.

Small files are joined by Delta's own ``optimize``. A query may commit meanwhile: Delta orders the two
by itself.

deltalake does not sync the files that it writes. They are synced here after the commit, before Spark
gets an answer. A power cut between the two (not a crash of the process) may lose the log entry, and then
the batch is repeated; it may also leave an empty entry, or one whose joined files are incomplete, which
Delta reports as damage. The files that were joined are kept for a day, so ``restore`` to the version
before brings all rows back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound
from headrace.spark.durable import sync
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import Compacted, Description, Table, WrittenFiles, check_offsets

NOTE = "headrace.offsets"


class DeltaLakeTable(Table):
    """See the head of this file."""

    kind = "delta"

    @property
    def files_root(self) -> Path:
        return self.path

    def exists(self) -> bool:
        return DeltaTable.is_deltatable(str(self.path))

    def _load(self) -> DeltaTable:
        try:
            return DeltaTable(str(self.path))
        except TableNotFoundError:
            raise NotFound(f"{self.path} is no Delta table", code="table_not_found") from None
        except DeltaError as error:
            raise HeadraceError(f"{self.path}: {error}", code="table_unreadable") from error

    # --- writing --------------------------------------------------------------------------------
    def _create(self, schema: pa.Schema) -> None:
        try:
            DeltaTable.create(
                str(self.path),
                schema=Schema.from_arrow(schema),
                partition_by=list(self.options.partition_by),
                mode="error",
            )
        except DeltaError as error:
            raise InvalidArgument(
                f"Delta cannot hold these columns: {error}", code="invalid_schema"
            ) from error
        self._sync(0)

    def _add_columns(self, schema: pa.Schema, names: Sequence[str]) -> None:
        table = self._load()
        fields: list[Field] = [
            each for each in Schema.from_arrow(schema).fields if each.name in names
        ]
        table.alter.add_columns(fields)
        self._sync(table.version())

    def commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        with self.locked():
            table = self._load()
            last = table.transaction_version(app_id)
            if last is not None and last >= number:
                return False
            offsets = Offsets()
            if self.options.offsets:
                offsets = check_offsets(_offsets(table), written, self.path)
            now_ms = time.time_ns() // 1_000_000
            actions: list[AddAction | RemoveAction] = [
                AddAction(
                    file.path, file.bytes, file.partition, now_ms, True, json.dumps(file.stats)
                )
                for each in written
                for file in each.files
            ]
            try:
                table.create_write_transaction(
                    actions,
                    "append",
                    table.schema(),
                    table.metadata().partition_columns,
                    commit_properties=CommitProperties(
                        custom_metadata=_note(offsets),
                        app_transactions=[Transaction(app_id, number)],
                    ),
                )
            except DeltaError as error:
                raise Conflict(f"Delta refused the commit to {self.path}: {error}") from error
            self._sync(table.version())
        return True

    def _sync(self, version: int) -> None:
        log = self.path / "_delta_log"
        sync(log / f"{version:020d}.json")
        sync(log)

    # --- reading --------------------------------------------------------------------------------
    def paths(self) -> list[str]:
        return list(self._load().file_uris())

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        table = self._load()
        schema = schemas.to_spark(pa.schema(table.schema()))
        return schema, tuple(table.metadata().partition_columns)

    def describe(self) -> Description:
        table = self._load()
        actions = pa.table(table.get_add_actions())
        schema, partition_by = self.shape()
        return Description(
            str(self.path),
            self.kind,
            table.version(),
            actions.num_rows,
            sum(count or 0 for count in actions["num_records"].to_pylist()),
            sum(actions["size_bytes"].to_pylist()),
            partition_by,
            _offsets(table),
            schema,
        )

    # --- upkeep ---------------------------------------------------------------------------------
    def _compact(self, target_bytes: int) -> Compacted:
        table = self._load()
        before, version = set(table.file_uris()), table.version()
        note = CommitProperties(custom_metadata=_note(_offsets(table)))
        try:
            done = table.optimize.compact(target_size=target_bytes, commit_properties=note)
        except DeltaError as error:
            raise Conflict(f"Delta refused to join files of {self.path}: {error}") from error
        if not done["numFilesRemoved"]:
            return Compacted()
        for path in {*table.file_uris()} - before:
            sync(Path(path))
            sync(Path(path).parent)
        for number in range(version + 1, table.version() + 1):
            self._sync(number)
        return Compacted(done["numFilesRemoved"], done["numFilesAdded"])

    def vacuum(self, keep_s: float) -> int:
        table = self._load()
        deleted = table.vacuum(
            retention_hours=int(keep_s // 3600),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
        )
        return len(deleted)


def _note(offsets: Offsets) -> dict[str, Any]:
    return {NOTE: offsets.as_text()} if offsets else {}


def _offsets(table: DeltaTable) -> Offsets:
    """The ranges that the newest commit of a writer notes; commits of others may lie between.

    A compaction notes the ranges of the version that it read, and a writer may have committed since.
    A table never loses an offset, so what a compaction notes is only ever too little.
    """
    found = Offsets()
    for limit in (1, 20, None):
        for commit in table.history(limit):
            if NOTE in commit:
                found.add_all(Offsets.of_text(commit[NOTE]))
                if commit["operation"] != "OPTIMIZE":
                    return found
    return found

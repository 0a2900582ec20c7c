"""A Delta table, through ``deltalake`` (Rust, no jar).

Executors write Parquet files into the table's directory, where no reader looks for them before the
Delta log names them. The driver adds all files of a batch in one Delta transaction that carries
``txn(appId, version)``: Delta's own idempotence, which every Delta engine understands.

The offset ranges of the whole table stand in the ``commitInfo`` of each commit that we make
(``headrace.offsets``), so the newest one that has them is the manifest: atomic with the files, and no
file beside the log that could disagree with it.

deltalake does not sync what it writes. The log entry is synced here after the commit and before Spark
hears of it; between the two a power cut (not a crash of the process) may lose the entry, and then the
batch is repeated as if it had never been, or leave an empty entry, which Delta reports as damage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import DataFile, Description, Table, check_offsets
from headrace.spark.lake.writing import partition_text

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
    def prepare(self, schema: StructType) -> None:
        options = self.options
        schemas.check_columns(schema, options.partition_by, offsets=options.offsets)
        wanted = schemas.to_arrow(schema)
        with self.locked():
            if not self.exists():
                try:
                    DeltaTable.create(
                        str(self.path),
                        schema=Schema.from_arrow(wanted),
                        partition_by=list(options.partition_by),
                        mode="error",
                    )
                except DeltaError as error:
                    raise InvalidArgument(
                        f"Delta cannot hold these columns: {error}", code="invalid_schema"
                    ) from error
                self._sync(0)
                return
            table = self._load()
            have = schemas.to_spark(pa.schema(table.schema()))
            merged = schemas.merged(
                have,
                table.metadata().partition_columns,
                schema,
                options.partition_by,
                merge=options.merge_schema,
                path=self.path,
            )
            new = merged.fieldNames()[len(have) :]
            if new:
                delta = Schema.from_arrow(wanted)
                fields: list[Field] = [each for each in delta.fields if each.name in new]
                table.alter.add_columns(fields)
                self._sync(table.version())

    def commit(self, app_id: str, number: int, files: Sequence[DataFile]) -> bool:
        with self.locked():
            table = self._load()
            last = table.transaction_version(app_id)
            if last is not None and last >= number:
                return False
            offsets = _offsets(table, deep=self.options.offsets)
            if self.options.offsets:
                offsets = check_offsets(offsets, files, self.path)
            now_ms = time.time_ns() // 1_000_000
            self._write(
                table,
                [_added(file, now_ms) for file in files],
                CommitProperties(
                    custom_metadata=_note(offsets), app_transactions=[Transaction(app_id, number)]
                ),
            )
        return True

    def _write(
        self,
        table: DeltaTable,
        actions: list[AddAction | RemoveAction],
        properties: CommitProperties,
    ) -> None:
        try:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=properties,
            )
        except DeltaError as error:
            raise Conflict(f"Delta refused the commit to {self.path}: {error}") from error
        self._sync(table.version())

    def _sync(self, version: int) -> None:
        log = self.path / "_delta_log"
        handle = self._disk.open(log / f"{version:020d}.json")
        try:
            self._disk.sync(handle)
        finally:
            handle.close()
        self._disk.sync_directory(log)

    def last_number(self, app_id: str) -> int | None:
        return self._load().transaction_version(app_id)

    # --- reading --------------------------------------------------------------------------------
    def data_files(self) -> list[DataFile]:
        actions = pa.table(self._load().get_add_actions())
        return [
            DataFile(
                unquote(each["path"]),
                each["num_records"] or 0,
                each["size_bytes"],
                {
                    name: partition_text(value)
                    for name, value in (each.get("partition") or {}).items()
                },
            )
            for each in actions.to_pylist()
        ]

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        return _shape(self._load())

    def describe(self) -> Description:
        table = self._load()
        actions = pa.table(table.get_add_actions())
        schema, partition_by = _shape(table)
        return Description(
            str(self.path),
            self.kind,
            table.version(),
            actions.num_rows,
            sum(count or 0 for count in actions["num_records"].to_pylist()),
            sum(actions["size_bytes"].to_pylist()),
            partition_by,
            _offsets(table, deep=True),
            schema,
        )

    # --- upkeep ---------------------------------------------------------------------------------
    def exchange(self, old: Sequence[DataFile], new: DataFile) -> bool:
        with self.locked():
            table = self._load()
            there = set(map(unquote, pa.table(table.get_add_actions())["path"].to_pylist()))
            if not all(file.path in there for file in old):
                return False
            now_ms = time.time_ns() // 1_000_000
            self._write(
                table,
                [
                    *[RemoveAction(f.path, False, now_ms, f.bytes, f.partition) for f in old],
                    _added(new, now_ms, changes=False),
                ],
                CommitProperties(custom_metadata=_note(_offsets(table, deep=False))),
            )
        return True

    def vacuum(self, keep_s: float) -> int:
        table = self._load()
        deleted = table.vacuum(
            retention_hours=int(keep_s // 3600),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
        )
        return len(deleted)


def _added(file: DataFile, now_ms: int, *, changes: bool = True) -> AddAction:
    stats = json.dumps(file.stats)
    return AddAction(file.path, file.bytes, file.partition, now_ms, changes, stats)


def _note(offsets: Offsets) -> dict[str, Any]:
    return {NOTE: offsets.as_text()} if offsets else {}


def _shape(table: DeltaTable) -> tuple[StructType, tuple[str, ...]]:
    schema = schemas.to_spark(pa.schema(table.schema()))
    return schema, tuple(table.metadata().partition_columns)


def _offsets(table: DeltaTable, *, deep: bool) -> Offsets:
    """From the newest commit that says something of them.

    Every commit of ours does, once one has. Others' commits may be between; whoever needs to be sure
    looks ``deep``, through all of the history if it must be.
    """
    for limit in (1, 20, None) if deep else (1, 20):
        for commit in table.history(limit):
            if NOTE in commit:
                return Offsets.of_text(commit[NOTE])
    return Offsets()

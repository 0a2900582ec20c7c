"""A table of plain Parquet files with a small commit log of its own.

::

    <path>/
      topic=orders/date=2026-01-31/<file>.parquet     what everybody may read
      _headrace/
        files/topic=orders/date=2026-01-31/<file>.held    the same files, by their first name
        log/00000000000000000012.json                     one commit each: what it adds and removes
        log/00000000000000000010.checkpoint.json          all commits up to 10, added up
        linked                                            up to which commit the links are made
        lock                                              held while a commit is made

Executors write into ``files``; nothing there counts before a commit names it. A commit is one file
of the log that appears whole (written aside, synced, renamed, its directory synced): that rename is
the moment. Then each file gets a second name, a hard link, in the open directory: no byte is copied.
If the driver dies between the two, whoever opens the table for writing next makes the links.

What readers see:
- By the log (``headrace.spark.lake.read``): whole commits, always, and a
  reader that has listed files keeps them for a day (``KEEP_S``), whatever is compacted meanwhile.
- Plain readers of the directory (``spark.read.parquet``, DuckDB, pandas): never a row of a failed or
  repeated attempt, never a file half written. But links are made one after the other, so for an
  instant half a commit is visible, and while files are joined some rows may be seen twice or, after
  a crash at that point, until the next commit.
``_headrace`` is skipped by Spark, Hive and pyarrow for its underscore, and the files in it end in
``.held`` so that a glob for ``*.parquet`` does not find them twice.

A commit carries (writer, number) and is refused quietly when that number is there: a batch that is
repeated after a crash adds nothing. Two processes may write: each commit is made under the lock, on
the newest version.

Rejected: Spark's own file sink. It is fast and exactly-once with its ``_spark_metadata``, but its list
cannot hold offset ranges, files cannot be joined behind its back, only Spark honours it (all others
see the files of failed attempts too), and a new checkpoint over an old directory silently skips
batches whose numbers it finds there. Renaming staged files into place at the commit was rejected for
compaction: a file that plain readers must not see any more is one that a reader by the log may still
want, so it needs two names.
The file system must have hard links and locks (ext4, xfs, btrfs, zfs, NFSv4). Copy a table with
``cp -a`` or ``rsync -H``, so that links stay links.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType

from headrace.errors import DataCorrupt, InvalidArgument, NotFound
from headrace.spark.lake import schemas
from headrace.spark.lake.disk import Disk
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import (
    DataFile,
    Description,
    Options,
    Table,
    check_offsets,
)

FORMAT = 1
CHECKPOINT_EVERY = 20
HELD = ".held"


@dataclass(frozen=True)
class State:
    """All commits added up."""

    version: int = -1
    schema: StructType = field(default_factory=StructType)
    partition_by: tuple[str, ...] = ()
    files: dict[str, DataFile] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    """The last number of each."""
    offsets: Offsets = field(default_factory=Offsets)

    def after(self, entry: dict[str, Any]) -> State:
        files = dict(self.files)
        for path in entry.get("remove", ()):
            files.pop(path, None)
        added = [_file_of(document) for document in entry.get("add", ())]
        files.update({file.path: file for file in added})
        writers, offsets = self.writers, self.offsets
        if entry.get("app") is not None:
            writers = {**writers, entry["app"]: entry["number"]}
            offsets = Offsets(offsets)
            for file in added:
                offsets.add_all(file.offsets)
        schema = self.schema
        if "schema" in entry:
            schema = StructType.fromJson(entry["schema"])
        return State(
            entry["version"],
            schema,
            tuple(entry.get("partition_by", self.partition_by)),
            files,
            writers,
            offsets,
        )

    def as_checkpoint(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "schema": self.schema.jsonValue(),
            "partition_by": list(self.partition_by),
            "add": [_document_of(file) for file in self.files.values()],
            "writers": self.writers,
            "offsets": self.offsets.as_document(),
        }

    @classmethod
    def of_checkpoint(cls, document: dict[str, Any]) -> State:
        files = [_file_of(each) for each in document["add"]]
        return cls(
            document["version"],
            StructType.fromJson(document["schema"]),
            tuple(document["partition_by"]),
            {file.path: file for file in files},
            dict(document["writers"]),
            Offsets.of_document(document["offsets"]),
        )


def _document_of(file: DataFile) -> dict[str, Any]:
    document: dict[str, Any] = {"path": file.path, "rows": file.rows, "bytes": file.bytes}
    if file.partition:
        document["partition"] = file.partition
    if file.offsets:
        document["offsets"] = file.offsets.as_document()
    return document


def _file_of(document: dict[str, Any]) -> DataFile:
    return DataFile(
        document["path"],
        document["rows"],
        document["bytes"],
        document.get("partition", {}),
        Offsets.of_document(document.get("offsets", {})),
    )


class ParquetTable(Table):
    """See the head of this file."""

    kind = "parquet"
    suffix = HELD

    def __init__(self, options: Options, disk: Disk | None = None):
        super().__init__(options, disk)
        self._log = self._home / "log"

    @property
    def files_root(self) -> Path:
        return self._home / "files"

    def exists(self) -> bool:
        return self._disk.is_directory(self._log) and bool(self._entries())

    # --- the log --------------------------------------------------------------------------------
    def _entries(self) -> dict[int, str]:
        """The commits by version."""
        found = {}
        for name in self._disk.names(self._log):
            stem, dot, end = name.partition(".")
            if dot and end == "json" and stem.isdigit():
                found[int(stem)] = name
        return found

    def state(self) -> State:
        """All that is committed now."""
        for _ in range(10):
            try:
                return self._read_state()
            except FileNotFoundError:  # an old commit was cleaned up between listing and reading
                continue
        raise DataCorrupt(f"the commit log of {self.path} changes faster than it can be read")

    def _read_state(self) -> State:
        if not self._disk.is_directory(self._log):
            raise NotFound(
                f"{self.path} is no Headrace table: it has no _headrace/log", code="table_not_found"
            )
        checkpoints = [
            int(name.partition(".")[0])
            for name in self._disk.names(self._log)
            if name.endswith(".checkpoint.json")
        ]
        state = State()
        if checkpoints:
            state = State.of_checkpoint(self._read(f"{max(checkpoints):020d}.checkpoint.json"))
        for version, name in sorted(self._entries().items()):
            if version <= state.version:
                continue
            if version != state.version + 1:
                raise DataCorrupt(
                    f"the commit log of {self.path} goes from {state.version} to {version}: "
                    "restore the missing file of _headrace/log"
                )
            state = state.after(self._read(name))
        if state.version < 0:
            raise NotFound(
                f"{self.path} is no Headrace table: its log is empty", code="table_not_found"
            )
        return state

    def _read(self, name: str) -> dict[str, Any]:
        path = self._log / name
        try:
            document = json.loads(self._disk.read_file(path))
        except ValueError as error:
            raise DataCorrupt(f"{path} is damaged: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise DataCorrupt(
                f"{path} is not of format {FORMAT}: it was written by a newer Headrace, or by hand"
            )
        return document

    def _write(self, state: State, entry: dict[str, Any]) -> State:
        """The commit itself. The lock is held."""
        entry = {"format": FORMAT, "version": state.version + 1, "time": _now_ms(), **entry}
        self._disk.make_directory(self._log)
        self._replace(self._log / f"{entry['version']:020d}.json", entry)
        state = state.after(entry)
        if state.version and state.version % CHECKPOINT_EVERY == 0:
            self._replace(
                self._log / f"{state.version:020d}.checkpoint.json", state.as_checkpoint()
            )
        return state

    def _replace(self, path: Path, document: dict[str, Any]) -> None:
        self._disk.replace(path, [json.dumps(document, separators=(",", ":")).encode()])

    # --- writing --------------------------------------------------------------------------------
    def prepare(self, schema: StructType) -> None:
        options = self.options
        schemas.check_columns(schema, options.partition_by, offsets=options.offsets)
        with self.locked():
            if not self.exists():
                self._refuse_foreign()
                document = schemas.all_nullable(schema).jsonValue()
                partition_by = list(options.partition_by)
                self._write(State(), {"schema": document, "partition_by": partition_by})
                return
            state = self.state()
            self._link(state)
            merged = schemas.merged(
                state.schema,
                state.partition_by,
                schema,
                options.partition_by,
                merge=options.merge_schema,
                path=self.path,
            )
            if merged != state.schema:
                self._write(state, {"schema": merged.jsonValue()})

    def _refuse_foreign(self) -> None:
        """A directory with files of somebody else is not taken over: plain readers would mix them."""
        strangers = [
            name for name in self._disk.names(self.path) if not name.startswith(("_", "."))
        ]
        if strangers:
            raise InvalidArgument(
                f"{self.path} is not empty ({strangers[0]}) and no Headrace table: give a path of "
                "its own",
                code="not_a_table",
            )

    def commit(self, app_id: str, number: int, files: Sequence[DataFile]) -> bool:
        with self.locked():
            state = self.state()
            self._link(state)  # what a crash may have left undone
            if state.writers.get(app_id, -1) >= number:
                return False
            if self.options.offsets:
                check_offsets(state.offsets, files, self.path)
            entry = {"app": app_id, "number": number, "add": [_document_of(each) for each in files]}
            self._link(self._write(state, entry))
        return True

    def last_number(self, app_id: str) -> int | None:
        return self.state().writers.get(app_id)

    def _link(self, state: State) -> None:
        """Give the files of new commits their second name, and take it from those removed."""
        done = self._linked()
        if done >= state.version:
            return
        changes: dict[str, bool] = {}
        entries = self._entries()
        for version in range(done + 1, state.version + 1):
            if version not in entries:  # cleaned up: the state is all there is, and it is enough
                changes = dict.fromkeys(state.files, True)
                continue
            entry = self._read(entries[version])
            changes.update(dict.fromkeys([each["path"] for each in entry.get("add", ())], True))
            changes.update(dict.fromkeys(entry.get("remove", ()), False))
        touched = set()
        for path, there in changes.items():
            visible = self._visible(path)
            touched.add(visible.parent)
            if there:
                self._disk.make_directory(visible.parent)
                self._make_link(self.files_root / path, visible)
            elif self._disk.exists(visible):
                self._disk.remove(visible)
        for directory in sorted(touched):
            if self._disk.is_directory(directory):
                self._disk.sync_directory(directory)
        self._disk.replace(self._home / "linked", [b"%d\n" % state.version])

    def _make_link(self, source: Path, target: Path) -> None:
        try:
            self._disk.link(source, target)
        except FileExistsError:
            pass  # a crash came after this one
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK):
                raise InvalidArgument(
                    f"the file system of {self.path} has no hard links ({error.strerror}); use "
                    "another one, or a Delta or Iceberg table",
                    code="no_hard_links",
                ) from error
            raise

    def _linked(self) -> int:
        try:
            return int(self._disk.read_file(self._home / "linked"))
        except (FileNotFoundError, ValueError):
            return -1

    def unseen(self) -> list[str]:
        state = self.state()
        if self._linked() < state.version:
            return []  # a commit is being made, or was broken off: the next one makes its links
        return [path for path in state.files if not self._is_linked(path)]

    def _is_linked(self, path: str) -> bool:
        return self._disk.is_same(self.files_root / path, self._visible(path))

    def _link_again(self, state: State) -> None:
        """What somebody has deleted or replaced in the open directory gets its name back."""
        for path in state.files:
            visible = self._visible(path)
            if not self._is_linked(path):
                self._disk.make_directory(visible.parent)
                if self._disk.exists(visible):
                    self._disk.remove(visible)
                self._make_link(self.files_root / path, visible)
                self._disk.sync_directory(visible.parent)

    def _visible(self, path: str) -> Path:
        return self.path / (path.removesuffix(HELD) + ".parquet")

    # --- reading --------------------------------------------------------------------------------
    def data_files(self) -> list[DataFile]:
        return list(self.state().files.values())

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        state = self.state()
        return state.schema, state.partition_by

    def describe(self) -> Description:
        state = self.state()
        return Description(
            str(self.path),
            self.kind,
            state.version,
            len(state.files),
            sum(file.rows for file in state.files.values()),
            sum(file.bytes for file in state.files.values()),
            state.partition_by,
            state.offsets,
            state.schema,
        )

    # --- upkeep ---------------------------------------------------------------------------------
    def exchange(self, old: Sequence[DataFile], new: DataFile) -> bool:
        with self.locked():
            state = self.state()
            if not all(file.path in state.files for file in old):
                return False
            for file in old:  # it is kept for a day from now on, not from when it was written
                self._disk.touch(self.files_root / file.path)
            entry = {"remove": [file.path for file in old], "add": [_document_of(new)]}
            self._link(self._write(state, entry))
        return True

    def vacuum(self, keep_s: float) -> int:
        """Files that no commit names, and commits that a checkpoint has added up."""
        oldest = time.time() - keep_s
        deleted = 0
        with self.locked():
            state = self.state()
            self._link(state)
            self._link_again(state)
            if self._disk.is_directory(self.files_root):
                for path in self._disk.walk(self.files_root):
                    name = path.relative_to(self.files_root).as_posix()
                    if name not in state.files and self._disk.modified(path) < oldest:
                        self._disk.remove(path)
                        deleted += 1
            self._clean_log(oldest)
        return deleted

    def _clean_log(self, oldest: float) -> None:
        """Everything before the last checkpoint but one: a reader may have just listed that."""
        names = self._disk.names(self._log)
        checkpoints = sorted(name for name in names if name.endswith(".checkpoint.json"))
        if len(checkpoints) < 2:
            return
        kept = int(checkpoints[-2].partition(".")[0])
        for name in names:
            version = name.partition(".")[0]
            path = self._log / name
            if version.isdigit() and int(version) < kept and self._disk.modified(path) < oldest:
                self._disk.remove(path)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Upserts: rows that replace others by their key, in both formats of tables, each batch once."""

import random
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from headrace.errors import Conflict, InvalidArgument
from headrace.spark import lake
from headrace.spark.lake import Options, merging, schemas, sink
from headrace.spark.lake.merging import DELETED, MergeRule
from headrace.spark.lake.table import Table
from headrace.spark.lake.tables import open_table
from tests.spark.lake.rig import append

kinds = pytest.mark.parametrize("kind", lake.KINDS)
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.int64())])


def table_of(path: Path, kind: str = "delta", **options: Any) -> Table:
    given = {"merge_on": "id", "compact_every": 0, **options}
    return open_table(Options.of({"path": str(path), "kind": kind, **given}))


def rows(*values: tuple[Any, ...]) -> pa.Table:
    """(id, name, at); a name that is None deletes."""
    found = pa.Table.from_pylist(
        [{"id": key, "name": name, "at": at} for key, name, at in values], SCHEMA
    )
    return found.append_column(DELETED, pc.is_null(found["name"]))


def merge(table: Table, number: int, *tasks: pa.Table, app: str = "query") -> bool:
    """One commit with the rows of several tasks, as the sink makes it."""
    schema = schemas.to_spark(tasks[0].schema)
    table.prepare(sink.table_schema(table.options, schema))
    written = [
        each
        for task in tasks
        for each in sink.write_files(table, schema, iter(task.to_batches()), "part")
    ]
    return sink.commit_files(table, app, number, written)


def content(table: Table) -> dict[Any, Any]:
    """The names by id; an id that the table holds twice is a mistake."""
    found: dict[Any, Any] = {}
    for path in table.paths():
        for row in pq.read_table(path, partitioning=None).to_pylist():
            assert row["id"] not in found
            found[row["id"]] = row["name"]
    return found


@kinds
def test_rows_replace_rows(tmp_path: Path, kind: str) -> None:
    """New keys are added, known keys are replaced, deleted keys are gone; other files stay as they are."""
    table = table_of(tmp_path, kind)
    assert merge(table, 0, rows((1, "a", 1), (2, "b", 1)), rows((3, "c", 1)))
    before = set(table.paths())
    assert merge(table, 1, rows((2, "B", 2), (4, "d", 2)))
    assert content(table) == {1: "a", 2: "B", 3: "c", 4: "d"}
    assert len(before & set(table.paths())) == 1
    assert merge(table, 2, rows((1, None, 3), (9, None, 3)))
    assert content(table) == {2: "B", 3: "c", 4: "d"}
    assert merge(table, 3, rows((8, None, 3)))
    assert table.describe().rows == 3


@kinds
def test_the_last_row_of_a_key_wins(tmp_path: Path, kind: str) -> None:
    """Within a task, between tasks, and after a deletion."""
    table = table_of(tmp_path, kind)
    merge(
        table,
        0,
        rows((1, "a", 1), (1, "b", 1), (2, "x", 1), (3, None, 1), (4, "y", 1)),
        rows((2, "y", 1), (3, "z", 1), (4, None, 1), (5, "k", 1)),
    )
    assert content(table) == {1: "b", 2: "y", 3: "z", 5: "k"}


@kinds
def test_order_by(tmp_path: Path, kind: str) -> None:
    """The greatest value wins, in the batch and against the table; of equal ones the later row."""
    table = table_of(tmp_path, kind, order_by="at")
    merge(table, 0, rows((1, "new", 5), (1, "old", 3), (2, "one", 5)), rows((2, "two", 5)))
    assert content(table) == {1: "new", 2: "two"}
    merge(table, 1, rows((1, "late", 4), (2, "same", 5), (3, "x", None)), rows((2, None, 1)))
    assert content(table) == {1: "new", 2: "same", 3: "x"}
    merge(table, 2, rows((1, None, 4), (2, None, 6), (3, "y", 0)))
    assert content(table) == {1: "new", 3: "y"}


@kinds
def test_a_batch_is_merged_once(tmp_path: Path, kind: str) -> None:
    """A repeated batch changes nothing, not even what a later batch replaced."""
    table = table_of(tmp_path, kind)
    merge(table, 0, rows((1, "a", 1)))
    merge(table, 1, rows((1, "b", 1)))
    assert not merge(table_of(tmp_path, kind), 0, rows((1, "a", 1)))
    assert not merge(table_of(tmp_path, kind), 1, rows((1, "a", 1)))
    assert content(table) == {1: "b"}
    assert merge(table, 0, rows((1, "c", 1)), app="another")
    assert content(table) == {1: "c"}


@kinds
def test_several_columns_as_key(tmp_path: Path, kind: str) -> None:
    """Keys of several columns and types, one of them a partition; a row may move to another partition."""
    schema = [
        ("id", pa.string()),
        ("shop", pa.binary()),
        ("day", pa.string()),
        ("name", pa.string()),
    ]

    def some(*values: tuple[str, bytes, str, str]) -> pa.Table:
        names = [name for name, _ in schema]
        return pa.Table.from_pylist(
            [dict(zip(names, value, strict=True)) for value in values], pa.schema(schema)
        )

    table = table_of(tmp_path, kind, merge_on="id,shop", partition_by="day")
    merge(
        table,
        0,
        some(
            ("a", b"\xff", "mon day/1", "1"),
            ("a\0", b"b", "mon day/1", "2"),
            ("a", b"\0b", "tue", "3"),
        ),
    )
    merge(table, 1, some(("a", b"\xff", "wed", "4"), ("a", b"\0b", "tue", "5")))
    found = [
        row
        for path in table.paths()
        for row in ds.dataset(path, partitioning=None, format="parquet").to_table().to_pylist()
    ]
    assert sorted((row["id"], row["shop"], row["name"]) for row in found) == [
        ("a", b"\0b", "5"),
        ("a", b"\xff", "4"),
        ("a\0", b"b", "2"),
    ]
    other = table_of(tmp_path / "other", kind, merge_on="id,day", partition_by="day")
    merge(other, 0, some(("a", b"", "mon day/1", "1"), ("a", b"", "tue", "2")))
    merge(other, 1, some(("a", b"", "mon day/1", "3")))
    assert other.describe().rows == 2


@kinds
def test_random_changes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches with small pieces and compactions between them: the table is what a dictionary is."""
    monkeypatch.setattr(merging, "CHUNK_BYTES", 200)
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    table = table_of(tmp_path, kind, target_file_bytes=64 * 1024)
    wanted: dict[int, str] = {}
    for number in range(12):
        tasks = []
        for _ in range(2):
            changes: list[tuple[Any, ...]] = []
            for _ in range(chance.randrange(1, 30)):
                key = chance.randrange(40)
                name = None if chance.random() < 0.2 else f"{number}-{chance.random()}"
                changes.append((key, name, number))
                if name is None:
                    wanted.pop(key, None)
                else:
                    wanted[key] = name
            tasks.append(rows(*changes))
        merge(table, number, *tasks)
        if number % 5 == 4:
            table.compact(1 << 20)
        assert content(table) == wanted, f"seed {seed}, batch {number}"
    table.vacuum(0)
    assert content(table) == wanted


@kinds
def test_another_writer_meanwhile(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit between the look at the table and the merge's own commit is merged with, too."""
    table = table_of(tmp_path, kind)
    merge(table, 0, rows((1, "a", 1)))
    plain = merging.Merge.exchange
    others: list[int] = []

    def exchange(self: Any, *arguments: Any) -> Any:
        found = plain(self, *arguments)
        if not others:
            others.append(1)
            monkeypatch.setattr(Table, "locked", lambda *_, **__: nullcontext())
            append(
                rows((2, "other", 1)).drop_columns([DELETED]),
                path=str(tmp_path), kind=kind, app_id="engine", number=0, compact_every=0,
            )  # fmt: skip
        return found

    monkeypatch.setattr(merging.Merge, "exchange", exchange)
    assert merge(table, 1, rows((1, "b", 1), (2, "mine", 1)))
    assert content(table) == {1: "b", 2: "mine"}


@kinds
def test_no_key(tmp_path: Path, kind: str) -> None:
    """A row without a key would be another row with every batch."""
    with pytest.raises(InvalidArgument, match="a row has no id") as caught:
        merge(table_of(tmp_path, kind), 0, rows((None, "a", 1)))
    assert caught.value.code == "merge_key_null"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"merge_on": "nr"}, "there is no column 'nr' to merge by; there are id, name, at"),
        ({"order_by": "nr"}, "there is no column 'nr' to merge by"),
        ({"offsets": True}, "a table that keeps offset ranges holds every row"),
        ({"merge_on": "", "order_by": "at"}, "give mergeOn as well"),
    ],
)
def test_mistakes(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        merge(table_of(tmp_path, **options), 0, rows((1, "a", 1)))


def test_kinds_of_keys() -> None:
    """What has no exact equality, or no plain text, is no key."""
    with pytest.raises(InvalidArgument, match="of type double cannot be a key"):
        MergeRule(("x",)).check(pa.schema([("x", pa.float64())]))


def test_files_that_cannot_hold_a_key_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics exclude them: of a table in ranges, a merge reads the range that it changes."""
    table = table_of(tmp_path)
    for number in range(3):
        first = number * 10
        merge(table, number, rows(*((key, "x", 1) for key in range(first, first + 10))))
    read: list[Path] = []
    plain = merging.Merge._kept

    def kept(self: Any, path: Path, *arguments: Any) -> Any:
        read.append(path)
        return plain(self, path, *arguments)

    monkeypatch.setattr(merging.Merge, "_kept", kept)
    merge(table, 3, rows((11, "y", 1)))
    assert len(read) == 1
    assert content(table)[11] == "y"


KILLED = """
    import os, sys
    from pathlib import Path
    from headrace.spark.lake import merging
    from tests.spark.lake import test_merging as rig

    path, kind, number, where = sys.argv[1:]
    table = rig.table_of(Path(path), kind)
    die = lambda *_: os.kill(os.getpid(), 9)
    if where == "before the commit":
        plain = merging.Merge.exchange
        merging.Merge.exchange = lambda *a: (plain(*a), die())
    rig.merge(table, int(number), rig.rows((1, f"v{number}", 1), (int(number) + 100, "n", 1), (99, None, 1)))
    die()
"""


@kinds
@pytest.mark.parametrize("where", ["before the commit", "after the commit"])
def test_killed(tmp_path: Path, kind: str, where: str) -> None:
    """A process that is killed in a merge leaves all or nothing of it; the repetition completes it."""
    table = table_of(tmp_path, kind)
    merge(table, 0, rows((1, "v0", 1), (99, "gone soon", 1)))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), kind, "1", where]
    ran = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    done = {1: "v1", 101: "n"}
    assert content(table) == (done if where == "after the commit" else {1: "v0", 99: "gone soon"})
    is_new = merge(table, 1, rows((1, "v1", 1), (101, "n", 1), (99, None, 1)))
    assert is_new is (where == "before the commit")
    assert content(table) == done


def test_conflicts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that changes all the time is an error that can be retried, not an endless loop."""
    table = table_of(tmp_path)
    merge(table, 0, rows((1, "a", 1)))

    def refuse(*_: object) -> None:
        raise Conflict("changed", retryable=True)

    monkeypatch.setattr("headrace.spark.lake.delta.DeltaMergeBase.replace", refuse)
    with pytest.raises(Conflict, match="changed"):
        merge(table, 1, rows((1, "b", 1)))

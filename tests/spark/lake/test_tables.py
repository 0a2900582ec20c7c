"""What both formats of tables promise: whole commits, each once, whatever is repeated."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound
from headrace.spark import lake
from headrace.spark.lake import Options, Span, schemas
from headrace.spark.lake import table as table_module
from headrace.spark.lake.tables import find_table, kind_of, open_table
from tests.spark.lake.rig import SCHEMA, add, append, offsets_of, rows, table_at, written

pytestmark = pytest.mark.parametrize("kind", lake.KINDS)


def test_commits_add_up(tmp_path: Path, kind: str) -> None:
    """Rows, files and ranges are those of all commits."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10), rows(0, 5, partition=1))
    assert add(table, 1, rows(10, 30), rows(0, 2, topic="other topic:x"))
    found = table_at(tmp_path, kind).describe()
    assert (found.kind, found.rows, found.partition_by) == (kind, 37, ("topic", "date"))
    assert list(found.offsets) == [
        Span("orders", 0, 0, 30),
        Span("orders", 1, 0, 5),
        Span("other topic:x", 0, 0, 2),
    ]
    assert found.schema == SCHEMA
    assert found.files == len(table.paths()) == 3
    names = {table.store().name(path) for path in table.paths()}
    assert names == {name for name, _ in table.sizes()}
    json.dumps(found.as_document())
    assert len(offsets_of(table)) == 37


def test_a_number_is_committed_once(tmp_path: Path, kind: str) -> None:
    """A repeated batch, written again to other files, changes nothing."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    assert add(table, 7, rows(0, 10))
    assert not add(table_at(tmp_path, kind), 7, rows(0, 10))
    assert not add(table_at(tmp_path, kind), 6, rows(10, 20))
    assert offsets_of(table) == list(range(10))


def test_writers_are_told_apart(tmp_path: Path, kind: str) -> None:
    """The same number of another query is another commit."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10), app="one")
    assert add(table, 0, rows(10, 20), app="two")
    assert offsets_of(table) == list(range(20))


def test_an_offset_is_not_held_twice(tmp_path: Path, kind: str) -> None:
    """A query with a new checkpoint that reads everything again is refused, and says why."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    add(table, 0, rows(0, 10))
    with pytest.raises(Conflict, match="holds orders/0@5-9 already") as caught:
        add(table, 0, rows(5, 15), app="new checkpoint")
    assert caught.value.code == "offsets_overlap"
    with pytest.raises(Conflict, match="orders/0@20 already"):
        add(table, 1, rows(20, 21, day=date(2026, 2, 1)), rows(20, 21))
    assert offsets_of(table) == list(range(10))


def test_what_is_not_committed_is_not_there(tmp_path: Path, kind: str) -> None:
    """Files of an attempt that died are in nobody's way, until they are vacuumed."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    add(table, 0, rows(0, 10))
    [dead] = written(table, rows(10, 20)).files
    assert offsets_of(table) == list(range(10))
    assert table.vacuum(keep_s=3600) == 0
    assert (table.files_root / dead.path).exists()
    assert table.vacuum(keep_s=0) == 1
    assert not (table.files_root / dead.path).exists()
    assert offsets_of(table) == list(range(10))


def test_an_abort_undoes_no_commit(tmp_path: Path, kind: str) -> None:
    """Files of a failed batch go; those of one that was committed after all stay."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    lost, kept = written(table, rows(0, 5)), written(table, rows(5, 10))
    table.commit("query", 0, [kept])
    table.forget([lost, kept])
    assert not (table.files_root / lost.files[0].path).exists()
    assert offsets_of(table) == list(range(5, 10))


def test_small_files_are_joined(tmp_path: Path, kind: str) -> None:
    """Each partition's files become one; rows, ranges and numbers stay."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    for number in range(4):
        start = number * 10
        add(table, number, rows(start, start + 10), rows(start, start + 3, topic="other topic:x"))
    before = table.describe()
    listed = table.paths()
    done = table.compact(1 << 27)
    assert (done.removed, done.added) == (8, 2)
    after = table.describe()
    assert (after.rows, after.offsets, after.files) == (before.rows, before.offsets, 2)
    assert len(offsets_of(table)) == 52
    assert all(Path(path).exists() for path in listed), "a reader may still be at them"
    assert table.compact(1 << 27) == lake.Compacted()
    assert not add(table, 3, rows(30, 40))
    assert add(table, 4, rows(40, 50))
    assert table.vacuum(keep_s=0) >= 8
    assert len(offsets_of(table)) == 62


def test_new_columns(tmp_path: Path, kind: str) -> None:
    """They are an error, unless they are wanted; then old rows have nulls there."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    add(table, 0, rows(0, 2))
    more = schemas.to_spark(schemas.to_arrow(SCHEMA).append(pa.field("colour", pa.string())))
    with pytest.raises(InvalidArgument, match="has no column colour string") as caught:
        table.prepare(more)
    assert caught.value.code == "schema_changed"
    table = table_at(tmp_path, kind, merge_schema=True)
    table.prepare(more)
    assert table.describe().schema.fieldNames()[-1] == "colour"
    table_at(tmp_path, kind).prepare(SCHEMA)  # who does not have it may go on
    assert add(table_at(tmp_path, kind), 1, rows(2, 4))
    table.prepare(more)
    batch = rows(4, 5).append_column("colour", pa.array(["red"]))
    assert append(
        pa.Table.from_batches([batch]),
        path=str(tmp_path),
        kind=kind,
        partition_by="topic,date",
        app_id="query",
        number=2,
        offsets=True,
    )
    assert offsets_of(table) == list(range(5))


def test_changed_columns(tmp_path: Path, kind: str) -> None:
    """Another type and another partitioning are refused with what to do."""
    table_at(tmp_path, kind).prepare(SCHEMA)
    arrow = schemas.to_arrow(SCHEMA)
    other = arrow.set(arrow.get_field_index("value"), pa.field("value", pa.string()))
    with pytest.raises(InvalidArgument, match=r"'value' of .* is binary, and would become string"):
        table_at(tmp_path, kind).prepare(schemas.to_spark(other))
    with pytest.raises(InvalidArgument, match="partitioned by topic, date, not by date"):
        table_at(tmp_path, kind, partition_by="date").prepare(SCHEMA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition_by": "colour"}, "'colour', which is no column"),
        ({"partition_by": "timestamp"}, "'timestamp' of type timestamp cannot name"),
        ({"partition_by": "headers"}, "cannot name directories"),
    ],
)
def test_partitions_that_cannot_be(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        table_at(tmp_path, kind, **options).prepare(SCHEMA)
    assert kind_of(tmp_path) is None or kind == "iceberg"


def test_offsets_need_their_columns(tmp_path: Path, kind: str) -> None:
    schema = schemas.to_spark(pa.schema([("offset", pa.string()), ("n", pa.int64())]))
    with pytest.raises(InvalidArgument, match="offset ranges need the columns"):
        table_at(tmp_path, kind, partition_by="").prepare(schema)


def test_a_table_of_another_kind(tmp_path: Path, kind: str) -> None:
    """Its directory is not written to."""
    table_at(tmp_path, kind).prepare(SCHEMA)
    other = "delta" if kind != "delta" else "iceberg"
    with pytest.raises(InvalidArgument, match=f"is a table of the kind {kind}, not {other}"):
        table_at(tmp_path, other)
    assert find_table(str(tmp_path)).kind == kind


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, kind: str) -> None:
    """A vacuum would delete files that are not the table's."""
    (tmp_path / "mine.parquet").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"not empty \(mine.parquet\)") as caught:
        table_at(tmp_path, kind).prepare(SCHEMA)
    assert caught.value.code == "not_a_table"


def test_one_writer_at_a_time(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and says so when it has waited too long."""
    monkeypatch.setattr(table_module, "LOCK_WAIT_S", 0.0)
    one = table_at(tmp_path, kind)
    one.prepare(SCHEMA)
    with one.locked(), pytest.raises(Conflict, match="another process is writing to"):
        add(table_at(tmp_path, kind), 0, rows(0, 1))
    assert add(one, 0, rows(0, 1))


def test_a_commit_while_files_are_joined(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both succeed, and the ranges are those of all commits, although the compaction knew only some."""
    one: Any = table_at(tmp_path, kind)
    one.prepare(SCHEMA)
    for number in range(3):
        add(one, number, rows(number * 10, number * 10 + 10))
    step = "_load" if kind == "delta" else "_join"
    original = getattr(one, step)

    def commit_meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        result = original(*arguments)
        add(table_at(tmp_path, kind), 3, rows(30, 40))
        return result

    monkeypatch.setattr(one, step, commit_meanwhile)
    assert one.compact(1 << 27) == lake.Compacted(3, 1)
    found = one.describe()
    assert (found.files, found.rows) == (2, 40)
    assert list(found.offsets) == [Span("orders", 0, 0, 40)]
    with pytest.raises(Conflict, match="holds orders/0@35-39 already"):
        add(one, 0, rows(35, 45), app="new checkpoint")


def test_two_compactions_at_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused: both would join the same files, and rows would be doubled."""
    one: Any = table_at(tmp_path, kind)
    one.prepare(SCHEMA)
    for number in range(3):
        add(one, number, rows(number * 10, number * 10 + 10))
    step = "_load" if kind == "delta" else "_join"
    original = getattr(one, step)

    def compact_meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        result = original(*arguments)
        with pytest.raises(Conflict, match="another process is joining files") as caught:
            table_at(tmp_path, kind).compact(1 << 27)
        assert (caught.value.code, caught.value.retryable) == ("table_locked", True)
        return result

    monkeypatch.setattr(one, step, compact_meanwhile)
    assert one.compact(1 << 27) == lake.Compacted(3, 1)
    assert (one.describe().files, offsets_of(one)) == (1, list(range(30)))


def test_no_table(tmp_path: Path, kind: str) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFound, match="there is no") as caught:
            find_table(str(path), kind)
        assert caught.value.code == "table_not_found"
    assert list(tmp_path.iterdir()) == []


def test_a_few_rows_without_spark(tmp_path: Path, kind: str) -> None:
    """``append`` makes the table, commits once, and leaves no file of a repetition."""
    table = pa.table({"name": ["a", "b"], "n": [1, 2]})
    path = str(tmp_path / "t")
    for expected in (True, False):
        added = append(table, path=path, kind=kind, app_id="me", number=5)
        assert added is expected
    found = lake.describe(path)
    assert (found.rows, found.files) == (2, 1)
    assert not found.offsets
    assert lake.vacuum(path, keep_s=0) == 0


def test_options(tmp_path: Path, kind: str) -> None:
    """Spelled as in Python or as in Spark, and back; a mistake is named."""
    given = {"path": str(tmp_path), "kind": kind, "partitionBy": "a, b", "merge_schema": "true"}
    secrets = {"catalog.uri": "sqlite://:very-secret@/"}
    if kind == "delta":
        secrets["storage.AWS_SECRET_ACCESS_KEY"] = "very-secret"
    options = Options.of({**given, **secrets, "checkpointLocation": "x"})
    assert options.partition_by == ("a", "b")
    assert options.merge_schema
    assert options.catalog_properties == (("uri", "sqlite://:very-secret@/"),)
    assert "very-secret" not in repr(options)
    told = options.as_options()
    assert [name for name, value in told.items() if "very-secret" in value] == ["lakeSecrets"]
    assert options.checkpoint_location == "x"
    assert Options.of(options.as_options()) == options
    for name, value, message in (
        ("colour", "red", "no option colour"),
        ("compact_every", "-1", "whole number from 0"),
        ("target_file_bytes", "small", "a size is a number of bytes"),
        ("compression", "rar", "one of gzip, lz4, none, snappy, zstd"),
        ("offsets", "yes", "true or false"),
        ("partition_by", "a,a", "twice"),
        ("app_id", "a b", "not valid"),
        ("path", "ftp://bucket/x", "not in an object store that Headrace knows"),
        ("path", "s3://bucket", "write s3://BUCKET/PATH"),
        ("path", "s3://bucket/x?sig=very", "put keys and tokens into the environment"),
        ("kind", "orc", "format of a table is one of delta, iceberg"),
    ):
        with pytest.raises(HeadraceError, match=message):
            Options.of({**given, name: value}).place  # noqa: B018
    if kind == "iceberg":
        with pytest.raises(InvalidArgument, match=r"use catalog\.s3\.endpoint"):
            Options.of({**given, "storage.aws_region": "x"})
        with pytest.raises(InvalidArgument, match="needs a catalog") as caught:
            open_table(Options.of({"path": "s3://bucket/x", "kind": kind}))
        assert caught.value.code == "catalog_missing"


def test_bare_parquet_files_are_refused(tmp_path: Path, kind: str) -> None:
    """The error says what to use instead."""
    with pytest.raises(InvalidArgument, match=f"use .*{kind}") as caught:
        Options.of({"path": str(tmp_path), "kind": "Parquet"})
    assert caught.value.code == "unsupported_format"

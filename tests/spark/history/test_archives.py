"""Which offsets files hold, going by their statistics, and by their rows where these do not tell."""

from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.spark.history.archives import offsets_of
from headrace.spark.history.files import why_unreadable
from headrace.spark.lake import Offsets, Span
from headrace.spark.lake.stores import FileStore
from headrace.spark.lake.table import TableSnapshot
from tests.spark.lake.rig import SCHEMA, add, rows, table_at


def snapshot_of(path: Path, kind: str, *, joined: bool = False) -> tuple[TableSnapshot, FileStore]:
    """Three commits of two partitions, and a fourth one."""
    table = table_at(path, kind)
    table.prepare(SCHEMA)
    for number in range(3):
        low, high = 10 * number, 10 * number + 10
        add(table, number, rows(low, high), rows(low, high, partition=1))
    if joined:
        table.compact(1 << 27)
    add(table, 3, rows(30, 35))
    return table.snapshot(), table.store()


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("joined", [False, True])
def test_what_a_lost_file_held(tmp_path: Path, kind: str, joined: bool) -> None:
    """All of it and nothing else, also if its box overlaps those of others."""
    snapshot, store = snapshot_of(tmp_path / "table", kind, joined=joined)
    held = Offsets()
    for file in snapshot.files:
        assert why_unreadable(store, file.name, footer=True) is None
        [found] = offsets_of([file], snapshot, store)
        assert found.count == file.rows
        held.add_all(found)
    assert held == snapshot.offsets
    everything = offsets_of(snapshot.files, snapshot, store)
    assert Offsets(span for each in everything for span in each) == held


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    """It is missing, or damaged in its footer or before it."""
    snapshot, store = snapshot_of(tmp_path / "table", "delta")
    name = snapshot.files[0].name
    path = Path(store.path(name))
    raw = path.read_bytes()
    assert why_unreadable(store, name) is None
    path.write_bytes(raw[:10] + bytes(200) + raw[210:])
    assert why_unreadable(store, name, footer=True) is None
    assert why_unreadable(store, name) == "is damaged"
    path.write_bytes(raw[: len(raw) // 2])
    assert why_unreadable(store, name, footer=True) == "is damaged"
    path.unlink()
    assert why_unreadable(store, name, footer=True) == "is missing"


def test_an_iceberg_table_that_was_moved(tmp_path: Path) -> None:
    """Its metadata names files by their full paths: the error says so, and a symbolic link helps."""
    table = table_at(tmp_path / "old", "iceberg")
    table.prepare(SCHEMA)
    add(table, 0, rows(0, 10))
    moved = tmp_path / "new" / "old"
    moved.parent.mkdir()
    (tmp_path / "old").rename(moved)
    with pytest.raises(HeadraceError, match="put a symbolic link at its old path") as caught:
        table_at(moved, "iceberg").describe()
    assert caught.value.code == "table_unreadable"
    (tmp_path / "old").symlink_to(moved)
    for path in (moved, tmp_path / "old"):
        again = table_at(path, "iceberg")
        assert again.describe().offsets == Offsets([Span("orders", 0, 0, 10)])
    add(again, 1, rows(10, 20))
    assert table_at(moved, "iceberg").describe().rows == 20

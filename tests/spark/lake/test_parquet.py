"""The commit log of plain Parquet tables: a power cut at every step, plain readers, the log's upkeep."""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import Conflict, DataCorrupt, InvalidArgument
from headrace.spark import lake
from headrace.spark.lake import Offsets, Options, Span, parquet, table
from headrace.spark.lake.disk import Disk
from headrace.spark.lake.parquet import ParquetTable
from headrace.spark.lake.table import DataFile
from headrace.testing import FaultyFiles
from tests.spark.lake.rig import (
    SCHEMA,
    SimulatedDisk,
    add,
    offsets_in,
    plainly_visible,
    rows,
    table_at,
)

HOME = Path("/lake")
OPTIONS = Options.of({"path": str(HOME), "offsets": True})
RUNS = 15


class FaultyDisk(FaultyFiles, Disk):
    """A disk whose nth change is the last thing that happens before the power fails."""

    def link(self, source: Path, target: Path) -> None:
        self._pass("create", target)
        self.inner.link(source, target)  # type: ignore[attr-defined]

    def touch(self, path: Path) -> None:
        self.inner.touch(path)  # type: ignore[attr-defined]


def file_of(number: int) -> DataFile:
    return DataFile(
        f"day={number % 2}/{number}.held",
        10,
        100,
        {"day": str(number % 2)},
        Offsets([Span("t", 0, number * 10, number * 10 + 10)]),
    )


def put(disk: SimulatedDisk, number: int) -> DataFile:
    """The data file of a batch, as an executor leaves it: synced."""
    file = file_of(number)
    disk.put(HOME / "_headrace" / "files" / file.path, b"rows %d" % number)
    return file


def visible(disk: SimulatedDisk) -> set[str]:
    return {
        str(path.relative_to(HOME))
        for path in disk.walk(HOME)
        if path.suffix == ".parquet" and "_headrace" not in path.parts
    }


def scenario(disk: Disk, simulated: SimulatedDisk, acknowledged: list[int]) -> None:
    """Five batches, with a compaction of the first two between them."""
    one = ParquetTable(OPTIONS, disk)
    one.prepare(SCHEMA)
    for number in range(5):
        if number == 3:
            old = [each for each in one.state().files.values() if each.path in OLD]
            if len(old) == 2:
                joined = replace(file_of(99), offsets=Offsets([Span("t", 0, 0, 20)]))
                simulated.put(HOME / "_headrace" / "files" / joined.path, b"joined")
                one.exchange(old, joined)
        one.commit("query", number, [put(simulated, number)])
        acknowledged.append(number)


OLD = {file_of(0).path, file_of(1).path}


def test_a_power_cut_at_every_step() -> None:
    """What was acknowledged is there, nothing is there twice, and the rest can be repeated."""
    simulated = SimulatedDisk()
    disk = FaultyDisk(simulated)
    scenario(disk, simulated, [])
    steps = len(disk.changes)
    assert steps > 60
    for step in range(1, steps + 1):
        for seed in range(3):
            simulated = SimulatedDisk()
            disk = FaultyDisk(simulated)
            disk.fail(None, step, repeat=True)
            acknowledged: list[int] = []
            with pytest.raises(OSError, match="Input/output error"):
                scenario(disk, simulated, acknowledged)
            simulated.crash(random.Random(f"{step}/{seed}"), ordered=bool(seed % 2))
            recovered = ParquetTable(OPTIONS, simulated)
            there = recovered.state() if recovered.exists() else parquet.State()
            assert there.writers.get("query", -1) >= max(acknowledged, default=-1), (step, seed)
            again: list[int] = []
            scenario(simulated, simulated, again)
            state = recovered.state()
            where = f"step {step}, seed {seed}"
            assert again == list(range(5)), where
            assert state.offsets == Offsets([Span("t", 0, 0, 50)]), where
            held = Offsets()
            for file in state.files.values():
                assert not held.common(file.offsets), where
                held.add_all(file.offsets)
                content = simulated.read_file(HOME / "_headrace" / "files" / file.path)
                assert content.startswith((b"rows", b"joined")), where
            assert held == state.offsets, where
            names = {path.replace(".held", ".parquet") for path in state.files}
            assert visible(simulated) == names, where


def test_plain_readers_see_committed_rows_only(tmp_path: Path) -> None:
    """Those who know nothing of the log see the same files by other names."""
    one = table_at(tmp_path)
    one.prepare(SCHEMA)
    add(one, 0, rows(0, 10))
    one.commit("query", 1, [])
    lost = lake.sink.write_files(one, SCHEMA, iter([rows(10, 20)]), "dead")  # type: ignore[attr-defined]
    [seen] = plainly_visible(tmp_path)
    assert seen.relative_to(tmp_path).parts[:2] == ("topic=orders", "date=2026-01-31")
    assert offsets_in([seen]) == list(range(10))
    assert seen.samefile(one.paths()[0])
    one.commit("query", 2, lost)
    one.compact(1 << 27)
    assert len(plainly_visible(tmp_path)) == 1
    assert offsets_in(plainly_visible(tmp_path)) == list(range(20))


def test_links_that_a_crash_left_out_are_made_later(tmp_path: Path) -> None:
    """The commit counts without them; the next writer makes them."""
    one = table_at(tmp_path)
    one.prepare(SCHEMA)
    add(one, 0, rows(0, 10))
    [seen] = plainly_visible(tmp_path)
    seen.unlink()
    (tmp_path / "_headrace" / "linked").write_text("0\n")
    assert offsets_in(one.paths()) == list(range(10))
    table_at(tmp_path).prepare(SCHEMA)
    assert plainly_visible(tmp_path) == [seen]


def test_the_log_is_added_up_and_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints hold the same as the commits before them, which may then go."""
    monkeypatch.setattr(parquet, "CHECKPOINT_EVERY", 4)
    one = table_at(tmp_path)
    assert isinstance(one, ParquetTable)
    one.prepare(SCHEMA)
    for number in range(14):
        add(one, number, rows(number, number + 1))
    before = one.state()
    log = tmp_path / "_headrace" / "log"
    assert len(list(log.iterdir())) == 15 + 3
    one.vacuum(keep_s=0)
    assert sorted(path.name.lstrip("0") for path in log.iterdir()) == [
        "10.json", "11.json", "12.checkpoint.json", "12.json", "13.json", "14.json",
        "8.checkpoint.json", "8.json", "9.json",
    ]  # fmt: skip
    assert one.state() == before
    assert not add(one, 13, rows(13, 14))


def test_a_damaged_log_is_said(tmp_path: Path) -> None:
    """A missing, torn or foreign commit is never passed over."""
    one = table_at(tmp_path)
    one.prepare(SCHEMA)
    for number in range(3):
        add(one, number, rows(number, number + 1))
    log = tmp_path / "_headrace" / "log"
    entry = log / f"{2:020d}.json"
    content = entry.read_bytes()
    for bad in (content[:-5], b"", b"[]", content.replace(b'"format":1', b'"format":2')):
        entry.write_bytes(bad)
        with pytest.raises(DataCorrupt, match=r"0002\.json"):
            one.describe()
    entry.unlink()
    with pytest.raises(DataCorrupt, match="from 1 to 3"):
        one.describe()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """Its files would be mixed with the table's for plain readers."""
    (tmp_path / "mine.parquet").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"not empty \(mine.parquet\)"):
        table_at(tmp_path).prepare(SCHEMA)


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and says so when it has waited too long."""
    monkeypatch.setattr(table, "LOCK_WAIT_S", 0.0)
    one = table_at(tmp_path)
    one.prepare(SCHEMA)
    with one.locked(), pytest.raises(Conflict, match="another process has been writing"):
        add(table_at(tmp_path), 0, rows(0, 1))
    assert add(one, 0, rows(0, 1))


def test_a_lost_race_of_two_compactions(tmp_path: Path) -> None:
    """The second finds its files gone, and changes nothing."""
    one = table_at(tmp_path)
    assert isinstance(one, ParquetTable)
    one.prepare(SCHEMA)
    add(one, 0, rows(0, 5))
    add(one, 1, rows(5, 10))
    old = list(one.state().files.values())
    one.compact(1 << 27)
    [mine] = lake.sink.write_files(one, SCHEMA, iter([rows(0, 10)]), "late")  # type: ignore[attr-defined]
    assert not one.exchange(old, mine)
    assert offsets_in(one.paths()) == list(range(10))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    one = table_at(tmp_path)
    one.prepare(SCHEMA)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(InvalidArgument, match="no hard links") as caught:
        add(one, 0, rows(0, 5))
    assert caught.value.code == "no_hard_links"

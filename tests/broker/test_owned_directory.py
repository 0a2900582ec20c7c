"""Who owns the data directory: one engine at a time, and what is said to the others."""

import os
from pathlib import Path

import pytest

from headrace.errors import (
    DirectoryLocked,
    HeadraceError,
    StorageFailed,
)
from headrace.files import Files
from headrace.log.directory import DataDirectory
from tests.broker.rig import DATA, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_second_engine_is_told_who_was_first(tmp_path: Path) -> None:
    """It gets no lock, names the holder, and writes nothing at all."""
    first = Rig(Files(), tmp_path / "data")
    first.numbers(1)
    files = FaultyFiles()
    second = Rig(files, tmp_path / "data")
    before = snapshot(tmp_path)
    with pytest.raises(DirectoryLocked) as caught:
        second.open()
    assert f"process {os.getpid()}" in caught.value.message
    assert str(tmp_path / "data") in caught.value.message
    assert not caught.value.retryable
    assert files.changes == []
    assert snapshot(tmp_path) == before
    first.numbers(1)
    first.close()
    assert second.values() == [b"0", b"0"]
    second.close()


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_many_starts_one_winner(rig: Rig) -> None:
    """Of many engines on one directory exactly one opens; when it closes the next one can."""
    engines = [rig.make() for _ in range(20)]
    opened = []
    for engine in engines:
        try:
            engine.open()
            opened.append(engine)
        except DirectoryLocked:
            pass
    assert opened == engines[:1]
    engines[0].close(lambda: None)
    rig.run()
    rig.open()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """A file in its place is an error in plain words, and not one that goes away by itself."""
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(StorageFailed) as caught:
        Rig(Files(), tmp_path / "data").open()
    assert caught.value.code == "directory_unusable"
    assert not caught.value.retryable


def test_an_open_that_fails_lets_the_directory_go() -> None:
    """The lock is given back, so that the next try is not told that somebody else has it."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.numbers(3)
    rig.close()
    files.fail("read_at", repeat=True)
    with pytest.raises(HeadraceError):
        rig.open()
    files.heal()
    assert rig.values() == [b"0", b"1", b"2"]


def test_a_suspect_directory_is_marked_and_cleared(rig: Rig) -> None:
    """The mark stays until somebody has dealt with it; a disk that refuses it is only logged."""
    directory = DataDirectory(DATA, rig.files, rig.clock)
    directory.acquire()
    assert not directory.is_suspect
    directory.mark_suspect("a sync failed")
    assert directory.is_suspect
    directory.clear_suspect()
    directory.clear_suspect()
    assert not directory.is_suspect
    files = FaultyFiles(rig.files)
    files.fail(None, repeat=True)
    DataDirectory(DATA, files, rig.clock).mark_suspect("again")
    assert not directory.is_suspect
    files.heal()
    files.fail("sync", repeat=True)
    DataDirectory(DATA, files, rig.clock).mark_suspect("again")
    assert directory.is_suspect, "as long as the page cache is, so is the mark"

"""Planned faults: exactly the call that was named fails, as it was said."""

import errno
from pathlib import Path

import pytest

from tests.fakes import FaultyFiles, SimulatedFiles

PATH = Path("data/a")


def faulty() -> FaultyFiles:
    disk = SimulatedFiles()
    disk.put(PATH, b"")
    return FaultyFiles(disk)


def test_the_nth_call_of_a_kind_fails_once() -> None:
    """The second sync fails with the error that was asked for, the others pass."""
    files = faulty()
    fault = files.fail("sync", 2, errno.ENOSPC)
    handle = files.open(PATH, write=True)
    files.sync(handle)
    with pytest.raises(OSError, match="No space left") as caught:
        files.sync(handle)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(PATH))
    files.sync(handle)
    assert (fault.hits, files.count("sync"), files.counts["open"]) == (1, 3, 1)


def test_a_repeated_fault_lasts_until_it_is_healed() -> None:
    """A disk that is full stays full, until it is not."""
    files = faulty()
    files.fail("allocate", 1, errno.ENOSPC, repeat=True)
    handle = files.open(PATH, write=True)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            files.allocate(handle, 0, 10)
    files.heal()
    files.allocate(handle, 0, 10)
    assert files.size(handle) == 10


def test_what_is_spared_meets_no_fault() -> None:
    """An observer reads, and the fault waits for the one who is observed."""
    files = faulty()
    handle = files.open(PATH, write=True, create=True)
    fault = files.fail("read_at")
    with files.spared():
        assert files.read_at(handle, 0, 1) == b""
    assert fault.hits == 0
    with pytest.raises(OSError, match="Input/output"):
        files.read_at(handle, 0, 1)
    assert [(call.kind, code) for call, code in files.refused] == [("read_at", errno.EIO)]


def test_a_short_write_leaves_its_beginning() -> None:
    """A write may fail after some of its bytes were written."""
    files = faulty()
    files.fail("write_at", short=3)
    handle = files.open(PATH, write=True)
    with pytest.raises(OSError, match="Input/output"):
        files.write_at(handle, 0, [b"ab", b"cd"])
    assert files.read_file(PATH) == b"abc"


def test_any_change_can_be_the_one_that_fails() -> None:
    """Counted over all kinds, each step of a composite operation gets its turn."""
    failed = []
    for number in range(1, 8):
        files = faulty()
        fault = files.fail(None, number)
        try:
            files.replace(PATH, [b"new"])
        except OSError:
            failed.append(files.changes[number - 1].kind)
        assert fault.hits <= 1
    assert failed == [
        "create",
        "truncate",
        "write_at",
        "sync",
        "rename",
        "sync_directory",
    ]


def test_a_fault_can_be_bound_to_a_file() -> None:
    """Only files whose name contains the given text are counted and fail."""
    files = faulty()
    files.fail("create", name=".idx")
    files.open(PATH.with_name("b.log"), write=True, create=True)
    with pytest.raises(OSError, match="Input/output"):
        files.open(PATH.with_name("b.idx"), write=True, create=True)


def test_making_directories_is_taken_apart() -> None:
    """Each directory that is made, and the sync of its parent, is a call of its own."""
    files = faulty()
    files.make_directory(Path("data/orders/0"))
    assert [call.kind for call in files.calls] == ["mkdir", "sync_directory"] * 2


def test_the_real_file_system_is_the_default(tmp_path: Path) -> None:
    """Without another one behind it, it stands in front of the real disk."""
    files = FaultyFiles()
    files.replace(tmp_path / "a", [b"content"])
    assert (tmp_path / "a").read_bytes() == b"content"

"""The simulated disk: it keeps what it must, loses what it may, and behaves like the real one."""

import errno
import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.files import Files
from tests.fakes import FaultyFiles, SimulatedFiles

PATH = Path("data/a")
steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 300), st.binary(min_size=1, max_size=200)),
    st.tuples(st.just("truncate"), st.integers(0, 300)),
    st.tuples(st.just("allocate"), st.integers(0, 300), st.integers(1, 100)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("replace"), st.binary(max_size=50)),
    st.tuples(st.just("rename")),
    st.tuples(st.just("remove")),
)


def do(files: Files, path: Path, step: tuple) -> object:
    """One step on a file system; what can be seen of it afterwards."""
    kind, *args = step
    try:
        if kind == "replace":
            files.replace(path, [args[0]])
        elif kind == "rename":
            files.rename(path, path.with_name("b"))
        elif kind == "remove":
            files.remove(path)
        else:
            handle = files.open(path, write=True, create=True)
            if kind == "write":
                files.write_at(handle, args[0], [args[1]])
            elif kind == "truncate":
                files.truncate(handle, args[0])
            elif kind == "allocate":
                files.allocate(handle, *args)
            else:
                files.sync(handle)
            handle.close()
    except OSError as error:
        return error.errno
    return [(name, files.read_file(path.parent / name)) for name in files.names(path.parent)]


@given(st.lists(steps, max_size=12))
def test_without_a_crash_it_is_the_real_file_system(tmp_path_factory, script: list) -> None:
    """Any sequence of calls leaves the same names and the same bytes as on a real disk."""
    real, simulated = Files(), SimulatedFiles()
    directory = tmp_path_factory.mktemp("real")
    simulated.make_directory(PATH.parent)
    for step in script:
        assert do(real, directory / "a", step) == do(simulated, PATH, step)


def synced_file(content: bytes) -> SimulatedFiles:
    files = SimulatedFiles()
    files.put(PATH, content)
    return files


@given(st.integers(), st.booleans(), st.booleans())
def test_what_was_synced_survives_every_crash(seed: int, ordered: bool, garbage: bool) -> None:
    """Synced bytes under a synced name are there after the power failed, whatever came later."""
    files = SimulatedFiles()
    files.make_directory(PATH.parent)
    handle = files.open(PATH, write=True, create=True)
    files.write_at(handle, 0, [b"x" * 700])
    files.sync(handle)
    files.sync_directory(PATH.parent)
    files.write_at(handle, 700, [b"y" * 700])
    files.crash(Random(seed), sector=8, ordered=ordered, garbage=garbage)
    assert files.read_file(PATH)[:700] == b"x" * 700


def outcomes(prepare, look, crashes: int = 300) -> set[object]:
    """All that can be seen after a crash, over many crashes."""
    seen = set()
    for seed in range(crashes):
        files = synced_file(b"old!" * 4)
        prepare(files)
        files.crash(Random(seed), sector=4)
        seen.add(look(files))
    return seen


def test_an_unsynced_write_may_be_kept_lost_or_torn() -> None:
    """Each sector of an overwrite is old or new, independently of its neighbours."""

    def prepare(files: SimulatedFiles) -> None:
        files.write_at(files.open(PATH, write=True), 0, [b"NEW!" * 2])

    seen = outcomes(prepare, lambda files: files.read_file(PATH)[:8])
    assert seen == {b"old!old!", b"NEW!old!", b"old!NEW!", b"NEW!NEW!"}


def test_an_unsynced_append_may_leave_its_length_without_its_bytes() -> None:
    """Length and data are independent: zeros where the bytes should be is one of the outcomes."""

    def prepare(files: SimulatedFiles) -> None:
        files.write_at(files.open(PATH, write=True), 16, [b"NEW!"])

    seen = outcomes(prepare, lambda files: files.read_file(PATH)[16:])
    assert seen == {b"", bytes(4), b"NEW!"}


def test_an_unsynced_truncate_may_be_undone() -> None:
    """A file cut without a sync has its old or its new length after a crash."""

    def prepare(files: SimulatedFiles) -> None:
        files.truncate(files.open(PATH, write=True), 8)

    assert outcomes(prepare, lambda files: files.file_size(PATH)) == {8, 16}


def test_a_replaced_truncated_write_may_come_back() -> None:
    """Bytes that were cut and written over without a sync in between can survive the newer ones."""

    def prepare(files: SimulatedFiles) -> None:
        handle = files.open(PATH, write=True)
        files.write_at(handle, 16, [b"1111"])
        files.truncate(handle, 16)
        files.write_at(handle, 16, [b"2222"])

    seen = outcomes(prepare, lambda files: files.read_file(PATH)[16:])
    assert seen == {b"", bytes(4), b"1111", b"2222"}


def test_unsynced_names_may_be_lost() -> None:
    """A file that was created, synced and never entered durably in its directory may be gone."""

    def prepare(files: SimulatedFiles) -> None:
        handle = files.open(PATH.with_name("b"), write=True, create=True)
        files.sync(handle)
        files.remove(PATH)

    seen = outcomes(prepare, lambda files: tuple(files.names(PATH.parent)))
    assert seen == {("a",), ("a", "b"), ("b",), ()}


def test_ordered_names_are_lost_from_the_end() -> None:
    """With ordered directories a later change never survives an earlier one."""
    seen = set()
    for seed in range(100):
        files = synced_file(b"")
        files.open(PATH.with_name("b"), write=True, create=True)
        files.remove(PATH)
        files.crash(Random(seed), ordered=True)
        seen.add(tuple(files.names(PATH.parent)))
    assert seen == {("a",), ("a", "b"), ("b",)}


def test_replace_is_whole_in_every_crash() -> None:
    """Files.replace leaves the old or the new content, whole, wherever the power fails in it."""
    for seed in range(50):
        for fail_at in range(1, 6):
            files = FaultyFiles(synced_file(b"old" * 200))
            files.fail(None, fail_at)
            try:
                files.replace(PATH, [b"new" * 300])
            except OSError:
                expected = {b"old" * 200, b"new" * 300}
            else:
                expected = {b"new" * 300}
            files.inner.crash(Random(seed), sector=64)
            assert files.inner.read_file(PATH) in expected


def test_a_failed_sync_loses_pages_that_read_well() -> None:
    """After a failed sync a second one succeeds, the bytes read back, and a crash loses them."""
    disk = synced_file(b"")
    files = FaultyFiles(disk)
    files.fail("sync")
    handle = files.open(PATH, write=True)
    files.write_at(handle, 0, [b"bytes"])
    with pytest.raises(OSError, match="Input/output"):
        files.sync(handle)
    files.sync(handle)
    assert files.read_file(PATH) == b"bytes"
    disk.crash(Random(0))
    assert disk.read_file(PATH) == b""


def test_a_killed_process_loses_its_handles_and_locks_only() -> None:
    """After kill nothing written is lost, old handles are dead and the lock is free."""
    files = synced_file(b"")
    handle = files.open(PATH, write=True)
    assert files.lock(handle)
    assert not files.lock(files.open(PATH))
    files.write_at(handle, 0, [b"bytes"])
    files.kill()
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.sync(handle)
    assert files.lock(files.open(PATH))
    assert files.read_file(PATH) == b"bytes"


def test_a_full_disk_writes_what_fits() -> None:
    """Beyond its capacity a write ends short with ENOSPC; removing a file makes room again."""
    files = SimulatedFiles(capacity=100)
    files.put(PATH, bytes(40))
    handle = files.open(PATH.with_name("b"), write=True, create=True)
    with pytest.raises(OSError, match="No space left"):
        files.write_at(handle, 0, [bytes(70)])
    assert (files.size(handle), files.free_bytes(PATH)) == (60, 0)
    with pytest.raises(OSError, match="No space left"):
        files.allocate(handle, 60, 1)
    files.remove(PATH)
    assert files.write_at(handle, 0, [bytes(100)]) == 100


def test_a_copy_is_another_disk() -> None:
    """What happens to a copy does not happen to the original."""
    files = synced_file(b"one")
    other = files.copy()
    other.write_at(other.open(PATH, write=True), 0, [b"two"])
    assert (files.read_file(PATH), other.read_file(PATH)) == (b"one", b"two")


def test_wrong_paths_fail_as_on_a_real_disk() -> None:
    """What is not there, is a file or is a directory gives the error number that Linux gives."""
    files = synced_file(b"")
    for call, code in [
        (lambda: files.open(Path("data/none")), errno.ENOENT),
        (lambda: files.open(Path("data")), errno.EISDIR),
        (lambda: files.names(Path("none")), errno.ENOENT),
        (lambda: files.names(PATH), errno.ENOTDIR),
        (lambda: files.remove(Path("data/none")), errno.ENOENT),
        (lambda: files.rename(Path("data/none"), PATH), errno.ENOENT),
        (lambda: files.write_at(files.open(PATH), 0, [b"x"]), errno.EBADF),
    ]:
        with pytest.raises(OSError, match=os.strerror(code)):
            call()


def test_a_clone_crashes_as_the_original_does() -> None:
    """The same dice give the same disk, and neither changes the other."""
    files = synced_file(b"before")
    handle = files.open(PATH, write=True)
    files.write_at(handle, 0, [b"x" * 3000])
    files.rename(PATH, PATH.with_name("after"))
    for seed in range(20):
        crashed = [files.clone(), files.clone()]
        for each in crashed:
            each.crash(Random(seed), sector=64)
        contents = [
            {name: each.read_file(PATH.with_name(name)) for name in each.names(PATH.parent)}
            for each in crashed
        ]
        assert contents[0] == contents[1]
    assert files.read_file(PATH.with_name("after")) == b"x" * 3000

"""Reads of a partition on the loop come to an end, whatever the disk is like."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files, Handle
from headrace.log.interface import ReadPending
from headrace.log.segment import Segment
from tests.fakes import FakeClock, InlineWorkers, RunningLoop
from tests.fakes.time import running
from tests.log.rig import DIRECTORY, Rig

Found = TypeVar("Found")
FETCHES_MAX = 8


def rig_of(**options: object) -> Rig:
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.loop = RunningLoop()
    rig.clock = FakeClock(rig.loop)
    rig.workers = InlineWorkers(rig.loop)
    return rig


def read(rig: Rig, find: Callable[[], Found]) -> Found:
    """As a caller on the loop reads: again, each time when it is told to."""
    for _ in range(FETCHES_MAX):
        told: list[None] = []
        with running(rig.loop):
            try:
                return find()
            except ReadPending as pending:
                pending.then(lambda told=told: told.append(None))  # type: ignore[misc]
        rig.loop.run_until_idle()
        assert told == [None]
    raise AssertionError("the reader is told to read again for ever")


def filled(rig: Rig) -> Rig:
    """A closed segment with five batches, and one more; as after a start."""
    for number in range(5):
        rig.publish(b"%d" % number * 50)
    rig.change(segment_bytes=1)
    rig.publish(b"last")
    rig.reopen()
    return rig


def damaged() -> Rig:
    """The first batch cannot be read."""
    rig = filled(rig_of())
    handle = rig.files.open(rig.log._segments[0].path, write=True)
    rig.files.write_at(handle, 4, [b"\xff" * 4])
    return rig


def test_what_follows_damage_is_read() -> None:
    """Only a scan finds it, and only a disk thread scans; several readers may need it."""
    rig = damaged()
    with pytest.raises(DataCorrupt):
        read(rig, lambda: rig.log.read(0))
    for _ in range(2):
        assert read(rig, lambda: rig.log.read(1, 1))[0].values()[0] == b"1" * 50
    assert read(rig, lambda: rig.log.read_cached(1)).base_offset == 1


def test_a_time_is_found_beside_damage() -> None:
    """Each search has to look for the damage again."""
    rig = damaged()
    assert read(rig, lambda: rig.log.offset_at(0)) == 1


def test_a_file_that_was_cut() -> None:
    """What is left of it is read, and the rest is damaged."""
    rig = filled(rig_of())
    segment = rig.log._segments[0]
    rig.files.truncate(rig.files.open(segment.path, write=True), segment.size - 8)
    assert read(rig, lambda: rig.log.read(0))[0].count == 4
    with pytest.raises(DataCorrupt):
        read(rig, lambda: rig.log.read(4))


def test_a_real_file_that_was_cut(tmp_path: Path) -> None:
    """The system gives what there is, at once."""
    files = Files()
    handle = files.open(tmp_path / "file", write=True, create=True)
    files.write_at(handle, 0, [b"0123456789"])
    try:
        assert files.read_at_once(handle, 4, 100) == b"456789"
        assert files.read_at_once(handle, 20, 100) == b""
    except Exception as error:  # this file system does not tell what is in memory
        if not getattr(error, "unknown", False):
            raise


def test_nothing_stays_in_memory() -> None:
    """A small page cache forgets what was read before anybody can take it."""
    rig = filled(rig_of())
    rig.files.is_at_hand = lambda: False  # type: ignore[attr-defined]
    assert read(rig, lambda: rig.log.read(0))[0].count == 5
    assert read(rig, lambda: rig.log.read_cached(2)).count == 3
    rig.loop.advance(60)
    read(rig, rig.log.closed_segments)
    assert not rig.log._fetching._results


def test_a_reader_gets_what_is_before_a_bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read ahead for it cannot be read: that is an error for whoever comes there, and not before."""

    def broken(segment: Segment, offset: int) -> None:
        raise OSError(errno.EIO, "a bad sector")

    rig = filled(rig_of())
    rig.files.is_at_hand = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setattr(Segment, "read_ahead", broken)
    rig.log._segments[0]._seen[1] = rig.log._segments[0].index().position_of(1)
    assert rig.log._segments[0].is_followed(1)
    assert read(rig, lambda: rig.log.read(1))[0].values()[0] == b"1" * 50


def test_a_reader_that_fails_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two wait until a large batch of an earlier version is unpacked, and one has a bug."""
    rig = rig_of(compression="zstd", cache_bytes=1 << 20)
    rig.publish(*[b"again and again"] * 500)
    rig.reopen()
    monkeypatch.setattr(limits, "CLIENT_BATCH_BYTES_MAX", 0)
    with running(rig.loop), pytest.raises(ReadPending):
        rig.log.read_cached(0)
    rig.loop.run_until_idle()  # it is fetched
    rig.workers.hold = True
    told: list[int] = []
    for number in (0, 1):
        with running(rig.loop), pytest.raises(ReadPending) as caught:
            rig.log.read_cached(0)
        caught.value.then(lambda number=number: told.append(1 // number))  # type: ignore[misc]
    rig.workers.release()
    with pytest.raises(ZeroDivisionError):
        rig.loop.run_until_idle()
    rig.loop.run_until_idle()
    assert told == [1]


def test_more_partitions_than_open_files() -> None:
    """A request that asks all of them at once begins again with the first one."""
    first = rig_of(readers_max=2)
    rigs = [first]
    for number in range(1, 6):
        rig = Rig(first.files, DIRECTORY.with_name(str(number)))
        rig.loop, rig.clock, rig.workers = first.loop, first.clock, first.workers
        rig.readers = first.readers
        rigs.append(rig)
    for rig in rigs:
        filled(rig)

    def offsets() -> list[int]:
        found, pending = [], None
        for rig in rigs:
            try:
                found.append(rig.log.offset_at(1))
            except ReadPending as error:
                pending = error
        if pending is not None:
            raise pending
        return found

    assert read(first, offsets) == [0] * 6


def test_a_time_that_was_looked_up_lately() -> None:
    """The answer is that of now: with what was appended and dropped since."""
    rig = filled(rig_of())
    later = rig.clock.now_ms() + 5
    assert read(rig, lambda: rig.log.offset_at(later)) == 6
    assert read(rig, lambda: rig.log.offset_at(1)) == 0
    rig.publish(b"too early")
    rig.loop.advance(0.005)
    rig.publish(b"then")
    rig.log.drop_before(5)
    assert read(rig, lambda: rig.log.offset_at(later)) == 7
    assert read(rig, lambda: rig.log.offset_at(1)) == 5


def test_segments_that_are_dropped_while_they_are_looked_at() -> None:
    """A disk thread finds their files gone. What is left is the answer, not an error."""
    rig = filled(rig_of())
    rig.change(segment_bytes=1)
    rig.publish(b"more")
    first = rig.log._segments[0]
    load, dropped = first._load_index, []

    class Dropping(type(first)):  # type: ignore[misc]
        __slots__ = ()

        def _load_index(self) -> None:
            if not dropped:
                dropped.append(rig.log.drop_before(5))
            return None

    first.__class__ = Dropping
    rig.files.remove(first.index_path)
    assert load() is None
    assert [each.base_offset for each in read(rig, rig.log.closed_segments)] == [5]


def test_a_thread_that_opens_a_file_late() -> None:
    """The file was dropped, or its topic deleted, while the thread opened it: nobody holds its space on the disk."""
    rig = filled(rig_of())
    dropped = rig.log._segments[0]
    rig.readers._open.clear()
    opened = rig.files.open

    def late(path: Path) -> Handle:
        handle = opened(path)
        rig.log.drop_before(5)
        return handle

    rig.files.open = late  # type: ignore[method-assign, assignment]
    dropped.handle()
    assert rig.readers.known(dropped.path, dropped.version) is None


def test_a_file_of_an_earlier_topic_is_another_file() -> None:
    """A thread may have opened it just before that topic was deleted, and the new one has the same paths."""
    rig = filled(rig_of())
    path, version = rig.log._segments[0].path, rig.log._segments[0].version
    rig.reopen()
    old = rig.readers.get(path, version)
    assert rig.log._segments[0].path == path
    assert rig.log._segments[0].handle() is not old

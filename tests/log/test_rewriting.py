"""Rewriting closed segments: the same records in fewer batches, whatever happens meanwhile."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.doctor.commands import examine
from headrace.files import Files, Handle
from headrace.log.batch import AFTER_SYNC, HAS_KEYS, ZSTD, encode, lost, parse
from headrace.log.columns import Columns
from headrace.log.producers import Producers
from headrace.log.recovery import recover
from headrace.log.segment import Found, scan
from tests.fakes import (
    FakeClock,
    FaultyFiles,
    InlineWorkers,
    Mains,
    PowerFailed,
    RunningLoop,
    SimulatedFiles,
)
from tests.fakes.faults import CHANGES, Fault
from tests.log.rig import DIRECTORY, Rig, as_stored, entry_of, records

COUNT = 60
FIRST = DIRECTORY / f"{0:020d}.log"
pytestmark = pytest.mark.usefixtures("quiet")


def small_steps(patch: pytest.MonkeyPatch) -> None:
    """Small segments are rewritten, too, in many steps."""
    patch.setattr(limits, "REWRITE_PIECE_BYTES", 400)
    patch.setattr(limits, "REWRITE_BATCHES_MIN", 2)
    patch.setattr(limits, "REWRITE_GAIN_MIN", 2)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)


def filled(rig: Rig, count: int = COUNT) -> Rig:
    """One message at a time; every third has a key, every second is a producer's."""
    sequence = 0
    for number in range(count):
        producer = (7, 0, sequence) if number % 2 else (0, 0, 0)
        sequence += number % 2
        rig.publish(
            b"%d|" % number + b"x" * (number % 40),
            keys=[b"k%d" % number] if number % 3 == 0 else None,
            producer=producer,
        )
        rig.loop.advance(0.002)
    return rig


def roll(rig: Rig) -> None:
    rig.log.roll_soon(1)
    rig.loop.run_until_idle()


def rewritten(rig: Rig, seconds: float = 10.0) -> Rig:
    rig.loop.advance(seconds)
    assert rig.rewriter is not None
    assert rig.rewriter.pending == 0
    return rig


def everything(rig: Rig) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for batch in as_stored(rig.log):
        keys = batch.keys() or [None] * batch.count
        times = batch.times() or [batch.base_timestamp] * batch.count
        offsets = range(batch.base_offset, batch.end_offset)
        found += zip(offsets, times, keys, batch.values(), strict=True)
    return found


def names(rig: Rig) -> list[str]:
    return rig.files.names(DIRECTORY)


def plain_rig(**more: object) -> Rig:
    """Everything in one closed segment, not rewritten."""
    rig = filled(Rig(**more))
    roll(rig)
    return rig


def closed_rig(files: SimulatedFiles | FaultyFiles | None = None, **more: object) -> Rig:
    """The same, opened by a log that will rewrite it."""
    rig = plain_rig(files=files, **more)
    rig.close()
    rig.rewrite = True
    rig.open()
    return rig


def test_small_batches_become_large_ones() -> None:
    """Offsets, times, keys and values stay; batches and bytes become fewer; the index fits."""
    rig = closed_rig()
    before, size = everything(rig), rig.files.file_size(FIRST)
    rewritten(rig)
    assert [batch.count for batch in as_stored(rig.log)] == [COUNT]
    assert everything(rig) == before
    assert rig.files.file_size(FIRST) == rig.log._segments[0].size < size / 2
    assert rig.rewriter is not None
    assert (rig.rewriter.segments, rig.rewriter.batches) == (1, COUNT)
    assert (rig.rewriter.bytes, rig.rewriter.saved_bytes) == (
        size, size - rig.files.file_size(FIRST),
    )  # fmt: skip
    assert not [name for name in names(rig) if name.endswith(".tmp")]
    index = rig.log._segments[0].known_index()
    assert index is not None
    assert (index.end_offset, index.batches) == (COUNT, 1)
    rig.reopen()
    assert everything(rig) == before
    for offset, time, _, _ in before:
        assert rig.log.offset_at(time) == offset  # type: ignore[arg-type]
    rewritten(rig)
    assert rig.rewriter.segments == 0, "once is enough"
    assert rig.publish(b"next").first_offset == COUNT


def test_a_segment_is_rewritten_soon_after_it_was_closed() -> None:
    """No restart is needed, and the segment that is being written is left alone."""
    rig = filled(Rig(rewrite=True, segment_bytes=4096), 3 * COUNT)
    before = everything(rig)
    closed = len(rig.log._segments) - 1
    assert closed > 1
    rewritten(rig)
    assert rig.rewriter is not None
    assert rig.rewriter.segments == closed
    assert everything(rig) == before
    assert len(as_stored(rig.log)) < COUNT / 2
    rig.close()
    assert not [name for name in names(rig) if name.endswith(".tmp")]


def test_the_loop_does_not_free_the_space_of_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes a large file that has no name any more waits for the disk. Nobody holds it open afterwards."""
    freed: list[object] = []
    close = Handle.close

    def watched(handle: Handle) -> None:
        if handle.fd >= 0 and os.fstat(handle.fd).st_nlink == 0:
            freed.append(asyncio._get_running_loop())
        close(handle)

    monkeypatch.setattr(Handle, "close", watched)
    rig = Rig(Files(), tmp_path, rewrite=True)
    rig.loop = RunningLoop()
    rig.clock, rig.workers = FakeClock(rig.loop), InlineWorkers(rig.loop)
    filled(rig)
    roll(rig)
    rig.log._segments[0].handle()  # a reader has it open
    rewritten(rig)
    assert rig.rewriter is not None
    assert rig.rewriter.segments == 1
    assert len(freed) == 2
    assert freed[-1] is None, "the first one frees nothing yet"
    rig.close()


def test_all_of_it_was_on_disk() -> None:
    """If it becomes the last segment, damage in it is not taken for a torn tail."""
    rig = rewritten(closed_rig(durability="never"))
    assert all(batch.flags & AFTER_SYNC for batch in as_stored(rig.log))


def test_compression_is_that_of_the_topic() -> None:
    """Packed batches are joined and packed again."""
    rig = closed_rig(compression="zstd")
    before = everything(rig)
    rewritten(rig)
    (batch,) = as_stored(rig.log)
    assert batch.flags & ZSTD
    assert everything(rig) == before


def test_large_batches_are_copied_as_they_are() -> None:
    """Only their small neighbours are joined, and a lone small batch stays as it is."""
    rig = Rig()
    large = [b"y" * 9] * (limits.REWRITE_BATCH_RECORDS + 1)
    filled(rig, 20)
    rig.publish(*large, producer=(9, 1, 0))
    rig.publish(b"alone", producer=(9, 1, len(large)))
    rig.publish(*large, producer=(9, 1, len(large) + 1))
    for _ in range(20):
        rig.publish(b"z")
    roll(rig)
    rig.close()
    raw = [batch.raw() for batch in as_stored(rig.open())]
    before, dump = everything(rig), rig.log._producers.dump()
    rig.close()
    rig.rewrite = True
    rig.open()
    rewritten(rig)
    found = as_stored(rig.log)
    assert [batch.count for batch in found] == [20, len(large), 1, len(large), 20]
    assert [batch.raw() for batch in found[1:4]] == raw[20:23]
    assert everything(rig) == before
    assert rig.log._producers.dump() == dump


# --- producers --------------------------------------------------------------------------------
def replayed(rig: Rig) -> bytes:
    """The table of producers, from the batches alone."""
    for name in names(rig):
        if name.endswith(".producers"):
            rig.files.remove(DIRECTORY / name)
    return recover(rig.files, DIRECTORY).producers.dump()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=60))
def test_what_producers_published_stays_known(script: list[tuple[int, int, bool]]) -> None:
    """Without a snapshot, the batches give the same table before and after; repetitions are recognized."""
    with pytest.MonkeyPatch.context() as patch:
        small_steps(patch)
        rig = Rig()
        filled(rig, 4)
        state = dict.fromkeys((1, 2, 3), (0, 0))
        for producer, count, is_new_epoch in script:
            if not producer:
                rig.publish(b"plain")
                continue
            epoch, sequence = state[producer]
            if is_new_epoch and sequence > 4:
                epoch, sequence = epoch + 1, 0
            rig.publish(*[b"p"] * count, producer=(producer, epoch, sequence))
            state[producer] = (epoch, sequence + count)
        roll(rig)
        rig.close()
        expected = replayed(rig)
        rig.rewrite = True
        rig.open()
        known = [
            (number, each.epoch, *batch)
            for number, each in rig.log._producers._table.items()
            for batch in each.batches
        ]
        rewritten(rig)
        assert len(as_stored(rig.log)) == 1
        rig.close()
        assert replayed(rig) == expected
        rig.open()
        for number, epoch, first, count, offset in known:
            entry = rig.publish(*[b"p"] * count, producer=(number, epoch, first))
            assert (entry.error, entry.duplicate, entry.first_offset) == (None, True, offset)


def test_clients_get_version_1() -> None:
    """A batch with origins is sent without them; its body is the same."""
    rig = rewritten(closed_rig())
    (batch,) = as_stored(rig.log)
    assert batch.origins
    assert len(batch.stored()) == batch.stored_bytes == rig.files.file_size(FIRST)
    sent = parse(batch.raw())
    assert sent is not None
    assert (sent.origins, sent.producer_id, sent.body) == (b"", 0, batch.body)
    table = Producers()
    table.add_batch(batch)
    assert table.next_sequence(7) == COUNT // 2


# --- crashes ----------------------------------------------------------------------------------
class Watched(FaultyFiles):
    """Calls ``before`` ahead of each operation that changes the disk."""

    def __init__(self, disk: SimulatedFiles):
        super().__init__(disk)
        self.before: Callable[[], None] = lambda: None

    def _meet(self, kind: str, path: Path) -> Fault | None:
        if kind in CHANGES:
            self.before()
        return super()._meet(kind, path)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kills", [True, False])
def test_a_crash_before_any_operation_leaves_one_of_both(kills: bool, ordered: bool) -> None:
    """Power cuts and kills: the old segment or the new one, whole; a start and the doctor find nothing wrong."""
    disk = SimulatedFiles()
    files = Watched(disk)
    rig = closed_rig(files)
    before, dump = everything(rig), rig.log._producers.dump()
    states: list[SimulatedFiles] = []
    files.before = lambda: states.append(disk.clone())
    rewritten(rig)
    states.append(disk.clone())
    assert len(states) > 8
    outcomes: set[int] = set()
    random = Random(11)
    for state in states:
        for _ in range(1 if kills else 8):
            after = state.clone()
            if kills:
                after.kill()
            else:
                after.crash(random, sector=random.choice([8, 64, 512]), ordered=ordered)
            again = Rig(after, rewrite=True)
            again.open()
            assert again.log.read_only is None
            assert everything(again) == before
            assert again.log._producers.dump() == dump
            assert not [name for name in names(again) if name.endswith(".tmp")]
            outcomes.add(len(as_stored(again.log)))
            rewritten(again)
            assert len(as_stored(again.log)) == 1
            assert everything(again) == before
            again.close()
            findings = examine(DIRECTORY.parent.parent, after).findings
            assert {finding.code for finding in findings} <= {"settings_missing"}
    assert outcomes == {1, COUNT}


def test_power_fails_again_and_again() -> None:
    """Each life is cut at some operation of the rewrite or of the recovery after it; nothing is ever lost."""
    random = Random(3)
    files = Mains(SimulatedFiles(), sector=64, ordered=True)
    rig = plain_rig(files=files)
    before = everything(rig)
    rig.close()
    for _ in range(60):
        files.restored()
        files.plan(random.randint(1, 14), random.getrandbits(32))
        rig = Rig(files, rewrite=True)
        try:
            rig.open()
            rig.loop.advance(10)
        except PowerFailed:
            pass
        if not files.dead:
            assert everything(rig) == before
    files.restored()
    files.countdown = 0
    rig = Rig(files, rewrite=True)
    rig.open()
    assert everything(rewritten(rig)) == before


@pytest.mark.parametrize("kind", ["create", "truncate", "write_at", "sync", "rename", "read_at"])
def test_a_disk_that_fails_changes_nothing(kind: str) -> None:
    """The old segment stays, and the half-written copy goes; the log goes on."""
    files = FaultyFiles(SimulatedFiles())
    rig = closed_rig(files)
    before = everything(rig)
    files.fail(kind, name=".log" if kind in ("rename", "read_at") else ".tmp")
    rig.loop.advance(10)
    files.heal()
    assert everything(rig) == before
    assert len(as_stored(rig.log)) == COUNT
    assert not [name for name in names(rig) if name.endswith(".tmp")]
    assert not rig.failures
    assert rig.publish(b"next").first_offset == COUNT


@pytest.mark.parametrize("kind", ["write_at", "sync", "rename", "sync_directory"])
def test_an_index_that_cannot_be_written_is_made_anew(kind: str) -> None:
    """The segment is the new one already, and is read without its index file."""
    files = FaultyFiles(SimulatedFiles())
    rig = closed_rig(files)
    before = everything(rig)
    files.fail(kind, name="" if kind == "sync_directory" else ".idx")
    rewritten(rig)
    files.heal()
    assert len(as_stored(rig.log)) == 1
    assert everything(rig) == before
    rig.reopen()
    assert everything(rig) == before


# --- neighbours -------------------------------------------------------------------------------
def test_a_reader_of_the_old_file_reads_on() -> None:
    """Somebody who had the segment before it was replaced sees the same records, and searches with its index."""
    rig = closed_rig()
    old = rig.log._segments[0]
    first = old.read(0, COUNT, 200)
    rewritten(rig)
    assert rig.log._segments[0] is not old
    offset, values = first[-1].end_offset, [v for batch in first for v in batch.values()]
    while offset < COUNT:
        found = old.read(offset, COUNT, 200)
        values += [v for batch in found for v in batch.values()]
        offset = found[-1].end_offset
    assert values == [value for _, value in records(rig.log)]


def test_a_close_waits_for_the_step() -> None:
    """The copy is removed before the log is closed, wherever the rewrite was."""
    for steps in range(60):
        rig = closed_rig()
        rig.loop.advance(0.001 * steps)
        before = everything(rig)
        rig.close()
        assert not [name for name in names(rig) if name.endswith(".tmp")]
        rig.rewrite = False
        rig.open()
        assert everything(rig) == before


def test_a_close_waits_for_a_worker() -> None:
    """While a step runs in a worker, the log is not closed; then nothing is left over."""
    rig = closed_rig()
    rig.loop.advance(0.02)
    rig.workers.hold = True
    rig.loop.advance(0.01)
    assert rig.workers.held == 1
    closed: list[bool] = []
    rig.log.close(lambda: closed.append(True))
    rig.loop.run_until_idle()
    assert not closed
    rig.workers.hold = False
    rig.workers.release()
    rig.loop.run_until_idle()
    assert closed == [True]
    assert not [name for name in names(rig) if name.endswith(".tmp")]


def test_a_segment_that_is_closed_while_the_log_closes_is_not_offered() -> None:
    """A roll that was on its way when the log was closed leaves no timer."""
    rig = plain_rig()
    rig.close()
    rig.rewrite = True
    rig.open()
    rewritten(rig)
    rig.publish(b"x")
    rig.workers.hold = True
    rig.log.roll_soon(1)
    rig.loop.run_until_idle()  # the worker has it
    closed: list[bool] = []
    rig.log.close(lambda: closed.append(True))
    rig.workers.hold = False
    rig.workers.release()
    rig.loop.run_until_idle()
    assert closed
    assert rig.rewriter is not None
    assert (rig.loop.timers, rig.rewriter.pending) == (0, 0)


def test_retention_may_delete_it_meanwhile() -> None:
    """A segment that is gone does not come back; one that is being renamed is deleted later."""
    for steps in range(60):
        rig = closed_rig()
        rig.loop.advance(0.001 * steps)
        rig.workers.hold = steps % 2 == 1
        rig.loop.advance(0.001)
        rig.log.drop_before(COUNT)
        rig.workers.hold = False
        rig.workers.release()
        rewritten(rig)
        rig.log.drop_before(COUNT)
        assert rig.log.start_offset == COUNT
        assert [name for name in names(rig) if not name.startswith(f"{COUNT:020d}")] == []


def test_damage_is_left_alone() -> None:
    """A segment with a flipped bit stays as it is, byte for byte."""
    for position in (30, 70, 2000):
        files = SimulatedFiles()
        rig = plain_rig(files=files)
        rig.close()
        raw = bytearray(files.read_file(FIRST))
        raw[position] ^= 1
        files.put(FIRST, raw)
        rig.rewrite = True
        rig.open()
        rewritten(rig)
        assert files.read_file(FIRST) == raw
        assert rig.rewriter is not None
        assert rig.rewriter.segments == 0


def test_lost_hidden_and_large_are_left_alone() -> None:
    """A segment with lost or hidden records is not rewritten, nor one whose batches are large."""
    files = SimulatedFiles()
    rig = plain_rig(files=files)
    rig.close()
    content = files.read_file(FIRST)
    parts = [
        part
        for part in scan(files, files.open(FIRST), len(content), base_offset=0)
        if isinstance(part, Found)
    ]
    gone = lost(0, 1, parts[0].batch.base_timestamp)
    files.put(FIRST, gone.raw() + content[parts[1].position :])
    hidden = Rig(rewrite=True)
    hidden.log.hold()
    for number in range(20):
        entry = entry_of(batch=encode(Columns([b"h"])), producer=(7, 0, number))
        entry.hidden = True
        hidden.log.append(entry)
        hidden.loop.run_until_idle()
    large = Rig(rewrite=True)
    for _ in range(40):
        large.publish(*[b"x"] * (limits.REWRITE_BATCH_RECORDS + 1))
    rig.rewrite = True
    for each in (rig, hidden, large):
        roll(each)
        each.loop.advance(10)
        assert each.rewriter is not None
        assert each.rewriter.segments == 0
    hidden.log.release()
    roll(hidden)
    hidden.publish(b"shown")
    roll(hidden)
    hidden.loop.advance(10)
    assert hidden.rewriter is not None
    assert hidden.rewriter.segments == 1


def test_a_full_disk_is_not_filled_further() -> None:
    """A copy needs room; without it, the segment stays as it is."""
    rig = closed_rig(SimulatedFiles(capacity=2 << 20))
    rewritten(rig)
    assert rig.rewriter is not None
    assert rig.rewriter.segments == 0
    assert len(as_stored(rig.log)) == COUNT


def test_steps_leave_the_time_to_others() -> None:
    """A rewrite reads no more bytes a second than it may."""
    rig = closed_rig()
    size = rig.log._segments[0].size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "REWRITE_BYTES_PER_S", size)
        rig.loop.advance(2)
        assert rig.rewriter is not None
        assert rig.rewriter.pending == 1
        rig.loop.advance(10)
        assert rig.rewriter.segments == 1


def test_the_columns_are_those_of_the_batches() -> None:
    """If only some messages have keys, there is a column of keys, and one of times."""
    (batch,) = as_stored(rewritten(closed_rig()).log)
    assert batch.flags & HAS_KEYS
    times = batch.times()
    assert times is not None
    assert (times[0], times[-1]) == (batch.base_timestamp, batch.max_timestamp)


def test_a_quiet_segment_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing was appended between two looks, an active segment with many small batches is closed and rewritten."""
    monkeypatch.setattr(limits, "REWRITE_IDLE_BATCHES", COUNT)
    rig = filled(Rig(rewrite=True), COUNT - 1)
    for number in range(3):  # too few, then still growing
        rig.log.roll_if_old(rig.clock.now_ms())
        rig.publish(b"more %d" % number)
        assert len(rig.log._segments) == 1
    rig.log.roll_if_old(rig.clock.now_ms())
    rig.log.roll_if_old(rig.clock.now_ms())
    before = everything(rig)
    rewritten(rig)
    assert len(rig.log._segments) == 2
    assert len(as_stored(rig.log)) == 1
    assert everything(rig) == before

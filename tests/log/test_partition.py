"""A partition on disk: what it promises while nothing is broken, and what a full disk does to it."""

import errno

import pytest

from headrace import limits
from headrace.errors import (
    Closed,
    OffsetOutOfRange,
    QueueFull,
    StorageFailed,
    StorageFull,
)
from headrace.log.batch import AFTER_SYNC, ZSTD, encode
from headrace.log.columns import Columns
from headrace.log.index import Index
from headrace.log.segment import log_name
from headrace.log.workers import IDLE_JOBS_MAX
from tests.fakes import FaultyFiles, SimulatedFiles
from tests.log.rig import DIRECTORY, Rig, as_stored, entry_of, number_of, records, values

SMALL = 4096  # a segment that is full after a few records of this size:
VALUE = bytes(1_000)


def faulty_rig(**options: object) -> tuple[Rig, FaultyFiles]:
    files = FaultyFiles(SimulatedFiles())
    return Rig(files, **options), files  # type: ignore[arg-type]


def data_syncs(files: FaultyFiles) -> int:
    return files.count("sync", ".log")


def bases(rig: Rig) -> list[int]:
    return [int(name[:20]) for name in rig.files.names(DIRECTORY) if name.endswith(".log")]


# --- append and read --------------------------------------------------------------------------
def test_a_new_partition_is_empty() -> None:
    """Nothing is there, nothing is written, and the first offset is 0."""
    rig = Rig()
    assert (rig.log.start_offset, rig.log.end_offset, rig.log.read(0)) == (0, 0, [])
    assert rig.log.offset_at(0) == 0
    assert rig.files.names(DIRECTORY) == []
    with pytest.raises(OffsetOutOfRange, match="empty"):
        rig.log.read(1)
    rig.close()
    assert rig.files.names(DIRECTORY) == []


def test_records_are_where_they_were_said_to_be() -> None:
    """Each answer's offset leads to its record, now and after a reopen."""
    rig = Rig()
    entries = [rig.publish(b"a"), rig.publish(b"b", b"c"), rig.publish(b"d")]
    assert [entry.first_offset for entry in entries] == [0, 1, 3]
    assert [number_of(entry) for entry in entries] == [1, 1, 1]
    for _ in range(2):
        assert values(rig.log) == [b"a", b"b", b"c", b"d"]
        assert rig.log.read(2, 1)[0].values() == [b"b", b"c"]
        assert rig.log.read_cached(3).values() == [b"d"]
        assert rig.log.read(4) == []
        for outside in (-1, 5, 1 << 40):
            with pytest.raises(OffsetOutOfRange, match="holds 0 to 3"):
                rig.log.read(outside)
        rig.reopen()
    assert rig.publish(b"e").first_offset == 4
    assert rig.advanced == [1, 3, 4, 5]


def test_whole_batches_go_in_as_they_are() -> None:
    """A batch from a client lies on disk with the very body it came with."""
    rig = Rig()
    batch = encode(Columns([b"a", b"b"], keys=[b"k", None], headers=[{"h": "1"}, None]))
    body = batch.body
    rig.publish(batch=batch)
    rig.reopen()
    (stored,) = rig.log.read(0)
    assert stored.body == body
    assert stored.headers() == [{"h": "1"}, None]


def test_compression_is_a_matter_of_the_disk_alone() -> None:
    """With compression the file is smaller and every reader sees the same records."""
    sizes = []
    for compression in ("none", "zstd"):
        rig = Rig(compression=compression)
        rig.publish(*[b"the same words again and again"] * 200)
        (stored,) = rig.log.read(0)
        assert bool(stored.flags & ZSTD) == (compression == "zstd")
        assert values(rig.log) == [b"the same words again and again"] * 200
        sizes.append(rig.log.size_bytes())
    assert sizes[1] * 5 < sizes[0]


# --- durability: always -----------------------------------------------------------------------
def test_nothing_is_seen_before_its_sync() -> None:
    """In mode always, a record is answered and shown only after the sync that made it durable."""
    events: list[str] = []

    class Watched(FaultyFiles):
        def sync(self, handle) -> None:  # type: ignore[no-untyped-def]
            super().sync(handle)
            if handle.path.suffix == ".log":
                events.append(f"sync, end {rig.log.end_offset}")

    rig = Rig(Watched(SimulatedFiles()))
    rig.log.on_advance = lambda: events.append(f"advance, end {rig.log.end_offset}")
    for value in (b"a", b"b"):
        rig.publish(value, done=lambda entry: events.append(f"done {entry.first_offset}"))
    assert events == [
        "sync, end 0", "advance, end 1", "done 0", "sync, end 1", "advance, end 2", "done 1",
    ]  # fmt: skip


def test_a_commit_under_way_is_not_visible() -> None:
    """While the disk works, and until the loop hears of it, the end does not move."""
    rig = Rig(hold=True)
    entry = rig.publish(b"a")
    assert (rig.log.end_offset, number_of(entry), rig.workers.held) == (0, 0, 1)
    rig.workers.release()
    assert (rig.log.end_offset, number_of(entry)) == (0, 0)
    rig.loop.run_until_idle()
    assert (rig.log.end_offset, number_of(entry)) == (1, 1)


@pytest.mark.parametrize("count", [1, 100])
def test_one_sync_serves_all_who_wait(count: int) -> None:
    """However many publishes wait, they cost one write and one sync."""
    rig, files = faulty_rig()
    rig.publish(b"first")
    syncs, writes = data_syncs(files), files.count("write_at")
    entries = [rig.append(b"%d" % number) for number in range(count)]
    rig.loop.run_until_idle()
    assert all(number_of(entry) == 1 for entry in entries)
    assert (data_syncs(files) - syncs, files.count("write_at") - writes) == (1, 1)


def test_what_comes_during_a_commit_goes_into_the_next_one() -> None:
    """Publishes during a commit are one further commit, whatever their number."""
    rig, files = faulty_rig(hold=True)
    first = rig.publish(b"first")
    later = [rig.publish(b"%d" % number) for number in range(50)]
    assert rig.workers.held == 1
    rig.workers.release()
    rig.loop.run_until_idle()
    assert number_of(first) == 1
    assert not any(map(number_of, later))
    rig.workers.release()
    rig.loop.run_until_idle()
    assert [entry.first_offset for entry in later] == list(range(1, 51))
    assert (rig.workers.jobs, data_syncs(files)) == (2, 2)


def test_a_commit_that_is_too_large_is_continued() -> None:
    """More than one commit may take is stored by several, in order."""
    rig = Rig()
    big = bytes(limits.COMMIT_BYTES_MAX // 3)
    entries = [rig.append(big) for _ in range(7)]
    rig.loop.run_until_idle()
    assert [entry.first_offset for entry in entries] == list(range(7))
    assert rig.workers.jobs == 4


def test_space_is_reserved_so_that_syncs_are_cheap() -> None:
    """Small appends lie in preallocated space; a clean close gives the rest back."""
    rig, files = faulty_rig()
    for _ in range(50):
        rig.publish(b"small")
    path = DIRECTORY / log_name(0)
    assert files.count("allocate") == 1
    assert files.file_size(path) >= limits.PREALLOCATE_BYTES_MIN
    size = rig.log.size_bytes()
    rig.close()
    assert files.file_size(path) == size


# --- durability: interval and never -----------------------------------------------------------
def test_interval_answers_at_once_and_syncs_soon() -> None:
    """In mode interval one sync follows within the interval, and none when nothing was written."""
    rig, files = faulty_rig(durability="interval", sync_interval_ms=100)
    entries = [rig.publish(b"%d" % number) for number in range(5)]
    assert all(number_of(entry) == 1 for entry in entries)
    assert (rig.log.end_offset, data_syncs(files)) == (5, 0)
    rig.loop.advance(0.099)
    assert data_syncs(files) == 0
    rig.loop.advance(0.001)
    assert data_syncs(files) == 1
    rig.loop.advance(10)
    assert (data_syncs(files), rig.loop.timers) == (1, 0)
    rig.publish(b"more")
    rig.loop.advance(0.1)
    assert data_syncs(files) == 2


def test_never_leaves_syncing_to_the_system() -> None:
    """In mode never nothing is synced but what a roll, a flush or a close asks for."""
    rig, files = faulty_rig(durability="never", segment_bytes=SMALL)
    rig.publish(VALUE)
    rig.loop.advance(100)
    assert (rig.log.end_offset, data_syncs(files)) == (1, 0)
    for _ in range(4):
        rig.publish(VALUE)
    assert (len(bases(rig)), data_syncs(files)) == (2, 1)
    rig.log.flush()
    rig.loop.run_until_idle()
    assert data_syncs(files) == 2
    rig.publish(VALUE)
    rig.close()
    assert data_syncs(files) == 3


def test_a_sync_that_is_due_is_not_lost_to_a_failed_write() -> None:
    """A commit may fail, but a sync that it was to do for what came before it is done."""
    rig, files = faulty_rig(durability="interval", sync_interval_ms=100)
    rig.publish(b"kept")
    rig.change(segment_bytes=1)  # so that the next commit has to roll, and cannot
    files.fail("truncate", 1, errno.ENOSPC)
    rig.log.flush()
    entry = rig.publish(b"refused")
    assert isinstance(entry.error, StorageFull)
    assert data_syncs(files) == 1


def test_the_interval_sync_does_not_need_a_new_segment() -> None:
    """A full segment on a full disk is synced when its time has come, though it cannot be rolled."""
    rig, files = faulty_rig(durability="interval", sync_interval_ms=100)
    rig.publish(b"kept")
    rig.change(segment_bytes=1)
    files.fail("create", 1, errno.ENOSPC, repeat=True)
    rig.loop.advance(0.1)
    assert data_syncs(files) == 1
    rig.log.flush()
    rig.close()
    assert len(bases(rig)) == 1


@pytest.mark.parametrize(
    ("durability", "flags"),
    [("always", [1, 1, 1, 1]), ("interval", [1, 0, 1, 0]), ("never", [1, 0, 0, 0])],
)
def test_batches_say_what_was_synced_before_them(durability: str, flags: list[int]) -> None:
    """AFTER_SYNC stands exactly where all that lies before is known to be on disk."""
    rig = Rig(durability=durability, sync_interval_ms=100)
    for number in range(4):
        rig.publish(b"%d" % number)
        if number == 1 and durability == "interval":
            rig.loop.advance(0.1)
    found = [bool(batch.flags & AFTER_SYNC) for batch in as_stored(rig.log)]
    assert found == [bool(flag) for flag in flags]


def test_only_the_first_batch_of_a_commit_is_after_a_sync() -> None:
    """Batches that are written together do not vouch for each other."""
    rig = Rig()
    rig.append(b"a")
    rig.append(batch=encode(Columns([b"b"])))
    rig.append(b"c")
    rig.loop.run_until_idle()
    assert [bool(batch.flags & AFTER_SYNC) for batch in as_stored(rig.log)] == [True, False, False]


def test_the_mode_may_change_while_it_is_open() -> None:
    """When a topic becomes more careful, the next commit syncs all that was written before."""
    rig, files = faulty_rig(durability="never")
    rig.publish(b"a")
    rig.change(durability="always")
    rig.publish(b"b")
    assert data_syncs(files) == 1
    assert rig.log._synced_position == rig.log._position


# --- segments ---------------------------------------------------------------------------------
def test_segments_roll_by_size() -> None:
    """A full segment is closed with its index and what is known of producers; reading goes across."""
    rig = Rig(segment_bytes=SMALL)
    sent = [b"%02d" % number * 300 for number in range(30)]
    for value in sent:
        rig.publish(value)
    assert bases(rig) == sorted(bases(rig))
    assert len(bases(rig)) > 4
    for _ in range(2):
        assert values(rig.log) == sent
        for base, end, size, _ in rig.log.closed_segments():
            assert size >= SMALL
            path = DIRECTORY / log_name(base)
            assert rig.files.file_size(path) == size
            index = Index.load(rig.files.read_file(path.with_suffix(".idx")), base, size)
            assert index is not None
            assert index.end_offset == end
            assert rig.files.exists(DIRECTORY / f"{end:020d}.producers")
        rig.reopen()


def test_segments_roll_by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that recovery's scan is bounded, a segment holds only so many batches."""
    monkeypatch.setattr(limits, "SEGMENT_BATCHES_MAX", 10)
    rig = Rig()
    for _ in range(25):
        rig.publish(b"x")
    assert bases(rig) == [0, 10, 20]


def test_segments_roll_by_age() -> None:
    """An old segment is closed so that retention can reach it; an empty one is left alone."""
    rig = Rig(segment_hours=1.0)
    rig.log.roll_if_old(rig.clock.now_ms() + 10_000_000)
    rig.publish(b"a")
    rig.log.roll_if_old(rig.clock.now_ms() + 3_600_000)
    rig.loop.run_until_idle()
    assert bases(rig) == [0]
    for _ in range(2):  # the second time the new segment is empty
        rig.log.roll_if_old(rig.clock.now_ms() + 3_600_001)
        rig.loop.run_until_idle()
        assert bases(rig) == [0, 1]
    rig.reopen()
    assert bases(rig) == [0, 1]
    assert rig.publish(b"b").first_offset == 1
    assert values(rig.log) == [b"a", b"b"]


def test_the_age_of_a_segment_survives_a_restart() -> None:
    """A segment is as old as its first record, not as the process."""
    rig = Rig(segment_hours=1.0)
    rig.publish(b"a")
    rig.loop.advance(3_000)
    rig.reopen()
    rig.loop.advance(601)
    rig.log.roll_if_old(rig.clock.now_ms())
    rig.loop.run_until_idle()
    assert bases(rig) == [0, 1]


def test_dropping_takes_whole_closed_segments() -> None:
    """Segments wholly before the offset go with their files; the one being written never does."""
    rig = Rig(segment_bytes=SMALL, cache_bytes=1 << 20)
    for number in range(20):
        rig.publish(b"%02d" % number * 500)
    first, second, third, *_ = bases(rig)
    rig.log.drop_before(second - 1)
    assert rig.log.start_offset == first == 0
    rig.log.drop_before(third)
    rig.loop.run_until_idle()
    assert rig.log.start_offset == third
    assert {name[:20] for name in rig.files.names(DIRECTORY)} >= {f"{third:020d}"}
    assert f"{second:020d}.idx" not in rig.files.names(DIRECTORY)
    with pytest.raises(OffsetOutOfRange):
        rig.log.read(second)  # though it is still in the cache
    with pytest.raises(OffsetOutOfRange):
        rig.log.read_cached(second)
    rig.log.drop_before(1 << 40)
    rig.loop.run_until_idle()
    assert rig.log.start_offset == bases(rig)[0]
    assert len(bases(rig)) == 1
    rest = records(rig.log)
    rig.reopen()
    assert records(rig.log) == rest
    assert rig.publish(b"next").first_offset == 20


def test_what_cannot_be_deleted_leaves_no_gap() -> None:
    """Readers do not see it any more, a start would, with all that follows it; the next round deletes it."""
    rig, files = faulty_rig(segment_bytes=SMALL)
    for number in range(20):
        rig.publish(b"%02d" % number * 500)
    before = bases(rig)
    files.fail("remove", 2)
    rig.log.drop_before(1 << 40)
    rig.loop.run_until_idle()
    assert rig.log.start_offset == before[-1]
    assert bases(rig) in (before, before[1:])
    rig.log.roll_if_old(0)
    rig.loop.run_until_idle()
    assert bases(rig) == before[-1:]


def test_a_log_closes_after_its_files_are_removed() -> None:
    """The next owner of the directory must not miss a file that it has just seen."""
    rig = Rig(segment_bytes=SMALL)
    for number in range(20):
        rig.publish(b"%02d" % number * 500)
    closed: list[bool] = []
    rig.workers.hold = True
    rig.log.drop_before(1 << 40)
    rig.log.close(lambda: closed.append(True))
    rig.loop.run_until_idle()
    rig.workers._held.rotate(-1)  # the writer's file is cut first
    rig.workers.release(1)
    rig.loop.run_until_idle()
    assert not closed
    rig.workers.release()
    rig.loop.run_until_idle()
    assert closed
    assert len(bases(rig)) == 1


def test_a_closed_log_removes_nothing() -> None:
    """Its directory may be that of another topic by now. The next start finds what the disk has refused to remove."""
    rig, files = faulty_rig(segment_bytes=SMALL)
    for number in range(20):
        rig.publish(b"%02d" % number * 500)
    files.fail("remove", 1)
    log = rig.log
    log.drop_before(1 << 40)
    rig.loop.run_until_idle()
    rig.close()
    left = bases(rig)
    assert len(left) > 1
    log.roll_if_old(0)
    log.drop_before(1 << 40)
    rig.loop.run_until_idle()
    assert bases(rig) == left


def test_a_closed_log_begins_no_segment() -> None:
    """The next owner may have written to the last one, which would be cut where this log has ended."""
    rig = Rig()
    log = rig.log
    rig.publish(b"before")
    rig.close()
    rig.publish(b"after")
    log.roll_soon(1)
    rig.loop.run_until_idle()
    assert bases(rig) == [0]
    rig.reopen()
    assert values(rig.log) == [b"before", b"after"]


def test_few_partitions_remove_files_at_a_time() -> None:
    """Large files take long to remove, and commits need a thread meanwhile."""
    rig = Rig(hold=True)
    ended: list[int] = []
    for number in range(10):
        rig.workers.submit_idle(lambda: None, lambda *_, number=number: ended.append(number))  # type: ignore[misc]
    assert rig.workers.held == IDLE_JOBS_MAX
    while rig.workers.release():
        rig.loop.run_until_idle()
        assert rig.workers.held <= IDLE_JOBS_MAX
    assert ended == list(range(10))


# --- a full disk ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["allocate", "write_at"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("short", [None, 10, 70])
def test_a_refused_write_is_definite_and_the_next_one_works(
    kind: str, code: int, short: int | None
) -> None:
    """An error before the sync means that nothing was stored; when there is room it goes on."""
    rig, files = faulty_rig()
    rig.publish(b"before")
    rig.log._allocated = rig.log._position  # so that the next write has to reserve space
    files.fail(kind, 1, code, short=short, repeat=kind == "allocate")
    refused = rig.publish(b"refused", b"refused")
    expected = StorageFailed if code == errno.EIO else StorageFull
    assert type(refused.error) is expected
    assert refused.error.retryable
    assert (refused.first_offset, rig.log.end_offset) == (-1, 1)
    files.heal()
    assert rig.publish(b"after").first_offset == 1
    assert rig.failures == []
    rig.reopen()
    assert values(rig.log) == [b"before", b"after"]
    assert rig.log.torn_bytes == 0


def test_a_disk_that_is_really_full_recovers_by_itself() -> None:
    """With little room left small records still fit; with none they are refused; with room they go on."""
    disk = SimulatedFiles()
    rig = Rig(disk)
    rig.publish(b"a")
    rig.reopen()
    disk.capacity = disk.file_size(DIRECTORY / log_name(0)) + 200
    assert rig.publish(b"b").error is None
    refused = [rig.publish(VALUE) for _ in range(3)]
    assert {type(entry.error) for entry in refused} == {StorageFull}
    assert rig.publish(b"c").error is None
    assert values(rig.log) == [b"a", b"b", b"c"]
    disk.capacity = 1 << 20
    assert rig.publish(VALUE).first_offset == 3
    rig.reopen()
    assert values(rig.log) == [b"a", b"b", b"c", VALUE]


@pytest.mark.parametrize("kind", ["create", "write_at", "sync", "rename", "truncate"])
@pytest.mark.parametrize("name", [".idx", ".producers"])
def test_a_roll_that_fails_is_tried_again(kind: str, name: str) -> None:
    """When a segment cannot be closed, nothing was stored, and the next publish closes it."""
    rig, files = faulty_rig(segment_bytes=SMALL)
    for _ in range(4):
        rig.publish(VALUE)
    assert bases(rig) == [0]
    files.fail(kind, 1, errno.ENOSPC, name=name)
    refused = rig.publish(b"refused")
    assert isinstance(refused.error, StorageFull)
    assert rig.publish(b"stored").first_offset == 4
    assert (bases(rig), rig.failures) == ([0, 4], [])
    rig.reopen()
    assert values(rig.log) == [VALUE] * 4 + [b"stored"]


def test_the_queue_in_front_of_the_disk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When more waits than may wait, publishes are refused at once, and can be tried again."""
    monkeypatch.setattr(limits, "COMMIT_QUEUE_BYTES_MAX", 5_000)
    rig = Rig(hold=True)
    rig.publish(VALUE)
    taken = [rig.publish(VALUE) for _ in range(4)]
    refused = rig.publish(VALUE)
    assert isinstance(refused.error, QueueFull)
    assert (refused.error.code, refused.error.retryable) == ("overloaded", True)
    for _ in range(2):
        rig.workers.release()
        rig.loop.run_until_idle()
    assert all(number_of(entry) == 1 and entry.error is None for entry in taken)
    assert rig.publish(VALUE).error is None


# --- closing --------------------------------------------------------------------------------------
def test_closing_stores_what_waits() -> None:
    """What was handed over before the close is durable and answered before the close is done."""
    rig = Rig(hold=True, durability="never")
    entries = [rig.publish(b"a"), rig.append(b"b")]
    order: list[object] = []
    rig.log.close(lambda: order.append([number_of(entry) for entry in entries]))
    late = rig.append(b"late")
    assert isinstance(late.error, Closed)
    while rig.workers.release():
        rig.loop.run_until_idle()
    assert order == [[1, 1]]
    assert rig.log._synced_position == rig.log._position
    rig.log.close(lambda: order.append("again"))
    assert order == [[1, 1], "again"]
    assert isinstance(rig.publish(b"later").error, Closed)
    rig.workers.hold = False
    assert values(rig.open()) == [b"a", b"b"]


def test_closing_syncs_all_of_what_waits() -> None:
    """Also if that takes several commits, and the mode would leave the sync for later."""
    rig = Rig(hold=True, durability="interval")
    entries = [rig.append(bytes(limits.COMMIT_BYTES_MAX // 3)) for _ in range(7)]
    synced: list[bool] = []
    rig.log.close(lambda: synced.append(rig.log._synced_position == rig.log._position))
    rig.loop.run_until_idle()
    while rig.workers.release():
        rig.loop.run_until_idle()
    assert synced == [True]
    assert [number_of(entry) for entry in entries] == [1] * 7


def test_everybody_who_closes_is_told() -> None:
    """Two closes at once are both answered, when it is done."""
    rig = Rig(hold=True)
    rig.publish(b"a")
    told: list[int] = []
    rig.log.close(lambda: told.append(1))
    rig.log.close(lambda: told.append(2))
    assert told == []
    while rig.workers.release():
        rig.loop.run_until_idle()
    assert told == [1, 2]


def test_an_open_close_cycle_changes_nothing() -> None:
    """Opening and closing a partition leaves its bytes as they are, and opens no file for long."""
    rig = Rig(segment_bytes=SMALL)
    for _ in range(9):
        rig.publish(VALUE)
    rig.close()

    def everything() -> dict[str, bytes]:
        return {n: rig.files.read_file(DIRECTORY / n) for n in rig.files.names(DIRECTORY)}

    before = everything()
    for _ in range(3):
        rig.open()
        rig.close()
        assert everything() == before
    assert len(rig.readers) == 0


def test_closing_leaves_no_timer_behind() -> None:
    """The sync that an interval had planned is done by the close instead."""
    rig, files = faulty_rig(durability="interval")
    rig.publish(b"a")
    assert rig.loop.timers == 1
    rig.close()
    assert (rig.loop.timers, data_syncs(files)) == (0, 1)


def test_an_entry_is_answered_exactly_once() -> None:
    """Stored, repeated, refused by judgement or by size: each entry hears one answer."""
    rig = Rig()
    entries = [
        entry_of(b"a"),
        entry_of(b"p", producer=(7, 0, 0)),
        entry_of(b"p", producer=(7, 0, 0)),
        entry_of(b"gap", producer=(7, 0, 9)),
        entry_of(*[bytes(1 << 20)] * 130, producer=(9, 0, 0)),
        entry_of(b"b"),
    ]
    for entry in entries:
        rig.log.append(entry)
    rig.loop.run_until_idle()
    assert [number_of(entry) for entry in entries] == [1] * 6
    assert [entry.first_offset for entry in entries] == [0, 1, 1, -1, -1, 2]
    assert [getattr(entry.error, "code", None) for entry in entries] == [
        None, None, None, "sequence_gap", "batch_too_large", None,
    ]  # fmt: skip

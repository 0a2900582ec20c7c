"""Reading a partition on disk: sizes, the cache, runs of small batches, times."""

import pytest

from headrace.errors import DataCorrupt
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.log.segment import log_name
from tests.log.rig import DIRECTORY, Rig, as_stored, entry_of
from tests.log.test_partition import SMALL, VALUE, bases, faulty_rig


def test_reading_follows_the_size_that_was_asked_for() -> None:
    """A read gives at least one batch, and no more than fit; the next one goes on behind it."""
    rig = Rig()
    for number in range(10):
        rig.publish(*[b"%d" % number] * 100)
    size = rig.log.read(0, 1)[0].stored_bytes
    assert [len(rig.log.read(0, size * n)) for n in (1, 4, 10, 20)] == [1, 4, 10, 10]


def test_the_cache_serves_what_was_just_written() -> None:
    """A follower of the tail reads from memory, and closing the partition empties it."""
    rig, files = faulty_rig(cache_bytes=1 << 20)
    rig.publish(b"a")
    reads = files.count("read_at")
    assert rig.log.read_cached(0).values() == [b"a"]
    assert rig.log.read(0)[0].values() == [b"a"]
    assert files.count("read_at") == reads
    number = rig.log.number
    rig.close()
    assert rig.cache.get(number, 0) is None


def test_small_batches_are_read_as_one() -> None:
    """Messages that were published one at a time come together, from the file and from the cache."""
    for cache_bytes in (0, 1 << 20):
        rig = Rig(cache_bytes=cache_bytes)
        for number in range(20):
            rig.publish(b"%d" % number, keys=[b"k"] if number == 7 else None)
            rig.loop.advance(0.001)
        expected = [b"%d" % number for number in range(20)]
        batch = rig.log.read_cached(0)
        assert batch.values() == expected
        assert batch.keys() == [None] * 7 + [b"k"] + [None] * 12
        assert rig.log.read_cached(13) is rig.log.read_cached(19)
        assert batch.times() == [each.base_timestamp for each in as_stored(rig.log)]
        assert [each.values() for each in rig.log.read(0)] == [expected]
        rig.publish(b"next")
        assert rig.log.read_cached(20).values() == [b"next"]


def test_a_reader_continues_where_it_stopped() -> None:
    """Reading batch by batch does not search for each batch from the last entry of the index."""
    rig, files = faulty_rig()
    for number in range(100):
        rig.publish(b"%d" % number * 10)
    segment = rig.log._segments[0]
    positions: list[int] = []
    load = segment._files.read_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            files,
            "read_at",
            lambda handle, at, size: positions.append(at) or load(handle, at, size),
        )
        at = 0
        while at < 100:
            at = segment.read(at, 100, 1)[-1].end_offset
    assert len(set(positions)) == 100


def test_a_run_ends_where_the_log_ends() -> None:
    """Records after a held end are in no run."""
    rig = Rig(cache_bytes=1 << 20)
    rig.publish(b"a")
    rig.publish(b"b")
    rig.log.hold()
    for number in range(3):
        entry = entry_of(batch=encode(Columns([b"h"])), producer=(7, 0, number))
        entry.hidden = True
        rig.log.append(entry)
        rig.loop.run_until_idle()
    assert rig.log.read_cached(0).values() == [b"a", b"b"]
    rig.cache.forget(rig.log.number)
    assert rig.log.read_cached(0).values() == [b"a", b"b"]
    rig.log.release()
    assert rig.log.read_cached(2).values() == [b"h"] * 3


# --- times ------------------------------------------------------------------------------------
def test_times_lead_to_offsets_across_segments() -> None:
    """The first record that is not older than a time, in whatever segment it lies."""
    rig = Rig(segment_bytes=SMALL)
    start = rig.clock.now_ms()
    for _ in range(20):
        rig.publish(VALUE)
        rig.loop.advance(1)
    assert len(bases(rig)) > 3
    for _ in range(2):
        for number in range(20):
            assert rig.log.offset_at(start + 1000 * number) == number
            assert rig.log.offset_at(start + 1000 * number - 1) == number
        assert rig.log.offset_at(0) == 0
        assert rig.log.offset_at(start + 20_000) == 20
        rig.reopen()


def test_times_within_a_batch_are_found() -> None:
    """Where records bring times of their own, the offset is that of the record, not of its batch."""
    rig = Rig()
    now = rig.clock.now_ms()
    rig.publish(b"a", b"b", b"c", times=[now - 20, now - 10, now])
    assert [rig.log.offset_at(now + d) for d in (-30, -20, -19, -10, 0, 1)] == [0, 0, 1, 1, 2, 3]


def test_times_never_run_backwards_over_a_restart() -> None:
    """A clock that was set back does not make records older than those before them."""
    rig = Rig(segment_bytes=SMALL)
    now = rig.clock.now_ms()
    for _ in range(6):
        rig.publish(VALUE)
    rig.clock.jump(-3_600_000)
    rig.reopen()
    assert rig.publish(b"later").timestamp == now
    rig.change(segment_hours=0)
    rig.clock.set(now + 1)
    rig.log.roll_if_old(rig.clock.now_ms())
    rig.loop.run_until_idle()
    rig.clock.jump(-3_600_000)
    rig.reopen()
    assert rig.publish(b"in a segment of its own").timestamp == now


def test_a_damaged_segment_is_not_older_than_it_was() -> None:
    """Retention by age goes by what follows when a closed segment's own times are destroyed."""
    rig = Rig(segment_bytes=SMALL)
    for number in range(20):
        rig.publish(b"%02d" % number * 500)
        rig.loop.advance(1)
    whole = rig.log.closed_segments()
    rig.close()
    for base, *_ in whole[:2]:
        path = DIRECTORY / log_name(base)
        rig.files.put(path, b"\xff" * rig.files.file_size(path))  # type: ignore[attr-defined]
        rig.files.remove(path.with_suffix(".idx"))
    rig.open()
    for before, after in zip(whole, rig.log.closed_segments(), strict=True):
        assert after[:3] == before[:3]
        assert after[3] >= before[3]


def test_times_are_found_around_destroyed_segments() -> None:
    """A segment with nothing left in it neither hides what is before it nor ends the search."""
    rig = Rig(segment_bytes=SMALL)
    start = rig.clock.now_ms()
    for number in range(40):
        rig.publish(b"%02d" % number * 500)
        rig.loop.advance(1)
    whole = rig.log.closed_segments()
    rig.close()
    lost: set[int] = set()
    for base, end, *_ in (whole[0], whole[2], whole[3], whole[-1]):
        path = DIRECTORY / log_name(base)
        rig.files.put(path, b"\xff" * rig.files.file_size(path))  # type: ignore[attr-defined]
        rig.files.remove(path.with_suffix(".idx"))
        lost.update(range(base, end))
    rig.open()
    for number in range(40):
        expected = next(offset for offset in range(number, 41) if offset not in lost)
        assert rig.log.offset_at(start + 1000 * number) == expected
    with pytest.raises(DataCorrupt, match=f"offsets {whole[2][0]} to {whole[2][1] - 1} "):
        rig.log.read(whole[2][0])

"""One file of batches: found whatever lies between them, read around damage, opened sparingly."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files
from headrace.log import segment as segments
from headrace.log.batch import AFTER_SYNC, HEADER_BYTES, Batch, encode
from headrace.log.columns import Columns
from headrace.log.index import Index
from headrace.log.segment import (
    Damage,
    Found,
    Readers,
    Segment,
    base_offset_of,
    log_name,
    scan,
)
from tests.fakes import FaultyFiles, SimulatedFiles

PATH = Path("data/orders/0") / log_name(100)


def batch(offset: int, *values: bytes, time: int = 0, flags: int = 0) -> Batch:
    made = encode(Columns(list(values)))
    made.base_offset, made.base_timestamp, made.max_timestamp = offset, time, time
    made.flags |= flags
    return made


def log_of(count: int = 6, size: int = 24, base: int = 100) -> list[Batch]:
    """Batches of two records each, their times one apart."""
    return [
        batch(base + 2 * number, bytes([65 + number % 26]) * size, b"x", time=1_000 + number)
        for number in range(count)
    ]


def disk(content: bytes) -> SimulatedFiles:
    files = SimulatedFiles()
    files.put(PATH, content)
    return files


def parts_of(content: bytes, base: int = 100) -> list[Found | Damage]:
    files = disk(content)
    return list(scan(files, files.open(PATH), len(content), base_offset=base))


def raw_of(batches: list[Batch]) -> bytes:
    return b"".join(each.raw() for each in batches)


def opened(content: bytes, index: Index | None = None) -> Segment:
    files = disk(content)
    return Segment(files, Readers(files), PATH, 100, len(content), index)


def found_in(parts: list[Found | Damage]) -> list[int]:
    return [part.batch.base_offset for part in parts if isinstance(part, Found)]


# --- names ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("00000000000000000000.log", 0),
        ("00000000000000000123.log", 123),
        ("00000000000000000123.idx", None),
        ("00000000000000000123.log.tmp", None),
        ("00000000000000000123.torn-0", None),
        ("123.log", None),
        ("0000000000000000012x.log", None),
        ("-0000000000000000123.log", None),
        ("topic.json", None),
    ],
)
def test_the_name_of_a_segment_is_its_first_offset(name: str, offset: int | None) -> None:
    """Only twenty digits and .log make a segment; everything else in the directory is none."""
    assert base_offset_of(name) == offset
    if offset is not None:
        assert log_name(offset) == name


# --- scanning ---------------------------------------------------------------------------------
def test_a_whole_file_is_all_batches() -> None:
    """A scan of an undamaged file finds each batch where it is, and nothing else."""
    batches = log_of()
    parts = parts_of(raw_of(batches))
    assert all(isinstance(part, Found) for part in parts)
    assert found_in(parts) == [100, 102, 104, 106, 108, 110]
    assert [part.position for part in parts] == [
        sum(each.stored_bytes for each in batches[:number]) for number in range(len(batches))
    ]


def test_zeros_behind_the_last_batch_are_said_to_be_zeros() -> None:
    """Preallocated space is one piece of damage that says it has nothing in it."""
    raw = raw_of(log_of())
    assert parts_of(raw + bytes(1000))[-1] == Damage(len(raw), len(raw) + 1000, True)
    assert parts_of(raw + bytes(500) + b"x" + bytes(500))[-1] == Damage(
        len(raw), len(raw) + 1001, False
    )
    assert parts_of(bytes(4096)) == [Damage(0, 4096, True)]
    assert parts_of(b"") == []


@pytest.mark.parametrize("victim", range(6))
@pytest.mark.parametrize("at", [0, 5, 20, 70])
def test_damage_is_exactly_the_batch_that_was_hit(victim: int, at: int) -> None:
    """A changed byte in header or body loses that batch, and every other one is found."""
    batches = log_of()
    raw = bytearray(raw_of(batches))
    start = sum(each.stored_bytes for each in batches[:victim])
    raw[start + at] ^= 1
    parts = parts_of(bytes(raw))
    assert found_in(parts) == [each.base_offset for each in batches if each is not batches[victim]]
    holes = [part for part in parts if isinstance(part, Damage)]
    assert holes == [Damage(start, start + batches[victim].stored_bytes, False)]


@given(st.data())
def test_any_holes_are_found(data: st.DataObject) -> None:
    """Whatever ranges are overwritten, all batches outside of them are found, and no others."""
    batches = log_of(12)
    before = raw_of(batches)
    raw = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw) - 1))
        stop = min(start + data.draw(st.integers(1, 300)), len(raw))
        byte = data.draw(st.sampled_from([b"\0", b"\xff", b"HRB1"]))
        for at in range(start, stop):
            raw[at] = byte[at % len(byte)]
    # What the one has overwritten another may have put right again.
    hit = {at for at, (was, now) in enumerate(zip(before, raw, strict=True)) if was != now}
    expected, at = [], 0
    for each in batches:
        if not hit & set(range(at, at + each.stored_bytes)):
            expected.append(each.base_offset)
        at += each.stored_bytes
    parts = parts_of(bytes(raw))
    assert found_in(parts) == expected
    position = 0
    for part in parts:  # the parts cover the file without a gap
        assert part.position == position
        position = part.end if isinstance(part, Damage) else part.position + part.size
    assert position == len(raw)


def test_a_scan_is_the_same_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and magic numbers across the borders of what is read at once are found all the same."""
    batches = log_of(20)
    raw = bytearray(raw_of(batches))
    for at in (3, 900, 901, 1500):
        raw[at] ^= 0x55
    expected = parts_of(bytes(raw))
    for size in (8, 16, 64, 72, 104, 136, 512):
        monkeypatch.setattr(segments, "SCAN_BYTES", size)
        assert [
            (type(part), part.position) for part in parts_of(bytes(raw))
        ] == [(type(part), part.position) for part in expected]  # fmt: skip


def test_offsets_must_continue() -> None:
    """A valid batch with the wrong offset is damage: an older one, or one too early."""
    one, two, three = batch(100, b"a"), batch(101, b"b"), batch(102, b"c")
    parts = parts_of(one.raw() + one.raw() + three.raw())
    assert found_in(parts) == [100, 102]
    assert parts[1] == Damage(one.stored_bytes, 2 * one.stored_bytes, False)
    assert parts_of(two.raw(), base=100)[0] == Damage(0, two.stored_bytes, False)
    assert found_in(parts_of(one.raw() + b"\xff" * 64 + three.raw())) == [100, 102]


def hostile(offset: int) -> bytes:
    """What somebody may put into a message: the bytes of a batch that vouches for all before it."""
    return batch(offset, b"invented", flags=AFTER_SYNC).raw()


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_batch_inside_a_message_is_never_taken_for_one(cut: int) -> None:
    """A message that contains a batch is not mistaken for it when the batch around it is damaged."""
    outer = batch(100, bytes(40) + hostile(101) + bytes(200), b"end")
    inner = outer.body.index(b"HRB1")
    assert inner % 8 == 0, "the trap must be set where batches begin"
    behind = batch(102, b"real")
    torn = outer.raw()[:-cut]
    assert found_in(parts_of(torn)) == []
    flipped = bytearray(outer.raw() + behind.raw())
    flipped[outer.stored_bytes - cut] ^= 1
    assert found_in(parts_of(bytes(flipped))) == [102]


# --- reading ------------------------------------------------------------------------------------
def test_reading_begins_with_the_batch_that_holds_the_offset() -> None:
    """Any offset of a batch gives that batch first, and as many more as were asked for."""
    batches = log_of()
    segment = opened(raw_of(batches))
    for offset in range(100, 112):
        found = segment.read(offset, 112, 1 << 20)
        assert [each.raw() for each in found] == [
            each.raw() for each in batches if each.end_offset > offset
        ]
        assert len(segment.read(offset, 112, 1)) == 1
    size = batches[0].stored_bytes
    assert len(segment.read(100, 112, 3 * size)) == 3
    assert len(segment.read(100, 112, 3 * size + 1)) == 3


def test_nothing_behind_the_end_is_shown() -> None:
    """What is written but not yet promised is not read, though it lies in the file."""
    segment = opened(raw_of(log_of()))
    assert [each.base_offset for each in segment.read(100, 104, 1 << 20)] == [100, 102]


@pytest.mark.parametrize("size", [24, segments.APART_BYTES_MIN])
@pytest.mark.parametrize("at", [30, HEADER_BYTES + 20])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("victim", range(6))
def test_damage_is_named_exactly_and_read_around(
    victim: int, indexed: bool, at: int, size: int
) -> None:
    """Reads stop before a hole, say exactly which offsets it has, and go on behind it, in batches
    that are read together and in such as are read one by one."""
    batches = log_of(size=size)
    hit = at
    index = Index(100)
    at = 0
    for each in batches:
        index.add(each, at, each.stored_bytes)
        at += each.stored_bytes
    raw = bytearray(raw_of(batches))
    start = sum(each.stored_bytes for each in batches[:victim])
    raw[start + hit] ^= 1
    segment = opened(bytes(raw), index if indexed else None)
    bad = batches[victim]
    for offset in range(100, 112):
        if bad.base_offset <= offset < bad.end_offset:
            with pytest.raises(
                DataCorrupt, match=rf"offsets {bad.base_offset} to {bad.end_offset - 1} "
            ):
                segment.read(offset, 112, 1 << 20)
            continue
        found = segment.read(offset, 112, 1 << 20)
        good = [each for each in batches if each.end_offset > offset and each is not bad]
        if offset < bad.base_offset:
            good = [each for each in good if each.base_offset < bad.base_offset]
        assert [each.raw() for each in found] == [each.raw() for each in good]


def test_adjoining_damage_is_one_range() -> None:
    """Two damaged batches side by side are named as one range."""
    batches = log_of()
    raw = bytearray(raw_of(batches))
    size = batches[0].stored_bytes
    raw[2 * size + 70] ^= 1
    raw[3 * size + 2] ^= 1
    segment = opened(bytes(raw))
    for offset in range(104, 108):
        with pytest.raises(DataCorrupt, match="offsets 104 to 107 "):
            segment.read(offset, 112, 1 << 20)


@pytest.mark.parametrize("cut", [1, 64, 104, 105, 300])
def test_a_segment_cut_short_says_what_is_gone(cut: int) -> None:
    """Where records should be and are not, a read is an error and never an empty answer."""
    batches = log_of()
    raw = raw_of(batches)[:-cut]
    segment = opened(raw)
    kept = found_in(parts_of(raw))
    end = kept[-1] + 2
    assert segment.read(end - 1, 112, 1)[0].base_offset == kept[-1]
    for offset in range(end, 112):
        with pytest.raises(DataCorrupt, match=f"offsets {end} to 111 "):
            segment.read(offset, 112, 1 << 20)


@pytest.mark.parametrize("cut", [1, 64, 104, 300, 10_000])
def test_a_file_cut_under_its_reader_is_an_error(cut: int) -> None:
    """A segment that became shorter while it was open is named as damaged, and holds nobody up."""
    batches = log_of()
    raw = raw_of(batches)
    files = disk(raw[:-cut])
    segment = Segment(files, Readers(files), PATH, 100, len(raw))
    kept = found_in(parts_of(raw[:-cut]))
    end = kept[-1] + 2 if kept else 100
    for offset in range(end, 112):
        with pytest.raises(DataCorrupt, match=f"offsets {end} to 111 "):
            segment.read(offset, 112, 1 << 20)
    found = list(scan(files, files.open(PATH), len(raw) + 5_000, base_offset=100))
    assert found_in(found) == kept


def test_large_and_small_batches_are_read_together() -> None:
    """What is returned does not depend on how it was read, but for where it stops."""
    sizes = [10, 100_000, 70_000, 10, 10, 200_000, 10]
    batches = [batch(100 + number, b"a" * size) for number, size in enumerate(sizes)]
    segment = opened(raw_of(batches))
    for first in range(len(batches)):
        for last in range(first, len(batches)):
            wanted = batches[first : last + 1]
            stored = sum(each.stored_bytes for each in wanted)
            found = segment.read(100 + first, 107, stored)
            assert [each.raw() for each in found] == [each.raw() for each in wanted]


def test_large_batches_are_read_whole() -> None:
    """A batch larger than what is read at once is read whole."""
    batches = [batch(100, b"a" * 100_000), batch(101, b"b"), batch(102, b"c" * 300_000)]
    segment = opened(raw_of(batches))
    for each in batches:
        assert segment.read(each.base_offset, 103, 1)[0].raw() == each.raw()


# --- the index ------------------------------------------------------------------------------------
def test_an_index_is_made_anew_when_it_is_missing_or_wrong() -> None:
    """A segment without a usable index is scanned once, and the index is there afterwards."""
    raw = raw_of(log_of(600, 100))
    for rubbish in (None, b"", b"rubbish", bytes(64)):
        files = disk(raw)
        path = PATH.with_suffix(".idx")
        if rubbish is not None:
            files.put(path, rubbish)
        segment = Segment(files, Readers(files), PATH, 100, len(raw))
        assert segment.read(700, 1300, 1)[0].base_offset == 700
        assert Index.load(files.read_file(path), 100, len(raw)) is not None


@pytest.mark.parametrize("kind", ["create", "write_at", "sync", "rename", "sync_directory"])
def test_reading_goes_on_when_the_index_cannot_be_written(kind: str) -> None:
    """A full or failing disk keeps nobody from reading: the index is kept in memory then."""
    raw = raw_of(log_of())
    files = FaultyFiles(disk(raw))
    files.fail(kind, 1, errno.ENOSPC, repeat=True)
    segment = Segment(files, Readers(files), PATH, 100, len(raw))
    assert segment.read(104, 112, 1)[0].base_offset == 104
    assert segment.read(106, 112, 1)[0].base_offset == 106


def test_an_index_that_cannot_be_read_is_made_anew() -> None:
    """An index that the disk refuses to read is treated like one that is not there."""
    raw = raw_of(log_of())
    files = FaultyFiles(disk(raw))
    files.inner.put(PATH.with_suffix(".idx"), b"never read")  # type: ignore[attr-defined]
    files.fail("open", name=".idx")
    segment = Segment(files, Readers(files), PATH, 100, len(raw))
    assert segment.read(104, 112, 1)[0].base_offset == 104


def test_a_wrong_index_leads_nobody_astray() -> None:
    """An index with a right checksum and wrong positions costs time, not correctness."""
    batches = log_of()
    index = Index(100)
    for each in batches:
        index.add(each, 8 * each.base_offset, limits.INDEX_INTERVAL_BYTES)
    segment = opened(raw_of(batches), index)
    for each in batches:
        assert segment.read(each.base_offset, 112, 1)[0].raw() == each.raw()


# --- times ----------------------------------------------------------------------------------------
def test_a_time_leads_to_the_first_batch_that_reaches_it() -> None:
    """The batch for a time is the first that is not older; behind the last there is none."""
    segment = opened(raw_of(log_of()))
    assert segment.batch_at_time(0, 112).base_offset == 100  # type: ignore[union-attr]
    for number in range(6):
        found = segment.batch_at_time(1_000 + number, 112)
        assert found is not None
        assert found.base_offset == 100 + 2 * number
    assert segment.batch_at_time(1_006, 112) is None


def test_a_time_is_looked_for_behind_damage() -> None:
    """Damaged batches on the way, or at the place itself, are stepped over."""
    batches = log_of()
    raw = bytearray(raw_of(batches))
    for victim in (1, 2, 4):
        raw[victim * batches[0].stored_bytes + 70] ^= 1
    segment = opened(bytes(raw))
    for time, offset in [(1_000, 100), (1_001, 106), (1_003, 106), (1_004, 110), (1_005, 110)]:
        found = segment.batch_at_time(time, 112)
        assert found is not None
        assert found.base_offset == offset
    assert segment.batch_at_time(1_006, 112) is None


def test_a_segment_of_nothing_but_damage_has_no_times() -> None:
    """Where nothing is left, no time is found, and that is no crash."""
    segment = opened(b"\xff" * 4096)
    assert segment.batch_at_time(0, 112) is None
    with pytest.raises(DataCorrupt, match="offsets 100 to 111 "):
        segment.read(100, 112, 1)


# --- handles --------------------------------------------------------------------------------------
def test_readers_keep_the_ones_used_last() -> None:
    """At most so many files are open; the one used longest ago is given up first."""
    files = FaultyFiles(SimulatedFiles())
    paths = [PATH.with_name(str(number)) for number in range(4)]
    for path in paths:
        files.inner.put(path, b"")  # type: ignore[attr-defined]
    readers = Readers(files, 3)
    handles = [readers.get(path) for path in paths[:3]]
    assert readers.get(paths[0]) is handles[0]
    readers.get(paths[3])
    assert len(readers) == 3
    opens = files.count("open")
    assert readers.get(paths[0]) is handles[0]
    assert files.count("open") == opens
    readers.get(paths[1])
    assert files.count("open") == opens + 1
    readers.forget(paths[1])
    readers.forget(Path("never opened"))
    assert len(readers) == 2


def test_a_reader_that_was_given_up_can_still_be_used(tmp_path: Path) -> None:
    """A handle that somebody holds is not closed under them, and closes with its last reference."""
    files = Files()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    readers = Readers(files, 1)
    held = readers.get(tmp_path / "a")
    readers.get(tmp_path / "b")
    assert files.read_at(held, 0, 1) == b"a"
    fd = held.fd
    del held
    readers.forget(tmp_path / "b")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_headers_are_found_at_the_very_end() -> None:
    """A last batch with an empty body's worth of bytes left is found, one byte less is not."""
    raw = raw_of(log_of(1))
    assert len(found_in(parts_of(raw))) == 1
    assert found_in(parts_of(raw[: HEADER_BYTES - 1])) == []
    assert found_in(parts_of(raw[:-1])) == []

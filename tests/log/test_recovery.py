"""What a start makes of damaged files: never wrong bytes, never other offsets, never more lost."""

import re
import struct
from itertools import product
from pathlib import Path
from random import Random

import pytest

from headrace import limits
from headrace.errors import DataCorrupt, OutcomeUnknown, ReadOnly, SequenceGap
from headrace.files import Files
from headrace.log.batch import WITH_ORIGINS, crc32c, encode
from headrace.log.columns import Columns
from headrace.log.partition import PartitionLog
from headrace.log.segment import log_name
from tests.fakes import FaultyFiles, SimulatedFiles
from tests.log.rig import DIRECTORY, Rig, as_stored, values

FIRST = DIRECTORY / log_name(0)


def records_of(number: int) -> list[bytes]:
    """What the commit with this number holds: one to three records of some bytes."""
    return [b"%d-%d" % (number, at) * (1 + number % 4) for at in range(1 + number % 3)]


def written(commits: int = 6) -> tuple[SimulatedFiles, list[int], list[bytes]]:
    """A log of so many commits; where each begins in the file, and the end; all values."""
    disk = SimulatedFiles()
    rig = Rig(disk)
    positions, sent = [0], []
    for number in range(commits):
        sent += records_of(number)
        rig.publish(*records_of(number))
        positions.append(rig.log.size_bytes())
    rig.close()
    return disk, positions, sent


def opened_over(content: bytes, *more: tuple[Path, bytes], suspect: bool = False) -> Rig:
    disk = SimulatedFiles()
    disk.put(FIRST, content)
    for path, raw in more:
        disk.put(path, raw)
    rig = Rig(disk)
    rig.open(suspect=suspect)
    return rig


def count_until(commits: int) -> int:
    """How many records the first so many commits have."""
    return sum(len(records_of(number)) for number in range(commits))


def torn_files(rig: Rig) -> dict[str, bytes]:
    names = rig.files.names(DIRECTORY)
    return {name: rig.files.read_file(DIRECTORY / name) for name in names if ".torn-" in name}


# --- torn tails -------------------------------------------------------------------------------
@pytest.mark.parametrize("fill", ["nothing", "zeros", "garbage"])
def test_a_torn_tail_is_cut_at_every_byte(fill: str) -> None:
    """Cut at any byte of the last three commits: the longest valid prefix, the rest kept aside."""
    disk, positions, sent = written()
    raw = disk.read_file(FIRST)
    random = Random(7)
    for cut in range(positions[3], len(raw)):
        rest = len(raw) - cut
        behind = {"nothing": b"", "zeros": bytes(rest), "garbage": random.randbytes(rest)}[fill]
        content = raw[:cut] + behind
        # Not by the cut alone: the last bytes of a batch may be zeros themselves.
        kept = max(n for n, at in enumerate(positions) if content[:at] == raw[:at])
        rig = opened_over(content)
        end = count_until(kept)
        assert (rig.log.end_offset, rig.log.read_only) == (end, None)
        assert values(rig.log) == sent[:end]
        torn = content[positions[kept] :].rstrip(b"\0")
        assert rig.log.torn_bytes == len(torn)
        assert list(torn_files(rig).values()) == ([torn] if torn else [])
        assert not rig.files.read_file(FIRST)[positions[kept] :].rstrip(b"\0"), "it was cut"
        assert rig.publish(b"next").first_offset == end
        rig.reopen()
        assert values(rig.log) == [*sent[:end], b"next"]
        assert rig.log.torn_bytes == 0


def test_each_torn_tail_has_its_own_file() -> None:
    """A second crash does not overwrite what was kept of the first, nor a third what is left."""
    disk, positions, _ = written()
    raw = disk.read_file(FIRST)
    disk.put(FIRST, raw[: positions[5] + 9])
    rig = Rig(disk)
    rig.open()
    rig.close()
    disk.put(FIRST, raw[: positions[4] + 10])
    rig.open()
    rig.close()
    assert sorted(map(len, torn_files(rig).values())) == [9, 10]
    disk.remove(DIRECTORY / f"{0:020d}.torn-0")
    disk.put(FIRST, raw[: positions[3] + 11])
    rig.open()
    assert sorted(map(len, torn_files(rig).values())) == [10, 11]


def test_reserved_zeros_are_no_torn_tail() -> None:
    """Preallocated space behind the last batch is used, not cut, and nothing is said about it."""
    disk, positions, sent = written()
    rig = opened_over(disk.read_file(FIRST) + bytes(limits.PREALLOCATE_BYTES_MIN))
    assert (values(rig.log), rig.log.torn_bytes, torn_files(rig)) == (sent, 0, {})
    size = rig.files.file_size(FIRST)
    rig.publish(b"next")
    assert rig.files.file_size(FIRST) == size
    assert rig.log.size_bytes() > positions[-1]


@pytest.mark.parametrize("content", [b"", bytes(4096)], ids=["empty", "zeros"])
def test_a_segment_in_which_nothing_was_written_is_used(content: bytes) -> None:
    """A crash right behind the creation of a segment leaves one that is simply continued."""
    rig = opened_over(content)
    assert (rig.log.end_offset, rig.log.torn_bytes) == (0, 0)
    assert rig.publish(b"first").first_offset == 0
    rig.reopen()
    assert values(rig.log) == [b"first"]


def test_a_torn_commit_of_several_batches_is_cut() -> None:
    """Of batches written together, what lies behind a missing one was never promised: cut, not damage."""
    disk = SimulatedFiles()
    rig = Rig(disk)
    rig.publish(b"before")
    ends = [rig.log.size_bytes()]
    for value in (b"one", b"two", b"three"):
        rig.append(batch=encode(Columns([value])))
    rig.loop.run_until_idle()
    sizes = [batch.stored_bytes for batch in as_stored(rig.log)[1:]]
    ends += [ends[0] + sum(sizes[: n + 1]) for n in range(3)]
    raw = disk.read_file(FIRST)[: ends[-1]]
    for missing in range(3):
        hole = raw[: ends[missing]] + bytes(sizes[missing]) + raw[ends[missing + 1] :]
        rig = opened_over(hole)
        assert rig.log.read_only is None
        assert values(rig.log) == [b"before", b"one", b"two", b"three"][: missing + 1]
        if missing < 2:
            assert rig.log.torn_bytes == len(hole[ends[missing] :].rstrip(b"\0"))


def test_a_torn_tail_in_interval_mode_is_a_prefix() -> None:
    """Without syncs, everything from the first missing batch on is cut, though later ones survived."""
    disk = SimulatedFiles()
    rig = Rig(disk, durability="never")
    ends = [0]
    for number in range(5):
        rig.publish(b"%d" % number)
        ends.append(rig.log.size_bytes())
    raw = disk.read_file(FIRST)[: ends[-1]]
    rig = opened_over(raw[: ends[2]] + bytes(ends[3] - ends[2]) + raw[ends[3] :])
    assert rig.log.read_only is None
    assert values(rig.log) == [b"0", b"1"]


# --- flipped bits -----------------------------------------------------------------------------
def read_checked(log: PartitionLog, sent: list[bytes]) -> set[int]:
    """Read every offset on its own; the right bytes, or an error whose range holds it. The bad ones."""
    bad = set()
    for offset in range(log.end_offset):
        try:
            batch = log.read(offset, 1)[0]
        except DataCorrupt as error:
            found = re.search(r"offsets (\d+) to (\d+) ", error.message)
            assert found is not None
            assert int(found[1]) <= offset <= int(found[2])
            bad.add(offset)
        else:
            assert batch.base_offset <= offset < batch.end_offset
            assert batch.values() == sent[batch.base_offset : batch.end_offset]
    return bad


def test_every_flipped_bit_of_the_last_segment_is_found() -> None:
    """Any bit of a log of several commits: damage in the middle, or a cut tail; never wrong bytes."""
    disk, positions, sent = written(4)
    raw = disk.read_file(FIRST)
    for at, bit in product(range(len(raw)), range(8)):
        wrong = bytearray(raw)
        wrong[at] ^= 1 << bit
        rig = opened_over(bytes(wrong))
        victim = max(number for number, position in enumerate(positions[:-1]) if position <= at)
        low, high = count_until(victim), count_until(victim + 1)
        bad = read_checked(rig.log, sent)
        if victim == 3:  # nothing follows that vouches for it: a torn tail
            assert (rig.log.end_offset, rig.log.read_only, bad) == (low, None, set())
            assert len(torn_files(rig)) == 1
        else:
            assert rig.log.end_offset == len(sent)
            assert bad == set(range(low, high))
            assert rig.log.damage == [(low, high)]
            assert torn_files(rig) == {}


def test_every_flipped_bit_of_a_closed_segment_is_found() -> None:
    """In a closed segment there is no tail: each bit is damage of exactly its batch."""
    disk, positions, sent = written(3)
    raw = disk.read_file(FIRST)
    later = encode(Columns([b"later"]))
    later.base_offset = len(sent)
    following = DIRECTORY / log_name(len(sent))
    for at, bit in product(range(len(raw)), range(8)):
        wrong = bytearray(raw)
        wrong[at] ^= 1 << bit
        rig = opened_over(bytes(wrong), (following, later.raw()))
        victim = max(number for number, position in enumerate(positions[:-1]) if position <= at)
        assert rig.log.end_offset == len(sent) + 1
        bad = read_checked(rig.log, [*sent, b"later"])
        assert bad == set(range(count_until(victim), count_until(victim + 1)))
        assert rig.files.read_file(FIRST) == wrong


@pytest.mark.parametrize("last", [b"", bytes(4096)], ids=["empty", "zeros"])
def test_an_empty_last_segment_keeps_the_one_before_it_closed(last: bytes) -> None:
    """Damage at the end of a segment that was rolled is not cut and its offsets are not given again."""
    disk, positions, sent = written(3)
    raw = disk.read_file(FIRST)
    for size in (len(raw) - 1, positions[2], positions[2] + 70):
        rig = opened_over(raw[:size], (DIRECTORY / log_name(len(sent)), last))
        assert rig.log.end_offset == len(sent)
        assert read_checked(rig.log, sent) == set(range(count_until(2), len(sent)))
        assert rig.publish(b"next").first_offset == len(sent)
        assert torn_files(rig) == {}
        assert rig.files.file_size(FIRST) == size


@pytest.mark.parametrize("indexed", [True, False])
def test_an_empty_segment_in_the_way_is_taken_out(indexed: bool) -> None:
    """An empty file named like a segment in the midst of the log is no reason to forget what follows."""
    disk, _, sent = written(4)
    rig = Rig(disk)
    if indexed:
        rig.change(segment_hours=0)
        rig.loop.advance(1)
        rig.log.roll_if_old(rig.clock.now_ms())
        rig.loop.run_until_idle()
    rig.close()
    disk.put(DIRECTORY / log_name(2), b"")
    if indexed:
        disk.remove(DIRECTORY / log_name(len(sent)))
    rig.open()
    assert values(rig.log) == sent
    assert not disk.exists(DIRECTORY / log_name(2))


# --- damage in the middle ---------------------------------------------------------------------
@pytest.mark.parametrize("victims", [[0], [2], [4], [1, 2], [0, 3], [1, 3, 4], [0, 1, 2, 3, 4]])
def test_damage_in_the_middle_makes_it_read_only(victims: list[int]) -> None:
    """Nothing is cut, all else is readable, publishes are refused, and the range is named exactly."""
    disk, positions, sent = written(6)
    raw = bytearray(disk.read_file(FIRST))
    for victim in victims:
        raw[positions[victim] : positions[victim + 1]] = bytes(
            positions[victim + 1] - positions[victim]
        )
    rig = opened_over(bytes(raw))
    lost = {
        offset
        for victim in victims
        for offset in range(count_until(victim), count_until(victim + 1))
    }
    assert read_checked(rig.log, sent) == lost
    assert {offset for low, high in rig.log.damage for offset in range(low, high)} == lost
    refused = rig.publish(b"refused")
    assert isinstance(refused.error, ReadOnly)
    assert not refused.error.retryable
    for low, high in rig.log.damage:
        assert f"{low} to {high - 1}" in refused.error.message
    rig.reopen()
    assert (rig.files.read_file(FIRST), rig.log.end_offset) == (raw, len(sent))


def test_damage_and_a_torn_tail_are_kept_apart() -> None:
    """With a hole in the middle and a torn end, the end is cut and the hole stays a hole."""
    disk, positions, sent = written(6)
    raw = bytearray(disk.read_file(FIRST))[: positions[5] + 17]
    raw[positions[1] + 3] ^= 1
    rig = opened_over(bytes(raw))
    assert rig.log.damage == [(count_until(1), count_until(2))]
    assert (rig.log.torn_bytes, rig.log.end_offset) == (17, count_until(5))
    assert read_checked(rig.log, sent) == set(range(count_until(1), count_until(2)))


def test_a_message_that_looks_like_a_batch_is_no_damage() -> None:
    """A torn record that contains a whole batch is cut like any other, and nothing is invented."""
    inner = encode(Columns([b"invented"]))
    inner.base_offset, inner.flags = 2, 0x8000
    disk = SimulatedFiles()
    rig = Rig(disk)
    rig.publish(b"before")
    start = rig.log.size_bytes()
    rig.publish(bytes(8) + inner.raw() + bytes(100))
    raw = disk.read_file(FIRST)[: rig.log.size_bytes()]
    for cut in range(start + 72 + inner.stored_bytes + 8, len(raw)):
        rig = opened_over(raw[:cut])
        assert (values(rig.log), rig.log.read_only) == ([b"before"], None)


# --- a sync that failed -------------------------------------------------------------------------
def test_what_a_failed_sync_left_is_written_anew() -> None:
    """After a failed sync the tail reads well and is not on disk; a suspicious start makes it durable."""
    for suspect in (True, False):
        disk = SimulatedFiles()
        files = FaultyFiles(disk)
        rig = Rig(files)
        rig.publish(b"safe")
        files.fail("sync", name=".log")
        unknown = rig.publish(b"who knows")
        assert isinstance(unknown.error, OutcomeUnknown)
        assert len(rig.failures) == 1
        disk.kill()  # the broker stops itself; the machine goes on, with its page cache
        rig = Rig(disk)
        rig.open(suspect=suspect)
        shown = values(rig.log)
        assert shown == [b"safe", b"who knows"]
        rig.publish(b"later")
        disk.crash(Random(3))
        rig = Rig(disk)
        if suspect:
            assert values(rig.log) == [*shown, b"later"]
        else:  # what the suspicion is for: what was shown is gone
            assert rig.log.read_only or values(rig.log) == [b"safe"]


def test_a_suspicious_start_keeps_damage_and_offsets() -> None:
    """Writing the last segment anew copies it as it is, holes included, without reserved space."""
    disk, positions, sent = written(6)
    raw = bytearray(disk.read_file(FIRST))
    raw[positions[1] + 3] ^= 1
    rig = opened_over(bytes(raw) + bytes(1000), suspect=True)
    assert rig.files.read_file(FIRST) == raw
    assert rig.log.damage == [(count_until(1), count_until(2))]
    assert read_checked(rig.log, sent) == set(range(count_until(1), count_until(2)))


def test_what_is_shown_after_a_start_is_on_disk() -> None:
    """A killed process may leave records that were never synced; a start syncs them before showing them."""
    disk = SimulatedFiles()
    rig = Rig(disk, durability="never")
    rig.publish(b"a")
    rig.publish(b"b")
    disk.kill()
    rig = Rig(disk, durability="never")
    assert values(rig.log) == [b"a", b"b"]
    for seed in range(20):
        after = disk.copy()
        after.crash(Random(seed))
        assert values(Rig(after).log) == [b"a", b"b"]
    disk.crash(Random(0))
    assert values(Rig(disk).log) == [b"a", b"b"]


def test_a_file_whose_name_was_not_synced_is_made_durable() -> None:
    """A process killed between making a segment and syncing its directory costs nobody a record."""
    for seed in range(20):
        disk = SimulatedFiles()
        files = FaultyFiles(disk)
        rig = Rig(files)
        rig.open()
        files.fail("sync_directory")
        assert isinstance(rig.publish(b"a").error, OutcomeUnknown)
        disk.kill()
        rig = Rig(disk)
        assert rig.publish(b"acknowledged").error is None
        disk.crash(Random(seed))
        assert b"acknowledged" in values(Rig(disk).log)


# --- leftovers ------------------------------------------------------------------------------------
def test_leftovers_of_an_interrupted_write_are_removed() -> None:
    """Temporary files are cleaned away; files that are none of ours are left alone."""
    disk, _, sent = written(3)
    for name in (f"{0:020d}.idx.tmp", f"{3:020d}.producers.tmp", "notes.txt"):
        disk.put(DIRECTORY / name, b"rubbish")
    rig = Rig(disk)
    assert values(rig.log) == sent
    assert disk.names(DIRECTORY) == [log_name(0), "notes.txt"]


def test_a_lost_producer_batch_is_a_gap_not_a_guess() -> None:
    """When damage destroyed a producer's last batch, its next one is refused rather than accepted."""
    disk = SimulatedFiles()
    rig = Rig(disk)
    for sequence in range(3):
        rig.publish(b"%d" % sequence, producer=(7, 0, sequence))
    size = rig.log.size_bytes()
    rig.close()
    disk.put(FIRST, disk.read_file(FIRST)[: size - 1])
    rig.open()
    assert isinstance(rig.publish(b"3", producer=(7, 0, 3)).error, SequenceGap)
    assert rig.publish(b"2", producer=(7, 0, 2)).first_offset == 2
    assert rig.publish(b"1", producer=(7, 0, 1)).first_offset == 1


def test_recovery_on_a_real_disk(tmp_path: Path) -> None:
    """The same on a real file system: a torn tail is cut and kept, and the log goes on."""
    disk, positions, sent = written()
    (tmp_path / log_name(0)).write_bytes(disk.read_file(FIRST)[: positions[5] + 30])
    rig = Rig(Files(), tmp_path)
    assert values(rig.log) == sent[: count_until(5)]
    assert (tmp_path / f"{0:020d}.torn-0").stat().st_size == 30
    rig.publish(b"next")
    rig.reopen()
    assert values(rig.log) == [*sent[: count_until(5)], b"next"]
    rig.close()


def test_a_log_of_a_newer_version_is_refused_and_left_alone() -> None:
    """An older broker must not cut off as torn what a newer one wrote."""
    disk = SimulatedFiles()
    rig = Rig(disk)
    rig.publish(b"old")
    position = rig.log.size_bytes()
    rig.publish(b"new")
    raw = bytearray(disk.read_file(FIRST))
    raw[position + 30 : position + 32] = struct.pack("<H", WITH_ORIGINS + 1)
    header_crc = crc32c(bytes(raw[position + 8 : position + 64]))
    raw[position + 4 : position + 8] = struct.pack("<I", header_crc)
    with pytest.raises(DataCorrupt) as refused:
        opened_over(bytes(raw)).log  # noqa: B018
    assert refused.value.code == "newer_format"

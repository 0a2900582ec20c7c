"""The journal: whole entries or none, older after damage but never newer, rewritten whole."""

import errno
import os
import struct
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files
from headrace.log.batch import crc32c
from headrace.log.journal import RESERVE_BYTES, Journal, frame
from headrace.log.workers import SyncFailed
from tests.fakes import FaultyFiles, SimulatedFiles

FIXTURES = Path(__file__).parent / "fixtures"
PATH = Path("data/@journal")
MAGIC = b"test journal 1"
ENTRIES = [b"one", b"number two", b"the third entry", b"4", b"five is the last one"]


def journal_on(files: Files) -> Journal:
    return Journal(files, PATH, MAGIC)


def fresh(entries: list[bytes] = ENTRIES, files: Files | None = None) -> tuple[Journal, Files]:
    files = files if files is not None else SimulatedFiles()
    files.make_directory(PATH.parent)
    journal = journal_on(files)
    assert journal.open() is None
    journal.rewrite([])
    for entry in entries:
        journal.append([entry])
    return journal, files


def content(files: Files) -> bytes:
    return files.read_file(PATH).rstrip(b"\0")


def reopened(files: Files) -> tuple[Journal, list[bytes]]:
    journal = journal_on(files)
    entries = journal.open()
    assert entries is not None
    return journal, entries


def raw_journal(entries: list[bytes] = ENTRIES) -> bytes:
    return b"".join(map(frame, [MAGIC, *entries]))


def on_disk(raw: bytes) -> SimulatedFiles:
    files = SimulatedFiles()
    files.put(PATH, raw)
    return files


# --- whole --------------------------------------------------------------------------------------
@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=50), max_size=4), max_size=8), st.booleans()
)
def test_what_was_appended_is_there(groups: list[list[bytes]], closed: bool) -> None:
    """Every entry comes back, in order, after a close and after a kill."""
    journal, files = fresh([])
    for group in groups:
        journal.append(group)
    if closed:
        journal.close()
    _, entries = reopened(files)
    assert entries == [entry for group in groups for entry in group]


def test_appending_goes_on_after_opening() -> None:
    """A journal that was closed, or not, is continued where it ended."""
    journal, files = fresh()
    for number in range(4):
        if number % 2:
            journal.close()
        journal, entries = reopened(files)
        assert entries[len(ENTRIES) :] == [b"more %d" % each for each in range(number)]
        journal.append([b"more %d" % number])


def test_a_full_rewrite_takes_the_place_of_everything() -> None:
    """After a rewrite only the snapshot and what was appended to it are there."""
    journal, files = fresh()
    journal.rewrite([b"snapshot"])
    journal.append([b"and on"])
    assert reopened(files)[1] == [b"snapshot", b"and on"]


def test_rewriting_is_wanted_when_it_has_outgrown_its_snapshot() -> None:
    """A journal wants to be rewritten at four times its snapshot, but not while it is small."""
    journal, _ = fresh([])
    entry = bytes(limits.JOURNAL_REWRITE_BYTES_MIN // 2)
    for _ in range(2):
        assert not journal.wants_rewrite
        journal.append([entry])
    assert journal.wants_rewrite
    journal.rewrite([entry])
    assert not journal.wants_rewrite


def test_space_is_reserved_ahead() -> None:
    """Small appends find their space reserved: one allocation serves many of them."""
    files = FaultyFiles(SimulatedFiles())
    journal, _ = fresh([], files)
    for _ in range(100):
        journal.append([b"entry"])
    assert files.count("allocate") == 1
    assert files.file_size(PATH) >= RESERVE_BYTES
    journal.close()
    assert files.file_size(PATH) == len(raw_journal([b"entry"] * 100))


# --- torn -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fill", [b"", bytes(64), b"\xa5" * 3], ids=["nothing", "zeros", "rubbish"])
def test_a_torn_tail_is_cut_at_every_byte(fill: bytes) -> None:
    """Cut anywhere in its last entries, with zeros or rubbish behind: whole entries, then it goes on."""
    raw = raw_journal()
    start = len(raw_journal(ENTRIES[:2]))
    for cut in range(start, len(raw)):
        files = on_disk(raw[:cut] + fill)
        journal, entries = reopened(files)
        expected = [
            entry
            for number, entry in enumerate(ENTRIES)
            if cut >= len(raw_journal(ENTRIES[:number])) + 8 + len(entry)
        ]
        assert entries == expected
        assert journal.damaged == 0
        journal.append([b"new"])
        assert reopened(files)[1] == [*expected, b"new"]


def test_a_power_cut_in_the_last_append_is_no_damage() -> None:
    """Whichever sectors of the last write reach the disk: all of its entries are there, or none."""
    seen = set()
    for seed in range(300):
        disk = SimulatedFiles()
        journal, _ = fresh([b"kept"], FaultyFiles(disk))
        last = [b"%d" % number * 9 for number in range(6)]
        files = FaultyFiles(disk)
        journal = journal_on(files)
        journal.open()
        files.fail("sync")
        with pytest.raises(SyncFailed):
            journal.append(last)
        disk.crash(Random(seed), sector=8)
        journal, entries = reopened(disk)
        assert journal.damaged == 0
        assert entries in ([b"kept"], [b"kept", *last])
        seen.add(len(entries))
        journal.append([b"new"])
        assert reopened(disk)[1] == [*entries, b"new"]
    assert 1 in seen


def test_appends_beyond_the_largest_frame_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.journal.TOGETHER_BYTES_MAX", 40)
    journal, files = fresh([])
    entries = [bytes([number]) * (number * 7) for number in range(1, 12)]
    journal.append(entries)
    assert reopened(files)[1] == entries


def test_reserved_zeros_are_no_tail() -> None:
    """Zeros behind the last entry are space, not a torn write: nothing is cut."""
    files = FaultyFiles(on_disk(raw_journal() + bytes(4096)))
    journal, entries = reopened(files)
    assert entries == ENTRIES
    assert files.changes == []
    journal.append([b"new"])
    assert files.count("allocate") == 0


# --- damaged --------------------------------------------------------------------------------------
def test_a_damaged_entry_is_skipped_and_the_file_kept() -> None:
    """Any changed bit in any entry but the last loses that entry alone, counted, the file kept."""
    raw = raw_journal()
    for victim in range(len(ENTRIES) - 1):
        start = len(raw_journal(ENTRIES[:victim]))
        for at in range(start, start + 8 + len(ENTRIES[victim])):
            for bit in range(8):
                wrong = bytearray(raw)
                wrong[at] ^= 1 << bit
                files = on_disk(bytes(wrong))
                journal, entries = reopened(files)
                assert entries == ENTRIES[:victim] + ENTRIES[victim + 1 :]
                assert journal.damaged == 1
                assert files.read_file(PATH.with_name("@journal.damaged")) == wrong


def test_a_damaged_beginning_does_not_lose_the_rest() -> None:
    """A journal whose first entry, its name, is damaged keeps all other entries."""
    raw = bytearray(raw_journal())
    raw[9] ^= 1
    journal, entries = reopened(on_disk(bytes(raw)))
    assert entries == ENTRIES
    assert journal.damaged == 1


@pytest.mark.parametrize("raw", [b"", bytes(4096), b"rubbish" * 9, frame(b"another journal")])
def test_what_is_no_journal_is_not_taken_for_an_empty_one(raw: bytes) -> None:
    """A file without the journal's name and without one entry is an error, not a fresh start."""
    with pytest.raises(DataCorrupt, match="move it aside"):
        journal_on(on_disk(raw)).open()


@given(st.binary(max_size=200), st.integers(0, 200))
def test_rubbish_behind_the_entries_invents_nothing(rubbish: bytes, at: int) -> None:
    """Whatever is written over the end, only entries that were appended come back, in order."""
    raw = raw_journal()
    at = min(at, len(raw))
    files = on_disk(raw_journal()[:at] + rubbish)
    journal = journal_on(files)
    try:
        entries = journal.open()
    except DataCorrupt:
        return
    assert entries is not None
    assert entries == [entry for entry in ENTRIES if entry in entries]


# --- faults ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("short", [None, 5, 11, 16, 30])
def test_a_failed_write_leaves_the_journal_as_it_was(code: int, short: int | None) -> None:
    """After an OSError nothing of the append is there, in this process or after a crash."""
    disk = SimulatedFiles()
    files = FaultyFiles(disk)
    journal, _ = fresh(files=files)
    files.fail("write_at", 1, code, short=short)
    with pytest.raises(OSError, match=os.strerror(code)):
        journal.append([b"refused", b"refused too"])
    assert reopened(disk.copy())[1] == ENTRIES
    journal.append([b"next"])
    disk.crash(Random(1), sector=8)
    assert reopened(disk)[1] == [*ENTRIES, b"next"]


def test_what_was_refused_does_not_come_back() -> None:
    """A failed append is taken back durably: the power may fail right behind its error."""
    for seed in range(200):
        disk = SimulatedFiles()
        files = FaultyFiles(disk)
        journal, _ = fresh([b"kept"], files)
        files.fail("write_at", 1, errno.EIO, short=40)
        with pytest.raises(OSError, match="Input/output"):
            journal.append([b"refused", b"refused too"])
        disk.crash(Random(seed), sector=8)
        assert reopened(disk)[1] == [b"kept"]


def test_on_a_full_disk_small_entries_still_find_room() -> None:
    """Where the reserve cannot be had, the entry itself is tried: acks go on to the last byte."""
    disk = SimulatedFiles()
    journal, _ = fresh([], disk)
    journal.close()
    journal, _ = reopened(disk)
    disk.capacity = disk.file_size(PATH) + 100
    journal.append([b"fits"])
    with pytest.raises(OSError, match="No space left"):
        journal.append([bytes(200)])
    journal.append([b"fits, too"])
    assert reopened(disk)[1] == [b"fits", b"fits, too"]


@pytest.mark.parametrize(("kind", "plan"), [("sync", {}), ("truncate", {"write_at": 1})])
def test_a_failed_sync_is_final(kind: str, plan: dict[str, int]) -> None:
    """When nobody can say what is on disk, it is SyncFailed and not an error to be tried again."""
    files = FaultyFiles(SimulatedFiles())
    journal, _ = fresh(files=files)
    for other, number in plan.items():
        files.fail(other, number)
    files.fail(kind)
    with pytest.raises(SyncFailed):
        journal.append([b"who knows"])


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("seed", range(6))
def test_a_rewrite_is_whole_or_not_at_all(number: int, seed: int) -> None:
    """Whichever step of a rewrite fails, and if the power fails then: the old or the new, whole."""
    disk = SimulatedFiles()
    files = FaultyFiles(disk)
    journal, _ = fresh(files=files)
    fault = files.fail(None, number)
    outcome = {(*ENTRIES,), (b"snapshot",)}
    try:
        journal.rewrite([b"snapshot"])
        outcome = {(b"snapshot",)}
    except SyncFailed:
        assert fault.hits
    except OSError:
        outcome = {(*ENTRIES,)}
    disk.crash(Random(seed), sector=8)
    assert tuple(reopened(disk)[1]) in outcome


@pytest.mark.parametrize("number", range(1, 5))
def test_appending_goes_on_after_a_refused_rewrite(number: int) -> None:
    """A rewrite that a full disk refused leaves a journal that takes further entries."""
    files = FaultyFiles(SimulatedFiles())
    journal, _ = fresh(files=files)
    files.fail(None, number, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        journal.rewrite([bytes(1000)])
    assert files.names(PATH.parent) == ["@journal"], "half a snapshot takes no room"
    journal.append([b"next"])
    assert reopened(files)[1] == [*ENTRIES, b"next"]


def test_a_rewrite_whose_name_is_not_durable_is_final() -> None:
    """When the directory cannot be synced, nobody writes on into a file that may be gone."""
    files = FaultyFiles(SimulatedFiles())
    journal, _ = fresh(files=files)
    files.fail("sync_directory")
    with pytest.raises(SyncFailed):
        journal.rewrite([b"snapshot"])


@given(st.integers(), st.lists(st.integers(0, 4), max_size=12))
def test_synced_entries_survive_a_crash(seed: int, script: list[int]) -> None:
    """Over appends, rewrites and crashes: every entry that was promised is there, nothing else."""
    random, disk = Random(seed), SimulatedFiles()
    journal, _ = fresh([], disk)
    expected: list[bytes] = []
    for number, step in enumerate(script):
        entry = b"entry %d" % number * (1 + number % 3)
        if step == 4:
            disk.crash(random, sector=8)
            journal, entries = reopened(disk)
            assert entries == expected
        elif step == 3:
            journal.rewrite(expected)
        else:
            journal.append([entry] * step)
            expected += [entry] * step
    disk.crash(random)
    assert reopened(disk)[1] == expected


# --- for ever -------------------------------------------------------------------------------------
def test_entries_are_as_documented() -> None:
    """A frame is its length, its checksum, its bytes, and zeros up to a multiple of eight. Entries that
    were appended together are one, with their lengths."""
    journal, files = fresh([])
    empty = len(content(files))
    journal.append([b"a", b"bc"])
    several = b"\0" + struct.pack("<I", 1) + b"a" + struct.pack("<I", 2) + b"bc"
    assert files.read_file(PATH)[(empty + 7) // 8 * 8 :].startswith(frame(several))
    assert frame(b"hello") == struct.pack("<II", 5, crc32c(b"hello")) + b"hello\0\0\0"
    assert len(frame(b"12345678")) == 16


def test_the_first_format_is_read_for_ever() -> None:
    """A journal that was stored once opens with the entries that were put in then."""
    raw = (FIXTURES / "journal-v1.bin").read_bytes()
    _, entries = reopened(on_disk(raw))
    assert entries == ENTRIES

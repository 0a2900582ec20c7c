"""The doctor: what it finds in a damaged data directory, and that a repair costs nothing more."""

import struct
from pathlib import Path

import pytest

from headrace import limits
from headrace.doctor.commands import examine, repair
from headrace.doctor.findings import Finding, Report
from headrace.errors import DirectoryLocked, InvalidArgument, NotFound, StorageFull
from headrace.files import Files
from headrace.log.batch import LOST, Batch, crc32c, encode, lost
from headrace.log.columns import Columns
from headrace.log.index import Index
from headrace.log.journal import frame
from tests.doctor.directories import (
    DECADES_MS,
    SETTINGS,
    batches_of,
    change,
    cut,
    flip,
    flip_body,
    flip_header,
    make_partition,
    publish,
    read_all,
    segment,
    value,
    write_batches,
)
from tests.fakes import FaultyFiles, SimulatedFiles
from tests.log.rig import Rig

DATA = Path("data")
PARTITION = DATA / "orders" / "0"


@pytest.fixture
def files() -> SimulatedFiles:
    """A disk with one partition of three segments, 50 records in 5 batches each."""
    disk = SimulatedFiles()
    make_partition(disk, PARTITION, [5, 5, 5])
    return disk


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def only(report: Report, code: str) -> Finding:
    [found] = [finding for finding in report.findings if finding.code == code]
    return found


def content(files: Files, directory: Path = DATA) -> dict[Path, bytes]:
    found: dict[Path, bytes] = {}
    for name in files.names(directory):
        path = directory / name
        if files.is_directory(path):
            found.update(content(files, path))
        elif name != "@lock":
            found[path] = files.read_file(path)
    return found


def mend(files: Files) -> Report:
    """Examine, repair, and examine again: the second report."""
    repair(DATA, examine(DATA, files), files)
    return examine(DATA, files)


# --- nothing is wrong ---------------------------------------------------------------------------
def test_a_healthy_directory_has_no_findings(files: SimulatedFiles) -> None:
    """Nothing is said where nothing is wrong, and everything is counted."""
    report = examine(DATA, files)
    assert report.findings == []
    assert report.healthy
    assert report.severity == "ok"
    totals = report.totals
    assert (totals.topics, totals.partitions, totals.segments) == (1, 1, 3)
    assert (totals.batches, totals.records) == (15, 150)
    assert totals.bytes == sum(
        len(raw) for path, raw in content(files).items() if path.suffix == ".log"
    )
    [state] = report.partitions
    assert (state.start_offset, state.end_offset, state.severity) == (0, 150, "ok")


def test_examining_changes_nothing(files: SimulatedFiles) -> None:
    """An examination leaves damaged files exactly as they are."""
    flip_body(files, segment(PARTITION, 50), 2)
    files.remove(segment(PARTITION, 0).with_suffix(".idx"))
    before = content(files)
    assert not examine(DATA, files).healthy
    assert content(files) == before


def test_reserved_space_is_not_damage(files: SimulatedFiles) -> None:
    """The zeros that a killed broker leaves after its last batch are not reported."""
    path = segment(PARTITION, 100)
    files.replace(path, [files.read_file(path), bytes(65536)])
    assert examine(DATA, files).findings == []


def test_a_segment_that_was_just_begun_is_no_damage(files: SimulatedFiles) -> None:
    """A broker that stops between two segments leaves an empty one, and that is all right."""
    rig = Rig(files, PARTITION)
    rig.log.roll_if_old(rig.clock.now_ms() + DECADES_MS)
    rig.close()
    assert files.file_size(segment(PARTITION, 150)) == 0
    assert examine(DATA, files).findings == []


def test_progress_reaches_the_end(files: SimulatedFiles) -> None:
    """The last call reports that all bytes have been read."""
    told: list[tuple[int, int]] = []
    examine(DATA, files, progress=lambda file, done, total: told.append((done, total)))
    total = examine(DATA, files).totals.bytes
    assert told[-1] == (total, total)


# --- damage in the middle ---------------------------------------------------------------------
@pytest.mark.parametrize("destroy", [flip_body, flip_header], ids=["body", "header"])
@pytest.mark.parametrize(
    ("base", "batch"),
    [(0, 0), (0, 2), (50, 4), (100, 0), (100, 3)],
    ids=["first", "closed", "end of closed", "begin of active", "active"],
)
def test_a_destroyed_batch_is_found_and_given_up(
    files: SimulatedFiles, destroy: object, base: int, batch: int
) -> None:
    """Exactly one batch is lost, its file is kept, all else reads as before, and appends work."""
    path = segment(PARTITION, base)
    destroy(files, path, batch)  # type: ignore[operator]
    damaged = files.read_file(path)
    first = base + 10 * batch
    report = examine(DATA, files)
    finding = only(report, "damaged_range")
    assert (finding.severity, finding.topic, finding.partition) == ("damage", "orders", 0)
    assert (finding.first, finding.end) == (first, first + 10)
    assert finding.file == f"orders/0/{path.name}"
    assert report.totals.damaged_records == 10
    assert report.totals.records == 140

    after = mend(files)
    assert after.healthy
    assert (after.totals.records, after.totals.lost_records) == (140, 10)
    assert files.read_file(path.with_name(path.name + ".damaged-0")) == damaged
    gone = set(range(first, first + 10))
    assert read_all(files, PARTITION) == (set(range(150)) - gone, gone)
    rig = Rig(files, PARTITION)
    assert rig.log.read_only is None
    assert publish(rig, 5) == 150
    rig.close()
    assert read_all(files, PARTITION) == (set(range(155)) - gone, gone)


def test_two_damaged_places_in_one_segment_are_one_rewrite(files: SimulatedFiles) -> None:
    """The segment is rewritten once, with both ranges given up."""
    flip_body(files, segment(PARTITION, 50), 3)
    flip_header(files, segment(PARTITION, 50), 1)
    report = examine(DATA, files)
    assert codes(report) == ["damaged_range", "damaged_range"]
    assert len(repair(DATA, report, files)) == 1
    assert read_all(files, PARTITION)[1] == {*range(60, 70), *range(80, 90)}


def test_a_second_repair_keeps_both_damaged_files(files: SimulatedFiles) -> None:
    """A file that was kept aside is never overwritten."""
    flip_body(files, segment(PARTITION, 0), 1)
    mend(files)
    flip_body(files, segment(PARTITION, 0), 3)
    assert mend(files).healthy
    names = files.names(PARTITION)
    assert "00000000000000000000.log.damaged-0" in names
    assert "00000000000000000000.log.damaged-1" in names
    assert read_all(files, PARTITION)[1] == {*range(10, 20), *range(30, 40)}


def test_a_closed_segment_that_was_cut_short(files: SimulatedFiles) -> None:
    """The next segment's name says which offsets were cut from the end of a closed segment."""
    path = segment(PARTITION, 50)
    cut(files, path, batches_of(files, path)[3].position + 100)
    finding = only(examine(DATA, files), "damaged_range")
    assert (finding.first, finding.end) == (80, 100)
    assert mend(files).healthy
    assert read_all(files, PARTITION)[1] == set(range(80, 100))


def test_a_closed_segment_that_was_cut_between_two_batches(files: SimulatedFiles) -> None:
    """A clean cut is found too, though no checksum fails."""
    path = segment(PARTITION, 50)
    cut(files, path, batches_of(files, path)[3].position)
    finding = only(examine(DATA, files), "segment_missing")
    assert (finding.first, finding.end) == (80, 100)
    assert mend(files).healthy
    assert read_all(files, PARTITION)[1] == set(range(80, 100))


def test_a_closed_segment_that_was_emptied(files: SimulatedFiles) -> None:
    """An empty file where there were records is damage, and its name is kept."""
    cut(files, segment(PARTITION, 50), 0)
    assert only(examine(DATA, files), "damaged_range").records == 50
    assert mend(files).healthy
    assert read_all(files, PARTITION)[1] == set(range(50, 100))


def test_a_missing_segment_is_made_of_lost_batches(files: SimulatedFiles) -> None:
    """The offsets of a segment that is gone are given up, and the rest is as it was."""
    files.remove(segment(PARTITION, 50))
    finding = only(examine(DATA, files), "segment_missing")
    assert (finding.severity, finding.first, finding.end) == ("damage", 50, 100)
    assert mend(files).healthy
    gone = set(range(50, 100))
    assert read_all(files, PARTITION) == (set(range(150)) - gone, gone)
    rig = Rig(files, PARTITION)
    assert publish(rig, 1) == 150


def test_more_records_than_a_batch_can_hold_are_given_up_in_several(files: SimulatedFiles) -> None:
    """No lost batch stands for more records than a batch may have."""
    far = 100 + 2 * limits.BATCH_RECORDS_MAX + 7
    batch = encode(Columns([b"far"]))
    batch.base_offset, batch.base_timestamp = far, 1 << 42
    batch.max_timestamp = batch.base_timestamp
    write_batches(files, segment(PARTITION, far), [batch])
    files.remove(segment(PARTITION, 100))
    assert mend(files).healthy
    made = [found.batch for found in batches_of(files, segment(PARTITION, 100))]
    assert [batch.count for batch in made] == [
        limits.BATCH_RECORDS_MAX,
        limits.BATCH_RECORDS_MAX,
        7,
    ]
    assert all(batch.flags & LOST for batch in made)


def test_a_gap_that_cannot_be_true_is_not_filled(files: SimulatedFiles) -> None:
    """A file name far beyond reason is not answered with a disk full of lost batches."""
    files.put(segment(PARTITION, limits.OFFSET_MAX), b"")
    finding = only(examine(DATA, files), "segment_missing")
    assert not finding.repairable
    mend(files)
    assert not files.exists(segment(PARTITION, 150))


def test_packed_batches_are_looked_into(files: SimulatedFiles) -> None:
    """Compressed segments are examined and repaired like others."""
    directory = DATA / "packed" / "0"
    rig = Rig(files, directory, compression="zstd")
    for _ in range(5):
        publish(rig, 100)
    rig.close()
    files.put(directory.parent / "topic.json", SETTINGS)
    assert examine(DATA, files).findings == []
    flip_body(files, segment(directory, 0), 2)
    assert mend(files).healthy
    assert read_all(files, directory)[1] == set(range(200, 300))


def test_nonsense_with_a_good_checksum_is_found(files: SimulatedFiles) -> None:
    """A batch whose columns reach outside of it is damage, whatever its checksum says."""
    path = segment(PARTITION, 50)
    found = batches_of(files, path)[2]
    body = bytearray(files.read_file(path)[found.position + 64 : found.position + found.size])
    body[4:8] = struct.pack("<i", 1 << 30)
    batch = Batch(bytes(body), crc32c(bytes(body)), found.batch.count, found.batch.flags)
    batch.base_offset = found.batch.base_offset
    batch.base_timestamp, batch.max_timestamp = (
        found.batch.base_timestamp,
        found.batch.max_timestamp,
    )
    change(files, path, found.position, batch.raw())
    finding = only(examine(DATA, files), "columns_invalid")
    assert (finding.first, finding.end) == (70, 80)
    assert mend(files).healthy
    assert read_all(files, PARTITION)[1] == set(range(70, 80))


def test_a_lost_batch_keeps_what_its_header_knew(files: SimulatedFiles) -> None:
    """A retry of a destroyed batch is still known as one, and its producer may go on."""
    directory = DATA / "exact" / "0"
    rig = Rig(files, directory)
    for sequence in range(3):
        rig.publish(value(sequence), producer=(7, 1, sequence))
    rig.close()
    files.put(directory.parent / "topic.json", SETTINGS)
    times = [found.batch.base_timestamp for found in batches_of(files, segment(directory, 0))]
    flip_body(files, segment(directory, 0), 1)
    assert mend(files).healthy
    again = [found.batch.base_timestamp for found in batches_of(files, segment(directory, 0))]
    assert again == times
    rig = Rig(files, directory)
    retried = rig.publish(value(1), producer=(7, 1, 1))
    assert (retried.duplicate, retried.first_offset) == (True, 1)
    assert rig.publish(value(3), producer=(7, 1, 3)).first_offset == 3


# --- the end of the last segment --------------------------------------------------------------
def test_a_torn_tail_is_the_next_start_s_business(files: SimulatedFiles) -> None:
    """Bytes that were being written are a warning; a repair leaves them to recovery."""
    path = segment(PARTITION, 100)
    raw = files.read_file(path)
    files.replace(path, [raw[:-20], bytes(4096)])
    report = examine(DATA, files)
    finding = only(report, "torn_tail")
    assert (finding.severity, finding.repairable, report.healthy) == ("warning", False, True)
    assert finding.first == 140
    assert report.partitions[0].end_offset == 140
    before = content(files)
    assert repair(DATA, report, files) == []
    assert content(files) == before
    assert read_all(files, PARTITION)[0] == set(range(140))


def test_a_torn_tail_behind_damage_goes_with_the_repair(files: SimulatedFiles) -> None:
    """The rewritten segment ends where recovery would have cut it, and opens for writing."""
    path = segment(PARTITION, 100)
    flip_body(files, path, 1)
    cut(files, path, len(files.read_file(path)) - 20)
    assert sorted(codes(examine(DATA, files))) == ["damaged_range", "torn_tail"]
    after = mend(files)
    assert after.healthy
    assert "torn_tail" not in codes(after)
    gone = set(range(110, 120))
    assert read_all(files, PARTITION) == (set(range(140)) - gone, gone)


def test_what_no_sync_vouches_for_is_torn_and_not_damage() -> None:
    """A broken batch without AFTER_SYNC after it is torn, as in recovery."""
    files = SimulatedFiles()
    rig = Rig(files, PARTITION, durability="never")
    for _ in range(5):
        publish(rig, 10)
    rig.close()
    files.put(PARTITION.parent / "topic.json", SETTINGS)
    flip_body(files, segment(PARTITION, 0), 2)
    report = examine(DATA, files)
    assert codes(report) == ["torn_tail"]
    assert "20 whole records" in report.findings[0].sentence
    assert read_all(files, PARTITION)[0] == set(range(20))


def test_bytes_behind_a_closed_segment_are_no_loss(files: SimulatedFiles) -> None:
    """Rubbish after the last batch of a closed segment costs no offset, and stays."""
    path = segment(PARTITION, 50)
    files.replace(path, [files.read_file(path), b"rubbish."])
    report = examine(DATA, files)
    assert only(report, "trailing_bytes").bytes == 8
    assert report.healthy
    assert read_all(files, PARTITION)[0] == set(range(150))


# --- the files beside a segment ---------------------------------------------------------------
def test_a_missing_index_is_made_anew(files: SimulatedFiles) -> None:
    """The new index is byte for byte the one that was there."""
    path = segment(PARTITION, 50).with_suffix(".idx")
    original = files.read_file(path)
    files.remove(path)
    report = examine(DATA, files)
    assert only(report, "index_missing").severity == "note"
    assert report.healthy
    assert mend(files).findings == []
    assert files.read_file(path) == original


def test_an_index_that_fails_its_checksum_is_made_anew(files: SimulatedFiles) -> None:
    """A flipped bit in an index is a warning and repaired."""
    path = segment(PARTITION, 50).with_suffix(".idx")
    original = files.read_file(path)
    flip(files, path, 45)
    report = examine(DATA, files)
    assert only(report, "index_wrong").severity == "warning"
    assert report.healthy
    assert mend(files).findings == []
    assert files.read_file(path) == original


@pytest.mark.parametrize("what", ["offset", "time", "position", "end", "newest", "empty"])
def test_an_index_of_another_log_is_made_anew(files: SimulatedFiles, what: str) -> None:
    """An index whose checksum is good is still compared with the log, entry by entry."""
    path = segment(PARTITION, 50).with_suffix(".idx")
    original = files.read_file(path)
    index = Index.load(original, 50, files.file_size(segment(PARTITION, 50)))
    assert index is not None
    if what == "offset":
        index.offsets[0] += 1
    elif what == "time":
        index.times[0] += 1
    elif what == "position":
        index.positions[0] += 8
    elif what == "end":
        index.end_offset += 1
    elif what == "newest":
        index.max_timestamp += 1
    else:
        del index.offsets[:], index.positions[:], index.times[:]
    files.put(path, index.dump())
    assert codes(examine(DATA, files)) == ["index_wrong"]
    assert mend(files).findings == []
    assert files.read_file(path) == original


def test_an_index_without_its_segment_is_only_noted(files: SimulatedFiles) -> None:
    """Nothing reads it, so nothing is done about it."""
    files.put(PARTITION / "00000000000000000777.idx", b"whatever")
    assert codes(examine(DATA, files)) == ["index_orphan"]


def test_a_damaged_snapshot_of_producers_is_moved_aside(files: SimulatedFiles) -> None:
    """The partition opens without it, and the file is still there under another name."""
    path = PARTITION / "00000000000000000100.producers"
    flip(files, path, 9)
    assert only(examine(DATA, files), "producers_damaged").severity == "warning"
    after = mend(files)
    assert codes(after) == ["kept_aside"]
    assert not files.exists(path)
    assert read_all(files, PARTITION)[0] == set(range(150))


def test_rubbish_named_like_a_segment_is_moved_aside(files: SimulatedFiles) -> None:
    """A file that only its name makes a segment hides no record of the real ones."""
    files.put(segment(PARTITION, 7), b"rubbish " * 100)
    report = examine(DATA, files)
    assert only(report, "not_a_segment").file.endswith("07.log")
    assert codes(report) == ["not_a_segment"]
    assert codes(mend(files)) == ["kept_aside"]
    assert read_all(files, PARTITION)[0] == set(range(150))


def test_two_segments_with_the_same_offsets_are_left_to_a_person(files: SimulatedFiles) -> None:
    """Which of two valid files is the right one cannot be known, so neither is touched."""
    path = segment(PARTITION, 50)
    start = batches_of(files, path)[1].position
    files.put(segment(PARTITION, 60), files.read_file(path)[start:])
    report = examine(DATA, files)
    assert {finding.code for finding in report.findings} == {"overlap"}
    assert report.repairable == []


def test_times_that_run_backwards_are_a_warning(files: SimulatedFiles) -> None:
    """Nothing is lost by it, but looking for a time may mislead."""
    batches = []
    for number, time in enumerate((5_000, 4_000)):
        batch = encode(Columns([value(number)]))
        batch.base_offset = number
        batch.base_timestamp = batch.max_timestamp = time
        batches.append(batch)
    directory = DATA / "odd" / "0"
    files.make_directory(directory)
    files.put(directory.parent / "topic.json", SETTINGS)
    write_batches(files, segment(directory, 0), batches)
    finding = only(examine(DATA, files), "time_backwards")
    assert (finding.severity, finding.first) == ("warning", 1)


def test_a_batch_of_a_newer_version_is_not_taken_for_damage(files: SimulatedFiles) -> None:
    """An older doctor must not give up what a newer broker wrote."""
    path = segment(PARTITION, 50)
    found = batches_of(files, path)[1]
    raw = bytearray(files.read_file(path)[found.position : found.position + 64])
    raw[30:32] = struct.pack("<H", 3)
    raw[4:8] = struct.pack("<I", crc32c(bytes(raw[8:])))
    change(files, path, found.position, bytes(raw))
    report = examine(DATA, files)
    assert "newer_format" in codes(report)
    assert report.repairable == []
    before = content(files)
    mend(files)
    assert content(files) == before


def test_records_given_up_before_are_remembered(files: SimulatedFiles) -> None:
    """Records that an earlier repair gave up are a note with their offsets, not damage."""
    directory = DATA / "old" / "0"
    files.make_directory(directory)
    files.put(directory.parent / "topic.json", SETTINGS)
    write_batches(files, segment(directory, 0), [lost(0, 10, 1), lost(10, 5, 1)])
    report = examine(DATA, files)
    finding = only(report, "records_lost")
    assert (finding.severity, finding.first, finding.end) == ("note", 0, 15)
    assert report.healthy
    assert report.totals.lost_records == 15


# --- what else lies in a data directory --------------------------------------------------------
def test_leftovers_are_removed_and_strangers_left_alone(files: SimulatedFiles) -> None:
    """Only a temporary file that Headrace itself writes is ever removed."""
    ours = PARTITION / "00000000000000000050.idx.tmp"
    strangers = [PARTITION / "notes.tmp", PARTITION / "README", DATA / "lost+found" / "x"]
    for path in (ours, *strangers):
        files.put(path, b"something")
    report = examine(DATA, files)
    assert sorted(codes(report)) == ["leftover_tmp", *["unknown_file"] * 3]
    after = mend(files)
    assert codes(after) == ["unknown_file"] * 3
    assert not files.exists(ours)
    assert all(map(files.exists, strangers))


def test_a_topic_may_be_named_like_a_leftover(files: SimulatedFiles) -> None:
    """A topic called something.tmp is a topic."""
    make_partition(files, DATA / "orders.tmp" / "0", [1])
    report = examine(DATA, files)
    assert report.findings == []
    assert report.totals.topics == 2


def test_the_broker_s_marks_are_explained(files: SimulatedFiles) -> None:
    """A failed sync and a half-deleted topic are named, and left to the next start."""
    files.put(DATA / "@suspect", b"why")
    files.put(DATA / "@deleted" / "old.1" / "topic.json", b"{}")
    files.put(PARTITION / "00000000000000000100.torn-0", b"tail")
    report = examine(DATA, files)
    assert sorted(codes(report)) == ["half_deleted", "kept_aside", "suspect"]
    assert report.healthy
    assert report.repairable == []


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe"], ids=["cut", "list", "bytes"])
def test_settings_that_are_no_json_object_are_damage(files: SimulatedFiles, raw: bytes) -> None:
    """A topic whose settings are lost keeps its data, and the finding says what will happen."""
    files.put(DATA / "orders" / "topic.json", raw)
    assert only(examine(DATA, files), "settings_damaged").severity == "damage"


def test_missing_settings_are_damage(files: SimulatedFiles) -> None:
    """Records without their topic's settings are found."""
    files.remove(DATA / "orders" / "topic.json")
    assert only(examine(DATA, files), "settings_missing").severity == "damage"


def journal() -> bytes:
    return b"".join(frame(payload) for payload in (b"the format", b"first", b"second", b"third"))


def test_a_whole_journal_is_nothing_to_speak_of(files: SimulatedFiles) -> None:
    """Entries followed by reserved space are not reported."""
    files.put(DATA / "@subscriptions.journal", journal() + bytes(4096))
    assert examine(DATA, files).findings == []


@pytest.mark.parametrize(
    ("raw", "code", "severity"),
    [
        (journal()[:-5] + bytes(64), "journal_torn", "warning"),
        (journal()[:28] + b"?" + journal()[29:], "journal_damaged", "damage"),
        (b"rubbish " * 10, "journal_damaged", "damage"),
        (b"", "journal_damaged", "damage"),
    ],
    ids=["torn", "damaged", "rubbish", "empty"],
)
def test_a_journal_is_judged_by_the_broker_s_rules(
    files: SimulatedFiles, raw: bytes, code: str, severity: str
) -> None:
    """A torn last entry is a warning, anything else that fails is damage; nothing is touched."""
    path = DATA / "@subscriptions.journal"
    files.put(path, raw)
    assert only(examine(DATA, files), code).severity == severity
    mend(files)
    assert files.read_file(path) == raw


def test_a_file_that_the_disk_cannot_read_is_named(files: SimulatedFiles) -> None:
    """A failing disk is a finding about one file, and the others are examined all the same."""
    faulty = FaultyFiles(files)
    faulty.fail("read_at", 1, name="00000000000000000050.log", repeat=True)
    report = examine(DATA, faulty)
    finding = only(report, "unreadable_file")
    assert (finding.severity, finding.repairable) == ("damage", False)
    assert finding.file == "orders/0/00000000000000000050.log"
    assert report.totals.records == 100


def test_an_index_that_the_disk_cannot_read_is_named(files: SimulatedFiles) -> None:
    """The finding is about the index; the records of its segment are examined all the same."""
    faulty = FaultyFiles(files)
    faulty.fail("read_at", 1, name="00000000000000000050.idx", repeat=True)
    report = examine(DATA, faulty)
    assert only(report, "unreadable_file").file == "orders/0/00000000000000000050.idx"
    assert report.totals.records == 150


# --- locks, other directories, changes since the examination -------------------------------------------------------------------
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """The doctor neither reads nor writes where a broker runs, and says who it is."""
    files = Files()
    make_partition(files, tmp_path / "orders" / "0", [1])
    holder = files.open(tmp_path / "@lock", write=True, create=True)
    assert files.lock(holder)
    files.write_at(holder, 0, [b'{"pid": 4711, "host": "mill"}'])
    with pytest.raises(DirectoryLocked, match="process 4711 on mill"):
        examine(tmp_path)
    with pytest.raises(DirectoryLocked):
        repair(tmp_path, Report(tmp_path))
    holder.close()
    assert examine(tmp_path).healthy


def test_only_data_directories_are_touched(tmp_path: Path) -> None:
    """In a directory that no broker has used, the doctor does not even leave a lock."""
    (tmp_path / "postgresql" / "15").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="not a data directory"):
        examine(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["postgresql"]
    with pytest.raises(NotFound):
        examine(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file"):
        examine(tmp_path / "file")


def test_a_repair_does_only_what_was_shown(files: SimulatedFiles) -> None:
    """Damage that came after the examination is not given up unseen."""
    flip_body(files, segment(PARTITION, 0), 1)
    report = examine(DATA, files)
    flip_body(files, segment(PARTITION, 0), 3)
    flip_body(files, segment(PARTITION, 50), 3)
    before = content(files)
    assert repair(DATA, report, files) == []
    assert content(files) == before


def test_a_repair_needs_room_for_what_it_keeps(files: SimulatedFiles) -> None:
    """Without room for a copy of the damaged file nothing is begun."""
    flip_body(files, segment(PARTITION, 0), 1)
    report = examine(DATA, files)
    files.capacity = sum(map(len, content(files).values())) + 1000
    before = content(files)
    with pytest.raises(StorageFull, match="make room"):
        repair(DATA, report, files)
    assert content(files) == before

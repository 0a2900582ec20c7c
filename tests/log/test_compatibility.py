"""What was once written is read for ever: a whole partition, stored by the first version.

The directory ``fixtures/partition-v1`` was written by :func:`build`; it is never written again. Its
segment, index and snapshot formats are those of version 1, and so are the names of its files. ``partition-v2`` has a
segment that was rewritten.
"""

from itertools import pairwise
from pathlib import Path

from headrace.files import Files
from headrace.log.batch import AFTER_SYNC
from headrace.log.index import Index
from headrace.log.producers import Producers
from headrace.log.segment import log_name
from tests.fakes import SimulatedFiles
from tests.log.rig import DIRECTORY, Rig, as_stored, values

STORED = Path(__file__).parent / "fixtures" / "partition-v1"
REWRITTEN = STORED.with_name("partition-v2")
START_MS = 1_700_000_000_000
RECORDS = 24


def value_of(offset: int) -> bytes:
    return b"record %d " % offset * 40


def build() -> None:
    """How the fixture was made. Kept for the next version's, not to make this one again."""
    STORED.mkdir()
    rig = Rig(Files(), STORED, segment_bytes=4096)
    for offset in range(RECORDS):
        producer = (7, 2, offset // 2) if offset % 2 else (0, 0, 0)
        rig.publish(value_of(offset), producer=producer)
        rig.loop.advance(1)
    rig.close()


def stored(directory: Path = STORED) -> SimulatedFiles:
    disk = SimulatedFiles()
    for path in directory.iterdir():
        disk.put(DIRECTORY / path.name, path.read_bytes())
    return disk


def test_a_partition_of_version_1_opens() -> None:
    """Every record is there, at its offset and time, and the log goes on behind it."""
    rig = Rig(stored(), segment_bytes=4096)
    assert values(rig.log) == [value_of(offset) for offset in range(RECORDS)]
    for offset in range(RECORDS):
        assert rig.log.offset_at(START_MS + 1000 * offset) == offset
        assert rig.log.read(offset, 1)[0].base_timestamp == START_MS + 1000 * offset
    assert all(batch.flags & AFTER_SYNC for batch in as_stored(rig.log))
    assert rig.publish(b"next").first_offset == RECORDS
    rig.reopen()
    assert rig.log.read(RECORDS)[0].values() == [b"next"]


def test_its_producers_are_known() -> None:
    """A repetition of what a producer sent to the first version is still one."""
    rig = Rig(stored())
    again = rig.publish(value_of(23), producer=(7, 2, 11))
    assert (again.first_offset, again.duplicate) == (23, True)
    assert rig.publish(b"next", producer=(7, 2, 12)).error is None


def test_its_indexes_and_snapshots_are_used_as_they_are() -> None:
    """None of its files has to be made anew: each one loads."""
    disk = stored()
    names = disk.names(DIRECTORY)
    bases = [int(name[:20]) for name in names if name.endswith(".log")]
    assert len(bases) > 2
    for base, following in pairwise(bases):
        size = disk.file_size(DIRECTORY / log_name(base))
        index = Index.load(disk.read_file(DIRECTORY / f"{base:020d}.idx"), base, size)
        assert index is not None
        assert index.end_offset == following
        assert index.max_timestamp == START_MS + 1000 * (following - 1)
        snapshot = Producers.load(disk.read_file(DIRECTORY / f"{following:020d}.producers"))
        assert snapshot is not None
        assert snapshot.next_sequence(7, 2) == following // 2


def build_rewritten() -> None:
    """How ``partition-v2`` was made: the same records, one at a time, in a segment that was rewritten."""
    REWRITTEN.mkdir()
    rig = Rig(Files(), REWRITTEN, rewrite=True)
    for offset in range(2 * RECORDS):
        producer = (7, 2, offset // 2) if offset % 2 else (0, 0, 0)
        rig.publish(value_of(offset), producer=producer)
        rig.loop.advance(1)
    rig.log.roll_soon(1)
    rig.loop.advance(10)
    rig.close()


def test_a_partition_of_version_2_opens() -> None:
    """A rewritten segment is one batch with origins: records, times and producers are known without a snapshot."""
    disk = stored(REWRITTEN)
    disk.remove(DIRECTORY / f"{2 * RECORDS:020d}.producers")
    rig = Rig(disk)
    assert values(rig.log) == [value_of(offset) for offset in range(2 * RECORDS)]
    (batch,) = as_stored(rig.log)
    assert batch.times() == [START_MS + 1000 * offset for offset in range(2 * RECORDS)]
    assert len(batch.origins) == 5 * 24
    for offset in range(2 * RECORDS - 9, 2 * RECORDS, 2):
        again = rig.publish(value_of(offset), producer=(7, 2, offset // 2))
        assert (again.first_offset, again.duplicate) == (offset, True)
    assert rig.publish(b"next", producer=(7, 2, RECORDS)).error is None

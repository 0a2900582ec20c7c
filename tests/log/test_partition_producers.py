"""Idempotent producers in a partition: known across rolls, restarts, retention and failures."""

import errno

import pytest

from headrace.errors import ProducerFenced, SequenceGap, StorageFull
from tests.fakes import FaultyFiles, SimulatedFiles
from tests.log.rig import DIRECTORY, Rig, values

SMALL = 4096
VALUE = bytes(1_000)


def segments(rig: Rig) -> int:
    return sum(name.endswith(".log") for name in rig.files.names(DIRECTORY))


def test_a_repetition_is_known_across_restarts_and_rolls() -> None:
    """A batch sent again is answered with its first offset, also after a roll and a reopen."""
    rig = Rig(segment_bytes=SMALL)
    for sequence in range(12):
        rig.publish(VALUE, producer=(7, 1, sequence))
        if sequence % 3 == 2:
            rig.reopen()
        again = rig.publish(VALUE, producer=(7, 1, sequence))
        assert (again.first_offset, again.duplicate, again.error) == (sequence, True, None)
    assert segments(rig) > 2
    assert rig.log.end_offset == 12
    assert isinstance(rig.publish(b"", producer=(7, 1, 20)).error, SequenceGap)
    assert isinstance(rig.publish(b"", producer=(7, 0, 12)).error, ProducerFenced)
    assert rig.log.last_producer_batch(7) == (11, 1)
    assert (rig.log.next_sequence(7), rig.log.next_sequence(7, 1)) == (12, 12)


@pytest.mark.parametrize("lost", ["last", "all", "damaged"])
def test_producers_are_rebuilt_when_their_snapshot_is_lost(lost: str) -> None:
    """Without snapshots the older segments are read, and every producer is known as before."""
    rig = Rig(segment_bytes=SMALL)
    for sequence in range(12):
        rig.publish(VALUE, producer=(7, 0, sequence))
        if sequence < 3:
            rig.publish(VALUE, producer=(8, 0, sequence))
    rig.close()
    snapshots = [name for name in rig.files.names(DIRECTORY) if name.endswith(".producers")]
    assert len(snapshots) > 2
    for name in snapshots[-1:] if lost == "last" else snapshots:
        if lost == "damaged":
            rig.files.put(DIRECTORY / name, b"rubbish")  # type: ignore[attr-defined]
        else:
            rig.files.remove(DIRECTORY / name)
    rig.open()
    assert rig.publish(VALUE, producer=(7, 0, 11)).duplicate
    assert rig.publish(VALUE, producer=(8, 0, 2)).duplicate
    assert rig.publish(VALUE, producer=(7, 0, 12)).error is None
    assert isinstance(rig.publish(VALUE, producer=(8, 0, 5)).error, SequenceGap)


def test_producers_survive_retention() -> None:
    """What the dropped segments told of a producer is in the snapshot of the first that is kept."""
    rig = Rig(segment_bytes=SMALL)
    rig.publish(VALUE, producer=(8, 0, 0))
    for _ in range(20):
        rig.publish(VALUE)
    rig.log.drop_before(1 << 40)
    rig.reopen()
    assert rig.publish(VALUE, producer=(8, 0, 0)).first_offset == 0
    assert rig.publish(VALUE, producer=(8, 0, 1)).error is None


def test_a_repetition_shares_the_fate_of_the_first() -> None:
    """A batch and its repetition in one commit that fails are both refused, then stored once."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.publish(b"before", producer=(7, 0, 0))
    files.fail("write_at", 1, errno.ENOSPC)
    known = rig.append(b"before", producer=(7, 0, 0))
    twins = [rig.append(b"new", producer=(7, 0, 1)) for _ in range(2)]
    rig.loop.run_until_idle()
    assert (known.first_offset, known.error) == (0, None)
    for twin in twins:
        assert isinstance(twin.error, StorageFull)
        assert twin.first_offset == -1
    assert rig.publish(b"new", producer=(7, 0, 1)).first_offset == 1
    assert values(rig.log) == [b"before", b"new"]

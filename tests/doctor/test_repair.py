"""A repair under the worst of circumstances: cut off at any point, and damage of any kind."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.doctor.commands import examine, repair
from tests.doctor.directories import (
    batches_of,
    flip_body,
    flip_header,
    make_partition,
    publish,
    read_all,
    segment,
)
from tests.fakes import FaultyFiles, SimulatedFiles
from tests.log.rig import Rig

DATA = Path("data")
PARTITION = DATA / "orders" / "0"
GONE = {*range(10, 20), *range(40, 50), *range(50, 100), *range(160, 170)}


def damaged_disk() -> SimulatedFiles:
    """Four segments: two destroyed batches, a missing segment, a wrong index, a destroyed batch."""
    files = SimulatedFiles()
    make_partition(files, PARTITION, [5, 5, 5, 5])
    flip_body(files, segment(PARTITION, 0), 4)
    flip_header(files, segment(PARTITION, 0), 1)
    files.remove(segment(PARTITION, 50))
    files.put(segment(PARTITION, 100).with_suffix(".idx"), b"rubbish")
    flip_body(files, segment(PARTITION, 150), 1)
    return files.copy()


def changes_of_a_repair() -> int:
    files = FaultyFiles(damaged_disk())
    report = examine(DATA, files)
    before = len(files.changes)
    repair(DATA, report, files)
    return len(files.changes) - before


CHANGES = changes_of_a_repair()


@pytest.mark.parametrize("power_fails", [False, True], ids=["error", "power"])
@pytest.mark.parametrize("number", range(1, CHANGES + 1))
def test_a_repair_may_be_cut_off_anywhere(number: int, power_fails: bool) -> None:
    """Whichever step of a repair fails, the next repair finishes it and nothing more is lost."""
    disk = damaged_disk()
    files = FaultyFiles(disk)
    report = examine(DATA, disk)
    files.fail(None, number, repeat=True)
    with pytest.raises(OSError, match="Input/output error"):
        repair(DATA, report, files)
    if power_fails:
        disk.crash(Random(number), garbage=True)
    else:
        disk.kill()

    repair(DATA, examine(DATA, disk), disk)
    assert examine(DATA, disk).healthy
    assert read_all(disk, PARTITION) == (set(range(200)) - GONE, GONE)


def test_a_finished_repair_survives_the_power() -> None:
    """Every change that a repair has reported is on the disk."""
    disk = damaged_disk()
    repair(DATA, examine(DATA, disk), disk)
    disk.crash(Random(1))
    assert examine(DATA, disk).healthy
    assert read_all(disk, PARTITION) == (set(range(200)) - GONE, GONE)


@given(
    damage=st.lists(
        st.tuples(
            st.sampled_from([0, 50, 100, 150]),
            st.integers(0, 5_000),
            st.binary(min_size=1, max_size=200),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100)
def test_whatever_is_overwritten_nothing_else_is_lost(
    damage: list[tuple[int, int, bytes]],
) -> None:
    """Bytes are overwritten anywhere; every batch that they did not touch can be read after it."""
    files = SimulatedFiles()
    make_partition(files, PARTITION, [5, 5, 5, 5])
    touched: set[int] = set()
    raws = {
        base: bytearray(files.read_file(segment(PARTITION, base))) for base in (0, 50, 100, 150)
    }
    batches = {base: batches_of(files, segment(PARTITION, base)) for base in raws}
    for base, at, rubbish in damage:
        raw = raws[base]
        at %= len(raw)
        rubbish = rubbish[: len(raw) - at]
        for found in batches[base]:
            low, high = found.position, found.position + found.size
            for position in range(max(low, at), min(high, at + len(rubbish))):
                if raw[position] != rubbish[position - at]:
                    touched.update(range(found.batch.base_offset, found.batch.end_offset))
        raw[at : at + len(rubbish)] = rubbish
    for base, raw in raws.items():
        files.put(segment(PARTITION, base), raw)

    report = examine(DATA, files)
    repair(DATA, report, files)
    after = examine(DATA, files)
    assert after.healthy, after.findings
    readable, lost = read_all(files, PARTITION)
    end = len(readable) + len(lost)
    # A destroyed end of the last segment is a torn write; all else is where it was.
    assert touched >= set(range(end, 200))
    assert readable >= set(range(end)) - touched
    assert lost <= touched
    rig = Rig(files, PARTITION)
    assert rig.log.read_only is None
    assert publish(rig, 3) == end


def test_a_rewritten_batch_keeps_its_producers() -> None:
    """If the body of a rewritten batch is destroyed, its producers' batches are still recognized after the repair."""
    files = SimulatedFiles()
    rig = Rig(files, PARTITION, rewrite=True)
    for sequence in range(40):
        rig.publish(b"x" * 20, producer=(7, 0, sequence))
    rig.log.roll_soon(1)
    rig.loop.advance(10)
    rig.close()
    for name in files.names(PARTITION):
        if name.endswith(".producers"):
            files.remove(PARTITION / name)
    (batch,) = batches_of(files, segment(PARTITION, 0))
    assert batch.batch.origins
    flip_body(files, segment(PARTITION, 0), 0)
    repair(DATA, examine(DATA, files), files)
    assert not [f for f in examine(DATA, files).findings if f.code == "damaged_range"]
    rig = Rig(files, PARTITION)
    again = rig.publish(b"x" * 20, producer=(7, 0, 39))
    assert (again.first_offset, again.duplicate) == (39, True)
    assert rig.publish(b"next", producer=(7, 0, 40)).error is None


def test_a_copy_that_was_left_over_is_removed() -> None:
    """A crash may leave the unfinished copy of a segment; the doctor names it and removes it."""
    files = SimulatedFiles()
    make_partition(files, PARTITION, [5, 5])
    left = segment(PARTITION, 0).with_name(segment(PARTITION, 0).name + ".tmp")
    files.put(left, b"half a segment")
    report = examine(DATA, files)
    assert [finding.code for finding in report.findings].count("leftover_tmp") == 1
    repair(DATA, report, files)
    assert not files.exists(left)

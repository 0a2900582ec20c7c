"""A delayed message comes exactly once, wherever two kills one after the other hit its publishing.

On the simulated disk, so that every pair of moments between two jobs of the disk can be tried.
"""

from __future__ import annotations

import pytest

from tests.broker.rig import TOPIC, Rig

VALUES = [b"0", b"1", b"2", b"3", b"4", b"5"]
JOBS = 8


def live(rig: Rig, jobs: int) -> None:
    """Let the broker work until so many of its disk jobs are done; then it is killed."""
    rig.workers.hold = True
    rig.open()
    for _ in range(jobs):
        for _ in range(10):
            rig.run()
            if rig.workers.held:
                break
            rig.advance(0.3)
        rig.workers.release(1)
    rig.run()
    rig.abandon()
    rig.disk.kill()
    rig.loop.advance(1.0)  # meanwhile more of them fall due


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("first", range(JOBS))
def test_killed_twice(first: int, partitions: int) -> None:
    """In one life after so many jobs, in the next after any number."""
    for second in range(JOBS):
        rig = Rig(topic={"partitions": partitions})
        for number, value in enumerate(VALUES):
            rig.publish(TOPIC, value, delay=1.0 + number)
        rig.abandon()
        rig.disk.kill()
        rig.loop.advance(1.0)
        live(rig, first)
        live(rig, second)
        rig.workers.hold = False
        rig.open()
        rig.advance(60)
        found = [value for number in range(partitions) for value in rig.values(TOPIC, number)]
        assert sorted(found) == VALUES, f"killed after {first} jobs, then after {second}"

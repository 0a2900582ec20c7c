"""A disk that is really full: a small tmpfs, and a file that takes what is left of it.

Publishes are refused for certain and can be tried again, consuming goes on, nothing is lost, and when
there is room again everything goes on by itself. The checker looks at all of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Broker
from headrace.errors import StorageFull
from tests.crash.full_disk import Ballast, NoDisk, small_disk, told, wait_for
from tests.crash.runner import Run

RESERVE_BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with small_disk(tmp_path / "disk") as mount:
            yield mount
    except NoDisk as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("reserve", [RESERVE_BYTES, 0], ids=["with a reserve", "to the brim"])
def test_full_under_load(disk: Path, tmp_path: Path, reserve: int) -> None:
    """It fills up, is emptied, fills up again, is killed, starts on a full disk, and goes on."""
    ballast = Ballast(disk)
    seed = secrets.randbits(32)
    run = Run(
        tmp_path / "run",
        kills=1,
        seed=seed,
        data=disk / "data",
        options={"disk_reserve_bytes": reserve},
    )
    run.set_the_stage()
    with run.victim("load") as victim:
        victim.opened.wait(30)
        wait_for(lambda: told(victim, "deliver", 0))
        for _ in range(3):
            full = time.monotonic_ns()
            ballast.fill(leave=reserve // 2)
            wait_for(lambda since=full: told(victim, "fail", since, code="storage_full"))
            if reserve:
                # The reserve is for this: acks become durable on a disk that is full for all else.
                wait_for(lambda since=full: told(victim, "flushed", since))
            room = time.monotonic_ns()
            ballast.remove()
            wait_for(lambda since=room: told(victim, "ok", since))
        ballast.fill(leave=reserve // 2)
        time.sleep(0.3)
        run.kill(victim)
    with run.victim("load") as victim:
        victim.opened.wait(30)
        wait_for(lambda: told(victim, "fail", 0, code="storage_full"))
        room = time.monotonic_ns()
        ballast.remove()
        wait_for(lambda: told(victim, "ok", room))
        wait_for(lambda: told(victim, "flushed", room))
        run.kill(victim)
    if not run.checker.anomalies:
        run.finish()
    log = (tmp_path / "run" / "victim.log").read_text()[-3000:]
    found = [str(each) for each in run.checker.anomalies[:5]]
    assert not found, f"seed {seed}: {found}\n{log}"


def test_new_topic_on_a_full_disk(disk: Path) -> None:
    """A topic that cannot be made is refused with the same word as a message that has no room."""
    ballast = Ballast(disk)
    with Broker.open(disk / "data", disk_reserve_bytes=0) as broker:
        broker.publish("orders", b"1")
        ballast.fill()
        with pytest.raises(StorageFull):
            broker.publish("another", b"2")
        with pytest.raises(StorageFull):
            broker.create_topic("a-third")
        ballast.remove()
        broker.publish("another", b"2")
        broker.create_topic("a-third")
        assert broker.topics() == ["a-third", "another", "orders"]
    with Broker.open(disk / "data") as broker:
        assert [m.value for m in broker.fetch("another")] == [b"2"]

"""A disk that fills up under load, again and again: a small tmpfs, with a reserve and to the brim.

Publishes are refused for certain and can be tried again, consuming goes on, and when there is room again
everything goes on by itself. Every tenth time the broker is killed on the full disk and started there.

To the brim there is no room for the journal either. Deliveries go on, because to stop them would keep retention from
making room, but a broker that is killed then has not counted them (docs/guarantees.md): these lives are told to the
checker.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.crash.full_disk import Ballast, NoDisk, small_disk, told, wait_for
from tests.crash.runner import START_S, Run, Victim
from tests.faults.kills import collect, figures
from tests.faults.scenario import Outcome, RunOptions, Scenario

RESERVE_BYTES = 4 << 20
FILLS_A_RUN = 20
FILLS_A_LIFE = 10
DISK_BYTES = 256 << 20


def fill(victim: Victim, ballast: Ballast, reserve: int) -> None:
    """Full, refused; with a reserve acks still become durable; room again, accepted."""
    full = time.monotonic_ns()
    ballast.fill(leave=reserve // 2)
    wait_for(lambda: told(victim, "fail", full, code="storage_full"))
    if reserve:
        wait_for(lambda: told(victim, "flushed", full))
    room = time.monotonic_ns()
    ballast.remove()
    wait_for(lambda: told(victim, "ok", room))


def one_run(run: Run, ballast: Ballast, fills: int, reserve: int, random: Random) -> None:
    run.set_the_stage()
    left = fills
    while left and not run.checker.anomalies:
        with run.victim("load") as victim:
            victim.opened.wait(START_S)
            wait_for(lambda victim=victim: told(victim, "deliver", 0))  # type: ignore[misc]
            for _ in range(min(FILLS_A_LIFE, left) - 1):
                fill(victim, ballast, reserve)
                left -= 1
            ballast.fill(leave=reserve // 2)
            time.sleep(random.random() * 0.5)
            run.kill(victim, uncounted=not reserve)
            left -= 1
        with run.victim("load") as victim:  # on the full disk
            victim.opened.wait(START_S)
            wait_for(lambda victim=victim: told(victim, "fail", 0, code="storage_full"))  # type: ignore[misc]
            room = time.monotonic_ns()
            ballast.remove()
            wait_for(lambda victim=victim, room=room: told(victim, "ok", room))  # type: ignore[misc]
            run.kill(victim)
    if not run.checker.anomalies:
        run.finish()


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    counts: Counter[str] = Counter()
    random = Random(options.seed)
    number = 0
    while outcome.amount < options.amount and not outcome.anomalies:
        directory = Path(tempfile.mkdtemp(prefix="headrace-full-"))
        reserve = RESERVE_BYTES if number % 2 == 0 else 0
        fills = min(FILLS_A_RUN, options.amount - outcome.amount)
        try:
            with small_disk(directory / "disk", DISK_BYTES) as disk:
                one = Run(
                    directory / "run",
                    kills=0,
                    seed=options.seed + number,
                    data=disk / "data",
                    options={"disk_reserve_bytes": reserve},
                )
                try:
                    one_run(one, Ballast(disk), fills, reserve, random)
                except AssertionError as error:
                    one.problem(f"{'with a reserve' if reserve else 'to the brim'}: {error}")
        except NoDisk as error:
            outcome.absent = str(error)
            break
        number += 1
        outcome.amount += fills
        collect(outcome, one, counts)
        if not outcome.anomalies:
            shutil.rmtree(directory, ignore_errors=True)
        options.progress(f"{outcome.amount} disk fills, {len(outcome.anomalies)} anomalies")
    outcome.figures = figures(counts)
    return outcome


SCENARIO = Scenario(
    name="disk-fills",
    what="the disk fills up under load: publishes are refused for certain, everything else goes on",
    unit="disk fills",
    amount=100,
    quick=4,
    run=run,
)

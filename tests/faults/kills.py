"""SIGKILL under load, again and again (``tests/crash``), in runs of some kills each.

Each run has a data directory of its own, ends with a drain and a reading of everything, and is checked as a
whole; so the memory of the checker is bounded, and liveness is checked many times and not once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from tests.crash.runner import Run
from tests.faults.scenario import Outcome, RunOptions, Scenario

KILLS_A_RUN = 50
LIFE_S = 0.8
"""Mean seconds between the start and the kill."""


def collect(outcome: Outcome, run: Run, counts: Counter[str]) -> None:
    """The verdict of one run; what is wrong keeps its directory."""
    outcome.anomalies += [f"{anomaly} (see {run.directory})" for anomaly in run.checker.anomalies]
    counts += run.checker.counts
    counts["slowest start, ms"] = max(counts["slowest start, ms"], round(run.slowest_open_s * 1000))
    if not run.checker.anomalies:
        shutil.rmtree(run.directory, ignore_errors=True)


def figures(counts: Counter[str]) -> dict[str, int]:
    told = (
        "messages acknowledged",
        "deliveries",
        "dead letters",
        "calls repeated",
        "closed in good order",
        "slowest start, ms",
    )
    return {name: counts[name] for name in told}


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    counts: Counter[str] = Counter()
    number = 0
    while outcome.amount < options.amount and not outcome.anomalies:
        kills = min(KILLS_A_RUN, options.amount - outcome.amount)
        directory = Path(tempfile.mkdtemp(prefix="headrace-kills-"))
        one = Run(directory, kills=kills, seed=options.seed + number, life_s=LIFE_S)
        one.go()
        number += 1
        outcome.amount += one.checker.counts["kills"]
        collect(outcome, one, counts)
        options.progress(
            f"{outcome.amount} kills, {counts['messages acknowledged']:,} messages acknowledged, "
            f"{len(outcome.anomalies)} anomalies"
        )
    outcome.figures = figures(counts)
    return outcome


SCENARIO = Scenario(
    name="kills",
    what="SIGKILL of a broker under load: nothing that was answered is lost, doubled, moved or skipped",
    unit="kills",
    amount=500,
    quick=6,
    run=run,
)

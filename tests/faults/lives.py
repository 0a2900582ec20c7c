"""Simulated lives of a whole broker (``simulation/``), one seed after the other."""

from __future__ import annotations

import logging
from collections import Counter

from tests.faults.scenario import Outcome, RunOptions, Scenario
from tests.faults.simulation.life import live

ANOMALIES_MAX = 10


def run(options: RunOptions) -> Outcome:
    """A failing life does not end the run: the others may show something else."""
    outcome = Outcome()
    counts: Counter[str] = Counter()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each life has faults on purpose, and they are logged
    try:
        for seed in range(options.seed, options.seed + options.amount):
            try:
                counts += live(seed).counts
            except AssertionError as error:
                outcome.anomalies.append(str(error))
                options.progress(str(error))
                if len(outcome.anomalies) >= ANOMALIES_MAX:
                    break
            outcome.amount += 1
            if outcome.amount % 500 == 0:
                options.progress(f"{outcome.amount:,} lives, {counts['messages']:,} messages")
    finally:
        logging.disable(before)
    outcome.figures = dict(counts)
    return outcome


SCENARIO = Scenario(
    name="simulation",
    what="lives of the whole broker on a simulated clock, disk and loop, features in any combination",
    unit="lives",
    amount=10_000,
    quick=300,
    run=run,
)

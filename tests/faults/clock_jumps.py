"""Jumps of the wall clock, forwards and back: lives of the simulation that jump all the time.

Leases do not notice. Delayed messages come once and not before their time, messages do not outlive theirs, times
in a partition never run backwards, and retention deletes nothing that is unread.
"""

from __future__ import annotations

import logging
from collections import Counter

from tests.faults.scenario import Outcome, RunOptions, Scenario
from tests.faults.simulation.life import live


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    counts: Counter[str] = Counter()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    seed = options.seed
    try:
        while outcome.amount < options.amount and len(outcome.anomalies) < 10:
            try:
                counts += live(seed, often="jump").counts
            except AssertionError as error:
                outcome.anomalies.append(str(error))
            outcome.amount = counts["clock jumps"]
            seed += 1
    finally:
        logging.disable(before)
    outcome.figures = {
        "lives": seed - options.seed,
        "messages": counts["messages"],
        "deliveries": counts["deliveries"],
    }
    return outcome


SCENARIO = Scenario(
    name="clock-jumps",
    what="the wall clock jumps forwards and back: delays, times to live, leases and retention hold",
    unit="jumps",
    amount=20_000,
    quick=500,
    run=run,
)

"""What a scenario is: a name, an amount, and a function that breaks something and says what it found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunOptions:
    """What a scenario is told."""

    seed: int
    amount: int
    """How many kills, lives, sockets …"""
    seconds: float
    """How long to hold, where a scenario holds something."""
    progress: Callable[[str], None] = lambda line: None


@dataclass
class Outcome:
    """What a scenario has done and found."""

    amount: int = 0
    anomalies: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Counts that are worth telling: messages acknowledged, slowest start …"""
    absent: str | None = None
    """Why it could not be run here, or a part of it not."""
    seconds: float = 0.0
    seed: int = 0
    replay: str = ""


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    """One sentence: what is done and what must hold."""
    unit: str
    amount: int
    """Of a whole run."""
    quick: int
    """Of a run with --quick."""
    run: Callable[[RunOptions], Outcome]
    seconds: float = 0.0
    seconds_quick: float = 0.0

    def go(self, options: RunOptions) -> Outcome:
        """Run it. An exception is an anomaly, too: no scenario may fall over."""
        began = time.monotonic()
        try:
            outcome = self.run(options)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(anomalies=[text])
        outcome.seconds = round(time.monotonic() - began, 1)
        outcome.seed = options.seed
        outcome.replay = (
            f"python -m tests.faults {self.name} --seed {options.seed} --amount {options.amount}"
        )
        return outcome

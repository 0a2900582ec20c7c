"""A machine that loses its power, or a process that is killed, at a planned operation of the disk.

Stands in front of a :class:`~tests.fakes.SimulatedFiles`. ``plan(countdown)`` lets the power fail right before
the ``countdown``-th operation that changes the disk; from then on every operation raises
:class:`PowerFailed`, until ``restored()``. Whoever drives the test then abandons what ran on the machine,
and starts it again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fakes.faults import CHANGES, Fault, FaultyFiles
from tests.fakes.simulated import SimulatedFiles


class PowerFailed(BaseException):
    """Nothing that runs may catch this and go on."""


class Mains(FaultyFiles):
    """A disk whose power fails right before a planned operation, or at once."""

    def __init__(self, disk: SimulatedFiles, **crash: object):
        super().__init__(disk)
        self.disk, self.crash = disk, crash
        self.countdown = 0
        self.random = Random(0)
        self.dead = False
        self.kills = False
        """The planned end is that of the process: the machine, and its page cache, live on."""

    def plan(self, countdown: int, seed: int, *, kills: bool = False) -> None:
        self.countdown, self.random, self.kills = countdown, Random(seed), kills

    def cut(self) -> None:
        self.countdown = 0
        if self.kills:
            self.disk.kill()
        else:
            self.disk.crash(self.random, **self.crash)  # type: ignore[arg-type]
        self.dead = True

    def restored(self) -> None:
        """The machine is on again; a cut that is planned and has not come yet stays planned."""
        self.dead = False

    def _meet(self, kind: str, path: Path) -> Fault | None:
        if self.dead:
            raise PowerFailed
        if kind in CHANGES and self.countdown:
            self.countdown -= 1
            if not self.countdown:
                self.cut()
                raise PowerFailed
        return super()._meet(kind, path)

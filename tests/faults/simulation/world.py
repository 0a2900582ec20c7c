"""The machine of a life: loop, clock, disk and disk threads that do what the dice say, and the broker on it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

from headrace.errors import HeadraceError
from headrace.log.directory import JOURNAL
from headrace.log.workers import Done
from tests.broker.rig import Rig
from tests.fakes import (
    FakeClock,
    FakeLoop,
    InlineWorkers,
    Mains,
    PowerFailed,
    RunningLoop,
    SimulatedFiles,
)
from tests.faults.simulation.logs import Violation

OPENS_MAX = 5
"""A start may be interrupted by a planned cut or fault; it has to succeed after a few tries."""

AT_HAND = 0.7
"""How likely the bytes of a read are in the page cache."""


class DiskThreads(InlineWorkers):
    """Jobs that wait until they are let run. When the power fails in one, nothing goes on."""

    def __init__(self, loop: FakeLoop):
        super().__init__(loop, hold=True)

    def _work(self, work: Callable[[], Any], done: Done) -> None:
        def careful() -> Any:
            try:
                return work()
            except PowerFailed:
                failed.append(True)
                raise

        failed: list[bool] = []
        super()._work(careful, done)
        if failed:
            raise PowerFailed


class SimulatedMachine(Rig):
    """Disk jobs wait until ``work`` lets some of them run, in any order."""

    files: Mains

    def __init__(self, random: Random):
        self.dice = random
        crash = {
            "sector": random.choice([8, 64, 512]),
            "ordered": random.random() < 0.7,
            "garbage": random.random() < 0.3,
        }
        super().__init__(
            Mains(SimulatedFiles(), **crash),
            seed=random.getrandbits(32),
            hold=True,
            topic={"segment_bytes": 4096},
            events_interval=0.0,
        )
        pages = Random(self.dice.getrandbits(32))
        self.files.disk.is_at_hand = lambda: pages.random() < AT_HAND
        self.highest_ms = self.clock.now_ms()
        """The latest that it ever was by the wall clock."""
        self.uncounted = False
        """The journal found no room in the last life of the broker: its deliveries may not be counted."""

    # --- the life of the broker -----------------------------------------------------------------
    def abandon(self) -> None:
        self._engine = None
        now = self.clock.now_ms()
        self.loop = RunningLoop(self.loop.time())
        self.clock = FakeClock(self.loop, now)
        self.workers = DiskThreads(self.loop)

    def start(self) -> tuple[bool, bool]:
        """Open it, as often as it takes: whether that was interrupted, and by the power."""
        interrupted = power_cut = False
        refused, self.files.refused = self.files.refused, []
        self.uncounted = any(
            call.path.name.startswith(JOURNAL) and error == errno.ENOSPC for call, error in refused
        )
        for _ in range(OPENS_MAX):
            self.files.restored()
            self.abandon()
            try:
                self.open()
            except PowerFailed:
                interrupted = True
                power_cut |= not self.files.kills
            except HeadraceError:
                if not self.files.faults:
                    raise
                interrupted = True
                self.files.heal()  # the disk refused something; the operator has seen to it
                self.disk.kill()
            else:
                return interrupted, power_cut
        raise Violation("stuck", "the broker does not start")

    def stop(self) -> None:
        """In good order. :class:`PowerFailed` may come out."""
        closed: list[bool] = []
        engine = self.engine
        engine.close(lambda: closed.append(True))
        self.finish_jobs(lambda: bool(closed) or engine.failed is not None)
        if not closed:
            if engine.failed is not None:
                return
            raise Violation("stuck", "the broker does not close")
        if self.loop.timers:
            left = [timer.callback for _, _, timer in self.loop._timers if not timer.cancelled]
            raise Violation("stuck", f"timers after the close: {left}")

    # --- time and the disk ------------------------------------------------------------------------
    def work(self, most: int | None = None) -> None:
        """Let some disk jobs run, in any order, and the loop after each of them."""
        self.run()
        left = self.dice.choice([0, 1, 2, 5, 50]) if most is None else most
        while left and self.workers.held:
            self.workers.release(1, self.dice)
            self.run()
            left -= 1

    def finish_jobs(self, until: Callable[[], bool] = lambda: False, seconds: float = 60.0) -> None:
        """Let everything run, with time if need be, until the condition holds or nothing is left."""
        self.work(1_000_000)
        waited = 0.0
        while not until() and waited < seconds:
            if self.engine_failed:
                return
            self.pass_time(0.5)
            self.work(1_000_000)
            waited += 0.5
            if not self.loop.timers and not self.workers.held:
                return

    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self.highest_ms = max(self.highest_ms, self.clock.now_ms())

    def jump(self, milliseconds: int) -> None:
        self.clock.jump(milliseconds)
        self.highest_ms = max(self.highest_ms, self.clock.now_ms())

    @property
    def engine_failed(self) -> bool:
        return self._engine is not None and self._engine.failed is not None

    def call(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call with ``done`` as the last argument and see it through; raises what it answers."""
        answer = self.ask(call, *args, **more)
        self.finish_jobs(lambda: bool(answer.calls))
        if not answer.calls and self.engine_failed:
            raise self.engine.failed or AssertionError
        return answer.get()

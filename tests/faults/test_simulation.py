"""A few lives of the simulation, and the oracle's own honesty: it finds what is planted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from headrace.broker.cursor import Cursor
from headrace.broker.engine import Engine
from headrace.broker.ordering import KeyOrder
from headrace.broker.schedule import Schedule
from headrace.broker.subscription import Subscription
from tests.fakes import SimulatedFiles
from tests.faults.simulation.life import Life, live

LIVES = 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every life has faults on purpose, and the broker logs them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("first", [0, LIVES // 2])
def test_lives(first: int) -> None:
    """Whatever happens to a broker, it keeps its promises. `make faults` tries ten thousand lives."""
    for seed in range(first, first + LIVES // 2):
        live(seed)


def test_a_seed_replays_exactly() -> None:
    """The same seed is the same life, step by step: otherwise a finding could not be repeated."""
    assert [live(seed).digest for seed in range(5)] == [live(seed).digest for seed in range(5)]


def finds(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    where: type,
    name: str,
    broken: object,
    first: int = 0,
) -> None:
    """``first``: the seed to begin with, for what only one life in a hundred meets."""
    monkeypatch.setattr(where, name, broken)
    found = []
    for seed in range(first, first + 150):
        try:
            live(seed)
        except AssertionError as error:
            found.append(str(error))
            if f"Violation: {kind}" in found[-1]:
                return
    raise AssertionError(f"nobody noticed {where.__name__}.{name}: {found[:3]}")


def test_it_finds_a_skipped_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscription that loses one of the messages that it takes back."""
    add = Subscription.release
    monkeypatch.setattr(Subscription, "release", add)

    def forgetful(self: Subscription, lease_id: int, offset: int) -> None:
        lease = self.lease(lease_id)
        self._settle(lease, offset)
        self._done(lease.cursor, offset)
        self._released(lease, 1)

    finds(monkeypatch, "skipped", Subscription, "release", forgetful)


def test_it_finds_a_lost_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that only says that it has synced."""
    finds(monkeypatch, "lost", SimulatedFiles, "sync", lambda self, handle: None)


def test_it_finds_a_broken_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are never busy."""
    finds(monkeypatch, "out of turn", KeyOrder, "hold", lambda self, key, cursor, offset: None)


def test_it_finds_an_early_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule whose clock is five seconds ahead."""
    add = Schedule._add

    def early(self: Schedule, offset: int, control: dict[str, object]) -> object:
        return add(self, offset, {**control, "at": int(str(control["at"])) - 5_000})

    finds(monkeypatch, "early", Schedule, "_add", early)


def test_it_finds_a_forgotten_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acks that never reach the journal."""
    finds(monkeypatch, "done", Cursor, "take_delta", lambda self: self._pack(0, [], {}))


def test_it_finds_a_delivery_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries that do not wait for the journal."""

    def hasty(self: Engine, done: Callable[[None], None]) -> None:
        self.call_soon(done, None)

    finds(monkeypatch, "attempt", Engine, "flush", hasty, first=280)


def test_the_end_waits_for_topics_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that just grows refuses other changes for a moment, and that is no finding."""
    settings = {"partitions": 1, "retention_hours": None, "max_queue_size": 60}
    monkeypatch.setattr(Life, "_topic_settings", lambda self: dict(settings))
    for seed in range(10):
        life = Life(seed)
        life.set_the_stage()
        life.clients.grow()
        life.finish()

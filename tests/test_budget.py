"""The memory that a broker may hold."""

import pytest

from headrace import budget as budgets
from headrace.budget import LIMIT_BYTES_MIN, Budget, Share
from headrace.errors import MemoryFull


def test_the_newest_request_is_refused_and_nothing_changes() -> None:
    budget = Budget(100)
    budget.take(60)
    with pytest.raises(MemoryFull) as caught:
        budget.take(50)
    assert (caught.value.code, caught.value.retryable) == ("memory_full", True)
    assert (budget.used, budget.refused) == (60, 1)
    budget.give(60)
    budget.take(100)


def test_a_share_gives_everything_back() -> None:
    budget = Budget(100)
    one, other = Share(budget), Share(budget)
    one.take(30)
    one.add(20)
    other.set(40)
    other.set(10)
    assert budget.used == 60
    with pytest.raises(MemoryFull):
        other.take(50)
    one.clear()
    one.clear()
    other.clear()
    assert budget.used == 0


def test_the_default_is_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the container, if there is one, and not below what a broker needs."""
    monkeypatch.setattr(budgets, "memory_bytes", lambda: 8 << 30)
    assert Budget().limit == 2 << 30
    monkeypatch.setattr(budgets, "memory_bytes", lambda: 64 << 20)
    assert Budget().limit == LIMIT_BYTES_MIN


def test_the_memory_of_this_machine_is_known() -> None:
    assert budgets.memory_bytes() > 64 << 20

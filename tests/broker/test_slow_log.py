"""The same tests over logs whose reads complete later: nothing but the time may be different.

An engine over a network answers ``ReadPending`` to the first read of a place. What members, followers,
retries, dead letters, delayed messages and staged commits do is what they do over a disk.
"""

from types import ModuleType

import pytest

from tests.broker import (
    test_dead_letters,
    test_follower,
    test_members,
    test_ordering,
    test_positions,
    test_schedule,
    test_staging,
    test_staging_delayed,
    test_subscription,
    test_subscription_places,
)
from tests.broker.rig import Rig

NOT_SLOW: set[str] = set()
"""Tests of the log on disk itself."""


def tests_of(*modules: ModuleType) -> dict[str, object]:
    return {
        f"{name}__{module.__name__.rpartition('.test_')[2]}": test
        for module in modules
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and name not in NOT_SLOW
    }


globals().update(
    tests_of(
        test_dead_letters,
        test_follower,
        test_members,
        test_ordering,
        test_positions,
        test_schedule,
        test_staging,
        test_staging_delayed,
        test_subscription,
        test_subscription_places,
    )
)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "slow", True)


@pytest.fixture
def rig() -> Rig:
    return Rig()

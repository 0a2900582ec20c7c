"""The same tests over logs whose reads complete later: nothing but the time may be different.

An engine over a network answers ``ReadPending`` to the first read of a place. What members, followers,
retries, dead letters, delayed messages and staged commits do is what they do over a disk.
"""

from types import ModuleType

import pytest

from headrace.broker.delivery import Member
from headrace.model import TopicSettings
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
from tests.broker.rig import GROUP, TOPIC, Inbox, Rig

OF_MEMORY = test_subscription_places.test_a_million_unsettled_messages_are_cheap
"""What is held is the same over every log."""


def _tests_of(*modules: ModuleType) -> dict[str, object]:
    return {
        f"{name}__{module.__name__.rpartition('.test_')[2]}": test
        for module in modules
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and test is not OF_MEMORY
    }


globals().update(
    _tests_of(
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
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig()
    if request.node.name.endswith("__members"):  # as the fixture of that module
        rig.subscribe(ack_timeout=10.0, backoff=0.0)
    return rig


def test_what_is_fetched_for_a_cursor_that_was_moved_is_not_delivered(rig: Rig) -> None:
    """A seek while the log fetches: the records of the old place come to nothing."""
    group = rig.subscribe()
    rig.numbers(10)
    inbox = Inbox()
    group.join(Member("member", inbox))
    group.pump()
    assert group.is_fetching
    group.seek(group.cursors[(TOPIC, 0)], 7)
    rig.run()
    assert inbox.offsets == [7, 8, 9]
    assert not group.is_fetching


@pytest.mark.parametrize("moved", [False, True])
def test_a_retry_waits_for_its_log(rig: Rig, moved: bool) -> None:
    """It is counted while it waits, and comes with its attempt, unless a seek forgets it."""
    group = rig.subscribe(backoff=0.0, ack_timeout=1000.0)
    rig.numbers(3)
    inbox = rig.join(group)
    rig.run()
    first, *_ = inbox.take()
    rig.advance(60.0)  # the log does not keep for so long what it has fetched
    inbox.nack(first)
    group.pump()
    assert group.is_fetching
    assert group.statistics()["waiting_for_retry"] == 1
    if moved:
        group.seek(group.cursors[(TOPIC, 0)], 3)
    rig.run()
    assert [(m.offset, m.attempt) for m in inbox.messages] == ([] if moved else [(0, 2)])


def test_a_follower_that_is_gone_is_not_woken(rig: Rig) -> None:
    """It leaves, or its topic is deleted, while the log fetches for it."""
    rig.numbers(1)
    left, orphan = rig.follow(), rig.follow()
    answer = rig.send(TOPIC, b"new")
    rig.loop.run_until_idle()
    answer.get()
    assert left.follower is not None
    rig.engine.unfollow(left.follower)
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.run()
    assert orphan.follower is not None
    assert not orphan.follower.closed


def test_several_partitions_are_asked_at_once(rig: Rig) -> None:
    """A start at a time has all logs fetch side by side, not one after the other."""
    rig.engine.create_topic(TOPIC, TopicSettings(partitions=8))
    rig.numbers(8)
    tries = 0

    def subscribe() -> None:
        nonlocal tries
        tries += 1
        rig.engine.subscribe(GROUP, TOPIC, start_time_ms=rig.clock.now_ms())

    rig.complete(subscribe)
    assert tries == 2
    assert rig.engine.subscription(GROUP).lag() == 8

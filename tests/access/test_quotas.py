"""Quotas: rates slow, counts refuse."""

import pytest

from headrace.access.quotas import DEBT_S_MAX, Meters, RateBucket
from headrace.access.rules import Quotas
from headrace.budget import Budget, Share
from headrace.errors import QueueFull
from headrace.model import SubscriptionSettings
from tests.fakes.time import FakeLoop


def test_a_bucket_lets_a_second_pass_and_then_slows() -> None:
    """What is over is a debt; it is paid by waiting."""
    bucket = RateBucket(100.0, 0.0)
    assert bucket.take(100, 0.0) == 0
    assert bucket.take(50, 0.0) == pytest.approx(0.5)
    assert bucket.take(0, 0.5) == pytest.approx(0.0)
    assert bucket.take(100, 1.5) == 0
    assert bucket.take(1000, 1.5) == pytest.approx(10.0)


def test_a_debt_ends_before_a_delivery_times_out() -> None:
    """Else a client that got one delivery larger than its quota could never acknowledge it."""
    bucket = RateBucket(1.0, 0.0)
    assert bucket.take(1e9, 0.0) == DEBT_S_MAX
    assert SubscriptionSettings().ack_timeout > DEBT_S_MAX
    assert bucket.take(0, DEBT_S_MAX + 1) == 0


def test_connections_are_counted() -> None:
    """One too many is refused, until another ends."""
    meter = Meters(FakeLoop()).of("user:alice", Quotas(connections=2))
    assert meter is not None
    first = object()
    meter.connect(first)
    meter.connect(object())
    with pytest.raises(QueueFull) as caught:
        meter.connect(object())
    assert caught.value.code == "quota_exceeded"
    meter.disconnect(first)
    meter.connect(object())
    meter.connect(object(), is_new=False)  # it was there before the quota
    assert meter.connections == 3


def test_memory_is_that_of_all_connections_together() -> None:
    """The shares of several connections in one part of the budget; the newest request is refused."""
    meters = Meters(FakeLoop())
    meter = meters.of("user:alice", Quotas(memory=100))
    assert meter is not None
    budget = Budget(1 << 30)
    small, large = Share(budget), Share(budget)
    for share in (small, large):
        share.belong((meter.memory,))
    small.take(60)
    large.take(40)
    with pytest.raises(QueueFull) as caught:
        large.take(1)
    assert caught.value.code == "quota_exceeded"
    assert (budget.used, meter.memory.used) == (100, 100)
    assert meters.of("user:alice", Quotas(memory=200)) is meter
    large.take(1)


def test_without_quotas_nothing_is_counted() -> None:
    """No meter, no cost."""
    meters = Meters(FakeLoop())
    assert meters.of("user:alice", Quotas()) is None
    assert meters.of_address("10.0.0.1") is None
    meters.address_quotas = Quotas(connections=1)
    assert meters.of_address("10.0.0.1") is not None


def test_a_changed_quota_holds_for_those_who_are_there() -> None:
    """The same meter, with the old counts."""
    meters = Meters(FakeLoop())
    meter = meters.of("user:alice", Quotas(connections=1))
    assert meter is not None
    meter.connect(object())
    assert meters.of("user:alice", Quotas(connections=2)) is meter
    meter.connect(object())
    assert meters.of("user:alice", Quotas()) is meter


def test_one_quota_is_within_another() -> None:
    """A bound is within no bound, and not the other way round."""
    assert Quotas(connections=1).is_within(Quotas())
    assert Quotas(connections=1).is_within(Quotas(connections=2))
    assert not Quotas(connections=3).is_within(Quotas(connections=2))
    assert not Quotas().is_within(Quotas(connections=2))

"""Quotas: rates slow, counts refuse."""

import pytest

from headrace.access.quotas import Meters, RateBucket
from headrace.access.rules import Quotas
from headrace.errors import QueueFull
from tests.fakes.time import FakeLoop


def test_a_bucket_lets_a_second_pass_and_then_slows() -> None:
    """What is over is a debt; it is paid by waiting."""
    bucket = RateBucket(100.0, 0.0)
    assert bucket.take(100, 0.0) == 0
    assert bucket.take(50, 0.0) == pytest.approx(0.5)
    assert bucket.take(0, 0.5) == pytest.approx(0.0)
    assert bucket.take(100, 1.5) == 0
    assert bucket.take(1000, 1.5) == pytest.approx(10.0)


class Held:
    """A connection that holds some bytes."""

    def __init__(self, size: int = 0):
        self.size = size

    def held(self) -> int:
        return self.size


def test_connections_are_counted() -> None:
    """One too many is refused, until another ends."""
    meter = Meters(FakeLoop()).of("user:alice", Quotas(connections=2))
    assert meter is not None
    first = Held()
    meter.connect(first)
    meter.connect(Held())
    with pytest.raises(QueueFull) as caught:
        meter.connect(Held())
    assert caught.value.code == "quota_exceeded"
    meter.disconnect(first)
    meter.connect(Held())


def test_memory_is_that_of_all_connections_together() -> None:
    """Too much of it slows all of them."""
    meter = Meters(FakeLoop()).of("user:alice", Quotas(memory=100))
    assert meter is not None
    small, large = Held(60), Held(40)
    meter.connect(small)
    meter.connect(large)
    assert meter.crowded() == 0
    large.size = 41
    assert meter.crowded() > 0


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
    meter.connect(Held())
    assert meters.of("user:alice", Quotas(connections=2)) is meter
    meter.connect(Held())
    assert meters.of("user:alice", Quotas()) is meter


def test_one_quota_is_within_another() -> None:
    """A bound is within no bound, and not the other way round."""
    assert Quotas(connections=1).is_within(Quotas())
    assert Quotas(connections=1).is_within(Quotas(connections=2))
    assert not Quotas(connections=3).is_within(Quotas(connections=2))
    assert not Quotas().is_within(Quotas(connections=2))

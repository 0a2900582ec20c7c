"""What a node asks of the owner of a partition on behalf of a member. The test is the owner."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.shares import ForeignShare
from headrace.errors import HeadraceError, QueueFull, SubscriptionNotFound
from headrace.wire.binary import Frame, Type
from tests.fakes import FakeLoop


class Owner:
    """A peer that notes what it is asked, and the share that asks it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Callable[..., None]]] = []
        self.loop = FakeLoop()
        self.peer: Any = SimpleNamespace(
            address="b:1", is_up=True, channels={}, on_up={}, on_down={}, send=self._send
        )
        self.expelled: list[HeadraceError] = []
        node: Any = SimpleNamespace(
            loop=self.loop,
            peers=SimpleNamespace(channel_numbers=itertools.count(1)),
            expel=lambda subscription, member, error: self.expelled.append(error),
        )
        subscription: Any = SimpleNamespace(name="billing", pattern="orders")
        member: Any = SimpleNamespace(name="worker", auto_ack=False)
        self.share = ForeignShare(node, subscription, member, self.peer, 10)

    def _send(self, type: int, properties: object, body: bytes, answer: Any) -> None:
        self.asked.append((type, answer))

    def joins(self) -> int:
        return sum(type == Type.SUBSCRIBE for type, _ in self.asked)


def test_a_new_connection_is_joined_once() -> None:
    """Also if the share was about to try again on the connection before it."""
    owner = Owner()
    owner.asked[0][1](None, SubscriptionNotFound("not yet"))
    owner.peer.on_down[owner.share]()
    owner.peer.on_up[owner.share]()
    assert owner.joins() == 2
    owner.asked[1][1](Frame(Type.ACK, 0, {}), None)
    owner.loop.advance(1.0)
    assert owner.joins() == 2


def test_an_owner_that_refuses_is_asked_less_and_less(caplog: pytest.LogCaptureFixture) -> None:
    """At first at once, because it may not have the subscription yet; then once a second, and the log says why."""
    owner = Owner()
    times = [owner.loop.time()]
    for number in range(12):
        owner.asked[-1][1](None, SubscriptionNotFound("not yet"))
        while owner.joins() < number + 2:
            owner.loop.advance(0.005)
        times.append(owner.loop.time())
    pauses = [round(after - before, 2) for before, after in itertools.pairwise(times)]
    assert pauses[:4] == pytest.approx([0.02, 0.04, 0.08, 0.16], abs=0.011)
    assert pauses[-2:] == pytest.approx([1.0, 1.0], abs=0.011)
    assert caplog.messages == ["node b:1 does not take a member of subscription billing: not yet"]
    assert not owner.expelled


def test_a_member_that_an_owner_has_no_room_for_is_told() -> None:
    """It is not tried again: the member ends with an error that says what to do."""
    owner = Owner()
    owner.asked[0][1](None, QueueFull("full", code="too_many_on_connection"))
    [error] = owner.expelled
    assert (error.code, error.retryable) == ("too_many_members", True)
    assert "node b:1" in error.message
    owner.loop.advance(60.0)
    assert owner.joins() == 1

"""What a node asks of the owner of a partition on behalf of a member. The test is the owner."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headrace.cluster.shares import ForeignShare
from headrace.errors import SubscriptionNotFound
from headrace.wire.binary import Frame, Type
from tests.fakes import FakeLoop


class Owner:
    """A peer that notes what it is asked, and the share that asks it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Callable[..., None]]] = []
        self.loop = FakeLoop()
        self.peer: Any = SimpleNamespace(
            is_up=True, channels={}, on_up={}, on_down={}, send=self._send
        )
        node: Any = SimpleNamespace(
            loop=self.loop, peers=SimpleNamespace(channel_numbers=itertools.count(1))
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

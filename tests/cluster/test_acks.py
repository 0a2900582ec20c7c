"""Acks that may be lost: which flush hears of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.acks import CONNECTIONS_MAX, AckLosses
from headrace.cluster.peers import Peer
from headrace.cluster.routing import Routing
from headrace.errors import OutcomeUnknown
from headrace.operations.catalog import OPERATIONS
from headrace.wire.binary import Frame
from tests.client.rig import run


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.open = {1: 50.0}
        """Connection -> when it was made."""
        connections: Any = lambda: [  # noqa: E731
            SimpleNamespace(number=number, since=since) for number, since in self.open.items()
        ]
        engine: Any = SimpleNamespace(connections=connections)
        self.losses = AckLosses(engine, lambda: self.now)

    def flush(self, connection: int = 1) -> bool:
        """Whether it says that all acks are stored."""
        self.now += 1
        try:
            self.losses.check(connection, self.now - 0.5)
        except OutcomeUnknown:
            return False
        return True


def test_a_flush_after_a_loss_says_so_once() -> None:
    rig = Rig()
    assert rig.flush()
    rig.losses.lost()
    rig.now += 1
    assert not rig.flush()
    assert rig.flush()


def test_every_connection_hears_of_it() -> None:
    """Also one that has not flushed yet; not one that was made afterwards."""
    rig = Rig()
    rig.open[2] = 60.0
    assert rig.flush(1)
    rig.losses.lost()
    rig.now += 1
    rig.open[3] = rig.now
    assert not rig.flush(2)
    assert not rig.flush(1)
    assert rig.flush(3)


def test_a_loss_while_a_flush_is_under_way_is_said() -> None:
    """It began before, and acks of the same time may be those."""
    rig = Rig()
    assert rig.flush()
    began = rig.now
    rig.now += 1
    rig.losses.lost()
    with pytest.raises(OutcomeUnknown):
        rig.losses.check(1, began)
    assert not rig.flush(), "acks between the two flushes may be lost, too"


def test_connections_that_are_closed_are_forgotten() -> None:
    rig = Rig()
    for number in range(2 * CONNECTIONS_MAX):
        rig.flush(number)
    assert len(rig.losses._flushed) <= CONNECTIONS_MAX + 1


class Wire:
    def __init__(self) -> None:
        self.answers: list[Any] = []

    def send(self, type: int, properties: Any, body: bytes, answer: Any) -> None:
        self.answers.append(answer)


def peer() -> tuple[Peer, Wire, list[bool]]:
    wire, lost = Wire(), list[bool]()
    link: Any = SimpleNamespace(wire=wire, is_up=True)
    return Peer("b:1", link, lambda: lost.append(True)), wire, lost


@run
async def test_an_owner_that_refuses_acks_has_lost_them() -> None:
    """And one that takes them has not."""
    other, wire, lost = peer()
    other.settle(1, 0, 5)
    other.send_settlements()
    wire.answers[0](Frame(0, 0, {}))
    assert not lost
    other.settle(1, 6, 6)
    other.send_settlements()
    wire.answers[1](Frame(0, 0, {"stale": "1"}))
    assert lost


@run
async def test_a_broken_connection_loses_what_no_flush_has_covered() -> None:
    other, _, lost = peer()
    other.settle(1, 0, 5)
    other.send_settlements()
    other.acks_stored = other.acks_sent
    other._down()
    assert not lost
    other.settle(2, 0, 5)
    other._down()
    other._down()
    assert lost == [True]


@run
async def test_a_flush_does_not_wait_for_a_node_that_is_gone() -> None:
    """It has no acks of ours any more: those that were not stored are counted as lost already."""
    other, _, lost = peer()
    other.settle(1, 0, 5)
    routing = Routing(SimpleNamespace(losses=SimpleNamespace(lost=lost.append)))  # type: ignore[arg-type]
    asked: list[Peer] = []

    async def ask(peer: Peer, *_: Any) -> None:
        asked.append(peer)

    routing._ask = ask  # type: ignore[method-assign, assignment]
    administration: Any = None
    await routing._flush(other, administration, OPERATIONS["flush"], {})
    assert asked == [other]
    assert other.acks_stored == other.acks_sent
    other.link.is_up = False  # type: ignore[misc]
    await routing._flush(other, administration, OPERATIONS["flush"], {})
    assert asked == [other]
    assert not lost

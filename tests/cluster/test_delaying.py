"""Delayed messages on their way to a leader that goes away in between."""

import asyncio
import uuid
from typing import Any

import pytest

from headrace.cluster import delaying
from headrace.errors import (
    BrokerFailed,
    Closed,
    ConnectionLost,
    HeadraceError,
    OutcomeUnknown,
    QueueFull,
    RequestTimeout,
    StorageFailed,
)
from headrace.log.batch import parse
from headrace.log.columns import Columns
from headrace.wire.binary import Frame
from tests.client.rig import run

ID = uuid.UUID(int=1)
KEPT = Frame(0, 0, {"topic": "orders", "timestamp": "1", "id": str(ID)})
LOST = ConnectionLost("the connection broke")
AWAY = StorageFailed("Kafka is away; nothing was stored", code="kafka_unavailable")
MOVED = StorageFailed("not here", code="partition_moved")


class Leader:
    """A node, and the peer that it takes for the leader."""

    def __init__(self, *answers: Frame | HeadraceError, timeout: float = 10.0):
        self.loop, self.timeout = asyncio.get_running_loop(), timeout
        self.answers, self.ids = list(answers), list[Any]()

    async def leader(self) -> "Leader":
        return self

    async def ask(self, type: int, properties: Any, body: bytes, *, timeout: float) -> Frame:
        batch = parse(body)
        assert batch is not None
        self.ids += batch.columns().ids or [None]
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    async def delay(self) -> None:
        await delaying.delay(self, "orders", Columns([b"one"]), 5, None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delaying, "AGAIN_S", 0.001)


@run
async def test_it_is_sent_again_with_the_same_id() -> None:
    """Whatever the repetition is refused with meanwhile."""
    refusals = (MOVED, AWAY, QueueFull("too many"), Closed("it stops"))
    node = Leader(LOST, RequestTimeout("no answer"), *refusals, KEPT)
    await node.delay()
    assert len(node.ids) == 7
    assert len(set(node.ids)) == 1
    assert None not in node.ids


@run
async def test_a_refusal_is_definite_if_nothing_was_sent_before() -> None:
    node = Leader(MOVED, AWAY)
    with pytest.raises(StorageFailed) as caught:
        await node.delay()
    assert caught.value is AWAY


@run
async def test_a_leader_that_stops_is_no_error() -> None:
    await Leader(Closed("it stops"), BrokerFailed("it has failed"), KEPT).delay()


@run
async def test_what_was_sent_once_and_not_answered_is_unknown() -> None:
    with pytest.raises(OutcomeUnknown):
        await Leader(LOST, AWAY, timeout=0.01).delay()

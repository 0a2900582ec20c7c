"""Publishes on their way to an owner that answers late, refuses, or goes away in between."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.clustering import ClusterFigures
from headrace.cluster import forwarding
from headrace.cluster.forwarding import ForwardQueue
from headrace.errors import HeadraceError, OutcomeUnknown, StorageFailed
from headrace.log.batch import Batch, parse
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.wire.binary import Frame
from tests.client.rig import run, until

AWAY = StorageFailed("Kafka is away; nothing was stored", code="kafka_unavailable")
MAYBE = OutcomeUnknown("Kafka does not answer: this may be stored")
BROKE = None
Reply = tuple[Frame | None, HeadraceError | None]


class Owner:
    """A peer that answers each batch as it is told to, and is gone after that."""

    def __init__(self, replies: list[Reply]):
        self.replies, self.batches = replies, list[Batch]()
        self.on_up: dict[object, Callable[[], None]] = {}

    @property
    def is_up(self) -> bool:
        return bool(self.replies)

    def get(self, address: str) -> "Owner":
        return self

    def send(self, type: int, properties: Any, body: bytes, answer: Any) -> None:
        batch = parse(body)
        assert batch is not None
        self.batches.append(batch)
        asyncio.get_running_loop().call_soon(answer, *self.replies.pop(0))


class Forwarding:
    """A node and a partition that another one owns."""

    address, owned, owner, about = "a:1", False, "b:1/1", ("orders", 0)

    def __init__(self, replies: list[Reply], timeout: float = 30.0):
        self.loop, self.timeout = asyncio.get_running_loop(), timeout
        self.peers = Owner(replies)
        self.figures = ClusterFigures()
        self.replica = self
        self.queue = ForwardQueue(self, self)  # type: ignore[arg-type]

    async def publish(self, value: bytes) -> int:
        """Its offset, or its error."""
        done: asyncio.Future[Append] = self.loop.create_future()
        self.queue.put(Append(Columns([value]), None, done.set_result))
        entry = await asyncio.wait_for(done, 10)
        if entry.error is not None:
            raise entry.error
        return entry.first_offset

    @property
    def sequences(self) -> list[int]:
        return [batch.first_sequence for batch in self.peers.batches]


def stored(offset: int) -> Reply:
    return Frame(0, 0, {"offset": str(offset), "timestamp": "1"}), None


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "AGAIN_S", 0.001)


@run
async def test_a_refusal_of_the_repetition_is_not_the_end() -> None:
    """What may be stored is sent again, with the same number, until its owner knows."""
    for error in (BROKE, MAYBE):
        node = Forwarding([(None, error), (None, AWAY), (None, AWAY), stored(5), stored(6)])
        assert await node.publish(b"one") == 5
        assert await node.publish(b"two") == 6
        assert node.sequences == [0, 0, 0, 0, 1]


@run
async def test_a_refusal_is_definite_and_uses_no_number() -> None:
    """Nothing was stored, and the next one has the same number."""
    node = Forwarding([(None, AWAY), stored(5)])
    with pytest.raises(StorageFailed):
        await node.publish(b"one")
    assert await node.publish(b"two") == 5
    assert node.sequences == [0, 0]


@run
async def test_what_was_sent_once_is_not_refused_for_certain_when_it_is_given_up() -> None:
    """The owner is gone and nobody takes its place: it may have stored it before."""
    node = Forwarding([(None, BROKE)], timeout=0.02)
    with pytest.raises(OutcomeUnknown):
        await node.publish(b"one")


@run
async def test_what_was_sent_once_is_not_refused_for_certain_when_the_node_ends() -> None:
    node = Forwarding([(None, BROKE)])
    publish = asyncio.ensure_future(node.publish(b"one"))
    await until(lambda: bool(node.queue._burst) and node.queue._burst[0].doubtful)
    node.queue.fail(StorageFailed("the node was stopped; try again", code="no_owner"))
    with pytest.raises(OutcomeUnknown):
        await publish


@run
async def test_a_node_that_does_not_own_it_stores_nothing() -> None:
    """Nobody else takes it: the error is definite."""
    node = Forwarding([(None, StorageFailed("not here", code="partition_moved"))], timeout=0.02)
    with pytest.raises(StorageFailed) as caught:
        await node.publish(b"one")
    assert caught.value.code == "no_owner"

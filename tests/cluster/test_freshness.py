"""An owner makes sure that it still is one."""

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace.cluster.freshness import Freshness


class Followed(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


class OneSlot:
    """A node that serves slot 3. Kafka's end of its journal, and how far it was read, are set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loop = SimpleNamespace(time=lambda: self.now)
        self.session_s, self.timeout = 10.0, 0.2
        self.state = {3}
        self.replica = Followed(position=5, is_ours=True)
        self.journals = {3: SimpleNamespace(replica=self.replica)}
        self.end = 5
        self.lost: list[int] = []
        self.storage = SimpleNamespace(ends=lambda replicas: dict.fromkeys(replicas, self.end))
        self.tasks: list[Any] = []

    def run(self, work: Any) -> Any:
        self.tasks.append(asyncio.ensure_future(work))

    def lose(self, slot: int, why: str) -> None:
        self.lost.append(slot)
        self.state.discard(slot)


def made() -> tuple[OneSlot, Freshness]:
    node = OneSlot()
    return node, Freshness(node)  # type: ignore[arg-type]


def test_an_owner_that_slept_delivers_nothing_before_it_is_sure() -> None:
    """Half a session after it was last sure, it is in doubt; who reads waits until Kafka has said where the journal ends."""

    async def run() -> None:
        node, freshness = made()
        node.now += 4.9
        assert freshness.doubt() is None
        node.now += 10
        wait = freshness.doubt()
        assert wait is not None
        told: list[str] = []
        wait(lambda: told.append("read again"))
        node.end = 7  # there are records that it has not read
        confirming = asyncio.ensure_future(freshness.confirm())
        await asyncio.sleep(0.05)
        assert told == []
        node.replica.position = 7
        freshness.look()
        await confirming
        assert told == ["read again"]
        assert freshness.doubt() is None
        assert node.lost == []

    asyncio.run(run())


def test_an_owner_that_has_lost_its_slot_finds_out() -> None:
    """It reads the claim of another node in the journal, and lets the slot go before anybody reads."""

    async def run() -> None:
        node, freshness = made()
        node.replica.is_ours = False
        await freshness.confirm()
        assert node.lost == [3]

    asyncio.run(run())


def test_without_kafka_it_stays_in_doubt() -> None:
    """An answer that does not come says nothing."""

    async def run() -> None:
        node, freshness = made()

        def away(_replicas: Any) -> Any:
            raise TimeoutError

        node.storage.ends = away
        node.now += 10
        await freshness.confirm()
        assert freshness.doubt() is not None
        node.storage.ends = lambda replicas: dict.fromkeys(replicas, 5)
        await freshness.confirm()
        assert freshness.doubt() is None

    asyncio.run(run())

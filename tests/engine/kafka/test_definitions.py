"""What all nodes agree on, when two of them change it at the same time."""

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.engine.kafka.definitions import Definitions
from headrace.engine.kafka.records import key_of
from headrace.engine.kafka.rule import Claim, Stretch


class OnePartition:
    """Kafka's side: what is sent is read back in a later turn, with what another node sends after it."""

    node, timeout = "us/1", 5.0

    def __init__(self) -> None:
        self.definitions: Any = None
        self.records: list[tuple[bytes, bytes]] = []
        self.claims_after_stretches = 1

    def send(
        self, topic: str, number: int, key: bytes, value: bytes, *_: Callable[[], None] | int
    ) -> None:
        self.records.append((key, value))
        under_way = self.definitions.replica.seat.under_way
        if isinstance(under_way, Stretch) and self.claims_after_stretches:
            self.claims_after_stretches -= 1
            claim = Claim(under_way.epoch + 1, "another/1")
            self.records.append((key_of(claim, claim.node), b""))
        asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        """All in one turn, as a tail does."""
        replica = self.definitions.replica
        for at in range(replica.position, len(self.records)):
            replica.read(at, *self.records[at])


def test_a_change_that_counts_is_not_decided_again() -> None:
    """Another node has claimed before we looked: what we wrote before that is stored all the same."""

    async def run() -> None:
        link: Any = OnePartition()
        applied: list[bytes] = []
        definitions = link.definitions = Definitions(link, "defs", applied.append, list)
        definitions.begin()
        decided: list[int] = []

        def decide() -> list[bytes]:
            decided.append(1)
            return [b"a topic"]

        await definitions.change(decide)
        assert (applied, len(decided)) == ([b"a topic"], 1)
        await definitions.change(decide)  # this one has to claim first
        assert (applied, len(decided)) == ([b"a topic"] * 2, 2)

    asyncio.run(run())

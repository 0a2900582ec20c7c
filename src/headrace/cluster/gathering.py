"""One point in time of a whole cluster, for a backup: the state of all slots as one journal, and then the ends of all partitions.

    others: state of their slots ─┐
    leader: state of its slots ───┴─▶ one journal ──▶ what is in Kafka now is read ──▶ ends of all partitions
                 └──────────── the journal of slot 0 pauses ───────────────────────────┘

The node that leads gathers it. Every state is older than the ends. So whatever a state says is done is within the ends: a dead letter
whose message is acknowledged, a delayed message that was published. What was done after a state was taken is, for the copy, as it is
after a crash: it is done again, and what was stored already is recognised where it is recognised after a crash.

For delayed messages and staged commits that takes more, because a crash leaves one round and one decision in doubt, not many: the
journal of slot 0 writes nothing between its state and the ends, so no second round begins, and nothing is committed that the journal does
not say.

Each node numbers subscriptions and cursors by itself, so the joined journal numbers them anew.

Rejected: to hold all nodes still, because a slow one would hold up all clients; a marker in each partition (as Chandy and Lamport do),
because the states are in other partitions than the messages.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from headrace.broker.backups import Entries, Take
from headrace.broker.cursor import Cursor
from headrace.broker.restoring import definition
from headrace.broker.slots import LEADER
from headrace.broker.state import name_producer
from headrace.broker.subscription import Subscription
from headrace.cluster.agreed import Key
from headrace.errors import HeadraceError, StorageFailed
from headrace.log.journal import entries_in, frame
from headrace.model import INTERNAL_PREFIX
from headrace.wire.binary import Type

if TYPE_CHECKING:
    from headrace.cluster.node import Node

logger = logging.getLogger("headrace.cluster")
AGAIN_S = 0.25
PATIENCE = 2.0
"""How many times ``kafka_timeout`` slots may be on their way."""


class ClusterGathering:
    def __init__(self, node: Node):
        self._node = node

    # --- the node that leads ----------------------------------------------------------------------
    @asynccontextmanager
    async def point_in_time(self, take: Take, hold_s: float) -> AsyncIterator[Entries]:
        """Inside, the partitions end for this node where the copy does. The journal is made afterwards."""
        node = self._node
        await node.fresh()
        subscriptions = {each.key: each for each in node.engine.all_subscriptions()}
        states = await self._states(hold_s)
        resume = node.state.pause(LEADER)
        try:
            await node.freshness.all()
            yield lambda: self._joined(subscriptions, states, take)
        finally:
            resume()

    async def _joined(
        self, subscriptions: dict[Key, Subscription], states: list[list[bytes]], take: Take
    ) -> list[bytes]:
        node = self._node
        joined = JoinedJournal(subscriptions)
        found: list[bytes] = []

        def entries() -> Iterator[bytes]:
            for name, known in tuple(node.agreed.producers.items()):
                yield name_producer(name, *known)
            for key, each in subscriptions.items():
                if key in node.agreed.subscriptions or each.name.startswith(INTERNAL_PREFIX):
                    yield definition(each)
            for payloads in states:
                yield from joined.add(payloads)

        async for entry in node.engine.pace.each(entries()):
            take(len(entry) + 64)
            found.append(entry)
        return found

    async def _states(self, hold_s: float) -> list[list[bytes]]:
        """Of all slots; those of this node are of the turn in which this returns."""
        node = self._node
        deadline = node.loop.time() + PATIENCE * node.timeout
        while True:
            asked = [self._state_at(address, hold_s) for address in node.nodes()]
            others = await asyncio.gather(*asked)
            try:
                slots, mine = await node.state.gather()
            except StorageFailed as error:
                if error.code != "partition_moved":
                    raise
            else:
                served = sorted([*slots, *(slot for some, _ in others for slot in some)])
                if served == list(range(node.storage.slots)):
                    return [*(payloads for _, payloads in others), mine]
            if node.loop.time() > deadline:
                break
            await asyncio.sleep(AGAIN_S)
        raise StorageFailed(
            "slots are moving between the nodes, or some are not served ('headrace cluster'); try again",
            code="no_owner",
        )

    async def _state_at(self, address: str, hold_s: float) -> tuple[list[int], list[bytes]]:
        """Nothing, if the node cannot be reached or its slots are moving: then some slot is missing."""
        try:
            answer = await self._ask(address, "slot_states", hold_s)
        except HeadraceError as error:
            logger.info("%s does not tell its state for a backup: %s", address, error)
            return [], []
        return answer["slots"], await asyncio.to_thread(_unpacked, answer["entries"])

    async def _ask(self, address: str, operation: str, hold_s: float) -> Any:
        body = orjson.dumps({"op": operation, "hold": hold_s})
        peer = self._node.peers.get(address)
        frame = await peer.ask(Type.ADMIN, {"forwarded": "true"}, body, timeout=self._node.timeout)
        return orjson.loads(frame.body)

    def hold_elsewhere(self, hold_s: float) -> None:
        """Have the other nodes delete no messages for so long."""

        async def hold(address: str) -> None:
            try:
                await self._ask(address, "hold_retention", hold_s)
            except HeadraceError as error:
                logger.info("%s does not hold its retention for a backup: %s", address, error)

        for address in self._node.nodes():
            self._node.run(hold(address))

    # --- the others -------------------------------------------------------------------------------
    async def slot_states(self) -> dict[str, Any]:
        """The state of the slots of this node, for the one that leads."""
        slots, payloads = await self._node.state.gather()
        packed = await asyncio.to_thread(_packed, payloads)
        return {"slots": sorted(slots), "entries": packed}


def _packed(payloads: list[bytes]) -> str:
    return b64encode(zlib.compress(b"".join(map(frame, payloads)), 1)).decode()


def _unpacked(packed: str) -> list[bytes]:
    return entries_in(zlib.decompress(b64decode(packed)))[0]


class JoinedJournal:
    """Journals of several nodes as one, with numbers of its own."""

    def __init__(self, subscriptions: Mapping[Key, Subscription]):
        """``subscriptions``: those that it has, by their numbers at this node."""
        self._numbers = {key: each.number for key, each in subscriptions.items()}
        self._next = max(self._numbers.values(), default=0) + 1

    def add(self, payloads: Iterable[bytes]) -> Iterator[bytes]:
        """The entries of one node about these subscriptions, and about commits."""
        subscriptions: dict[int, int] = {}
        cursors: dict[int, int] = {}
        for payload in payloads:
            kind = payload[:1]
            if kind == b"T":
                yield payload
            elif kind == b"C":
                number = cursors.get(Cursor.number_of(payload))
                if number is not None:
                    yield Cursor.renumbered(payload, number)
            elif kind in b"SKM":
                item: dict[str, Any] = orjson.loads(payload[1:])
                if kind == b"S":
                    number = self._numbers.get((item["topic"], item["name"]))
                    if number is not None:
                        subscriptions[item["id"]] = number
                elif kind == b"K" and item["subscription"] in subscriptions:
                    cursors[item["cursor"]] = self._next
                    item["subscription"] = subscriptions[item["subscription"]]
                    item["cursor"] = self._next
                    self._next += 1
                    yield kind + orjson.dumps(item)
                elif kind == b"M" and item["cursor"] in cursors:
                    item["cursor"] = cursors[item["cursor"]]
                    yield kind + orjson.dumps(item)

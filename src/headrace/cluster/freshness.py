"""Reading what any node has answered before, and being sure of what one owns.

*Fresh* (``of``): a request that reads waits until this node has read what Kafka had when the request came: see the head of ``node.py``. This holds
for partitions that the node owns, too: it may have lost one and not know it yet.

*Sure* (``confirm``): nobody asks for a delivery, so an owner asks once a second whether it still is the owner. Whoever takes a slot claims the
slot's journal first, so it is enough to read the journals of its slots up to where Kafka says that they end. An owner that has not been sure for half of
the session timeout delivers and reads nothing until it is (``doubt``). Another node gets its slots after the whole session timeout
at the earliest, so a node that slept delivers nothing that its successor delivers, too.

Rejected: heartbeats that an idle owner writes and reads back. To ask where a journal ends says the same, and writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from headrace.engine.kafka.replica import Replica
from headrace.errors import StorageFailed

if TYPE_CHECKING:
    from headrace.cluster.node import Node

DOUBT_SHARE = 0.5
"""Of the session timeout: for so long an owner may be sure without asking again."""


class Freshness:
    def __init__(self, node: Node):
        self._node = node
        self._next: set[Replica] = set()
        """Of the next question."""
        self._round: asyncio.Future[dict[Replica, int]] | None = None
        self._asking = False
        self._waiting: dict[asyncio.Future[None], tuple[Replica, int]] = {}
        self._sure = node.loop.time()
        """When it was last known that nobody else had what this node serves."""
        self._doubting: list[Callable[[], None]] = []

    def of(self, topics: tuple[str, ...]) -> Awaitable[None]:
        """Wait for the definitions and the partitions of topics."""
        node = self._node
        # Also if this node was the last to change them: another one may have done so since.
        replicas = [node.definitions.replica]
        # Also partitions that this node owns: it may have slept, and another one owns them since.
        for name in topics:
            topic = node.engine.topics.get(name)
            if topic is not None:
                replicas += [p.log.replica for p in topic.partitions]  # type: ignore[attr-defined]
        return self._wait(replicas)

    async def all(self) -> None:
        await self._wait([log.replica for log in self._node.logs() if not log.owned])

    # --- what this node owns ----------------------------------------------------------------------
    def doubt(self) -> Callable[[Callable[[], None]], None] | None:
        """None: this node is sure. Else whoever wants to read gives a callback, and tries again when that is called."""
        node = self._node
        if node.loop.time() - self._sure <= DOUBT_SHARE * node.session_s:
            return None
        return self._doubting.append

    async def confirm(self) -> None:
        """Find out whether this node still owns its slots."""
        node = self._node
        asked = node.loop.time()
        journals = {slot: node.journals[slot] for slot in node.state}
        try:
            await self._wait([journal.replica for journal in journals.values()])
        except StorageFailed:
            return  # a later one, which does not wait for this one, may succeed
        for slot, journal in journals.items():
            is_current = slot in node.state and node.journals[slot] is journal
            if is_current and not journal.replica.is_ours:
                node.lose(slot, "its state")
        self._sure = max(self._sure, asked)
        waiting, self._doubting = self._doubting, []
        for told in waiting:
            told()

    async def _wait(self, replicas: Iterable[Replica]) -> None:
        loop = asyncio.get_running_loop()
        replicas = list(replicas)
        if not replicas:
            return
        if self._round is None:
            self._round = loop.create_future()
        asked = self._round
        self._next.update(replicas)
        if not self._asking:
            self._asking = True
            self._node.run(self._ask())
        try:
            async with asyncio.timeout(self._node.timeout):
                ends = await asyncio.shield(asked)
                for replica in replicas:
                    if replica.position < ends[replica]:
                        read: asyncio.Future[None] = loop.create_future()
                        self._waiting[read] = replica, ends[replica]
                        try:
                            await read
                        finally:
                            self._waiting.pop(read, None)
        except (TimeoutError, KafkaException):
            raise StorageFailed(
                f"Kafka has not answered for {self._node.timeout:g} seconds; try again",
                code="kafka_unavailable",
            ) from None

    async def _ask(self) -> None:
        while self._round is not None:
            asked, self._round = self._round, None
            replicas, self._next = list(self._next), set()
            try:
                ends = await asyncio.to_thread(self._node.storage.ends, replicas)
            except BaseException as error:
                if not asked.done():
                    asked.set_exception(
                        error if isinstance(error, KafkaException) else TimeoutError(str(error))
                    )
                    asked.exception()
                if not isinstance(error, Exception):
                    raise
            else:
                asked.set_result(ends)
        self._asking = False

    def look(self) -> None:
        """Some records were read."""
        for read, (replica, end) in tuple(self._waiting.items()):
            if replica.position >= end and not read.done():
                read.set_result(None)

"""What jobs of many tasks ask of a broker over the network: the part of ``AsyncClient`` for them.

All of it may be asked again when the connection breaks. A batch that was staged twice costs room until
it expires, and is not in any commit; a commit, an abort and an advance change nothing the second time.
What the broker cannot do at the moment (no room, too much under way) is tried again, too, for as long
as a publish would be.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from headrace import limits
from headrace.client.administration import Administration, position_text
from headrace.errors import BrokerFailed, Closed, HeadraceError
from headrace.log.batch import Batch
from headrace.model import Receipt, check_seconds
from headrace.wire.binary import Frame, Type

Result = TypeVar("Result")
RETRY_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
WAIT_S_MAX = 30.0
"""Of one request; who waits longer asks again."""


class Jobs(Administration):
    @property
    def patience(self) -> float:
        """Seconds for which what can succeed later is tried again."""
        raise NotImplementedError

    async def _patiently(
        self, ask: Callable[[float], Awaitable[Result]], seconds: float | None = None
    ) -> Result:
        """Ask, again and again while that may help. ``ask`` gets the seconds that are left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.patience if seconds is None else seconds)
        tries = 0
        while True:
            try:
                return await ask(max(deadline - loop.time(), 0.001))
            except HeadraceError as error:
                pause = RETRY_S[min(tries, len(RETRY_S) - 1)]
                # One that goes down is, as a rule, followed by one that comes up.
                going_down = isinstance(error, (Closed, BrokerFailed)) and not self.link.is_closed
                if not (error.retryable or going_down) or loop.time() + pause >= deadline:
                    raise
            tries += 1
            await asyncio.sleep(pause)

    # --- exactly once into topics -------------------------------------------------------------
    async def stage(
        self,
        topic: str,
        batch: Batch,
        *,
        partition: int | None = None,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> str:
        """Store a batch durably but out of sight; returns the piece's id, for ``commit_staged``.

        The whole batch goes to one partition: the one named, or else the topic's next in turn,
        whatever keys its records have. Who wants records of a key together sorts them into batches
        by partition first.

        With the ``name`` and ``number`` of the commit that it is meant for, it is dropped once that
        or a later one is done without it; else it stays for a day, and all that is staged after it.
        ``delayed``: the times of the batch say when each record is to be published, from its commit
        on.
        """
        more = {} if name is None else {"name": name, "number": str(number)}
        if delayed:
            more["delayed"] = "true"
        frame = await self._send(Type.STAGE, topic, batch, partition, more)
        return frame.properties["piece"]

    async def publish_batch(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Receipt:
        """Store a whole batch, at least once: sent again if the connection breaks before the answer.

        Without a partition, records that have a key go where it belongs; the receipt is the first
        one's.
        """
        return receipt_of(await self._send(Type.PUBLISH_BATCH, topic, batch, partition))

    async def _send(
        self,
        type: int,
        topic: str,
        batch: Batch,
        partition: int | None,
        more: Mapping[str, str] | None = None,
    ) -> Frame:
        properties = {"topic": topic, **(more or {})}
        if partition is not None:
            properties["partition"] = str(partition)
        raw = batch.raw()

        async def when_there_is_room() -> Frame:
            wire = await self.link.ready()
            await wire.writable()
            return await self.link.ask(type, properties, raw, again=True, timeout=self.patience)

        async def ask(seconds: float) -> Frame:
            return await self.link.within_time(when_there_is_room(), seconds)

        return await self._patiently(ask)

    async def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        """Show all pieces at once, under a name and a number that goes up with each commit.

        The same number again changes nothing: then this returns False, and it also may when the
        connection broke and the question had to be asked again.
        """

        async def ask(seconds: float) -> bool:
            answer = await self.admin(
                "commit_staged", timeout=seconds, name=name, number=number, pieces=list(pieces)
            )
            return bool(answer["committed"])

        return await self._patiently(ask)

    async def abort_staged(self, pieces: list[str]) -> None:
        """Give pieces up that will not be committed. Those that were committed are not touched."""
        await self._ask("abort_staged", pieces=list(pieces))

    async def _ask(self, operation: str, *, seconds: float = 0.0, **arguments: Any) -> Any:
        """An operation that may be asked again, also of a broker that is just going down."""

        async def ask(left: float) -> Any:
            return await self.admin(operation, timeout=left, **arguments)

        return await self._patiently(ask, self.link.request_timeout + seconds)

    # --- where partitions stand -----------------------------------------------------------------
    async def positions(
        self, topics: str | list[str], *, at: int | datetime | None = None
    ) -> dict[str, list[dict[str, int]]]:
        """Start, end and bytes of every partition of the topics (names, wildcards).

        With ``at``, a time (a datetime or milliseconds), also the ``offset`` of the first record at
        or after it; the end if there is none.
        """
        when = at if at is None or isinstance(at, int) else position_text(at)
        found: dict[str, list[dict[str, int]]] = await self._ask(
            "positions", topics=topics, at=when
        )
        return found

    async def wait_for(
        self,
        positions: Mapping[str, Mapping[int, int]],
        *,
        topics: str | list[str] | None = None,
        timeout: float,
    ) -> bool:
        """Wait until one of the partitions has an end beyond the given offset.

        Or until a topic that ``topics`` stand for has a partition that is not in ``positions``.
        False: the time was up.
        """
        check_seconds("timeout", timeout, limits.DELAY_S_MAX)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            wait = min(max(deadline - loop.time(), 0.0), WAIT_S_MAX)
            answer = await self._ask(
                "wait_for", seconds=wait, positions=_as_json(positions), topics=topics, wait=wait
            )
            if answer["news"]:
                return True
            if loop.time() >= deadline:
                return False

    async def advance(
        self, name: str, positions: Mapping[str, Mapping[int, int]], *, topic: str | None = None
    ) -> None:
        """Everything before these offsets is done for the subscription; it never moves back."""
        await self._ask("advance", subscription=name, positions=_as_json(positions), topic=topic)


def _as_json(positions: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    return {
        topic: {str(number): offset for number, offset in some.items()}
        for topic, some in positions.items()
    }


def receipt_of(frame: Frame) -> Receipt:
    properties = frame.properties
    return Receipt(
        properties["topic"],
        int(properties.get("partition", "-1")),
        int(properties.get("offset", "-1")),
        int(properties["timestamp"]),
        int(properties.get("count", "1")),
        properties.get("duplicate") == "true",
        uuid.UUID(properties["id"]).bytes,
    )

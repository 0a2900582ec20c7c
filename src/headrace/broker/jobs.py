"""What jobs of many tasks ask of the broker in this process: the part of ``AsyncBroker`` for them.

Exactly once into topics: tasks ``stage`` batches, which nobody sees, and the job's driver commits them
all in one step (``staging.py``). Out of topics: ``positions`` of many partitions in one call, a wait for
news in any of them, and ``advance``, which says how far the job has come (``positions.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

from headrace import limits
from headrace.broker import positions as places
from headrace.broker.engine import Engine
from headrace.broker.staged_commit import unstamped
from headrace.errors import InvalidArgument
from headrace.log.batch import Batch, check_columns
from headrace.log.interface import completed
from headrace.model import check_seconds, check_subscription_name


class Jobs:
    @property
    def engine(self) -> Engine:
        raise NotImplementedError

    _done: Callable[..., Awaitable[None]]
    _value: Callable[..., Awaitable[Any]]

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
        """
        check_columns(batch, self.engine.max_message_size)
        piece: str = await self._value(
            self.engine.staging.stage,
            topic,
            partition,
            unstamped(batch),
            name=name,
            number=number,
            delayed=delayed,
        )
        return piece

    async def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        """Show all pieces at once, under a name and a number that goes up with each commit.

        The same number again changes nothing: then this returns False.
        """
        first: bool = await self._value(self.engine.staging.commit, name, number, pieces)
        return first

    async def abort_staged(self, pieces: list[str]) -> None:
        """Give pieces up that will not be committed. Those that were committed are not touched."""
        await self._done(self.engine.staging.abort, pieces)

    # --- where partitions stand -----------------------------------------------------------------
    async def positions(
        self, topics: str | list[str], *, at: int | datetime | None = None
    ) -> dict[str, list[dict[str, int]]]:
        """Start, end and bytes of every partition of the topics (names, wildcards).

        With ``at``, a time (a datetime or milliseconds), also the ``offset`` of the first record at
        or after it; the end if there is none.
        """
        at_ms = time_ms(at)
        return await completed(lambda: places.describe(self.engine, topics, at_ms))

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
        seconds = check_seconds("timeout", timeout, limits.DELAY_S_MAX)
        return await places.wait_for(self.engine, positions, topics, seconds)

    async def advance(
        self, name: str, positions: Mapping[str, Mapping[int, int]], *, topic: str | None = None
    ) -> None:
        """Everything before these offsets is done for the subscription; it never moves back."""
        check_subscription_name(name)
        subscription = self.engine.subscription(name, topic)
        await self._done(places.advance, self.engine, subscription, positions)


def time_ms(at: int | datetime | None) -> int | None:
    if isinstance(at, datetime):
        try:
            return round(at.timestamp() * 1000)
        except (OverflowError, OSError, ValueError):
            at = -1
    if at is not None and (type(at) is not int or at < 0):
        raise InvalidArgument(
            "at is a time: a datetime, or milliseconds since 1970", code="invalid_offset"
        )
    return at

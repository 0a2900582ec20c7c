"""Administration over the wire: topics, subscriptions, dead letters, delayed messages, by name.

Everything here is one ``ADMIN`` request with a JSON answer. What may be done twice without harm is
asked again when the connection breaks; the rest is then :class:`OutcomeUnknown`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from headrace.client.link import ConnectionLost, Link
from headrace.errors import InvalidArgument, OutcomeUnknown
from headrace.model import DeadLetter, Message, Scheduled
from headrace.wire import documents
from headrace.wire.binary import Type

Start = str | int | datetime


def position_text(start: Start) -> str:
    """A position as it travels: a time is ``@`` and milliseconds."""
    if isinstance(start, datetime):
        return f"@{round(start.timestamp() * 1000)}"
    return str(start)


class Administration:
    """The part of a client that asks and is told, one request at a time."""

    @property
    def link(self) -> Link:
        raise NotImplementedError

    async def admin(
        self,
        operation: str,
        *,
        again: bool = True,
        timeout: float | None = None,
        **arguments: Any,
    ) -> Any:
        """An administrative operation by name; the result is JSON."""
        request = {"op": operation, **{k: v for k, v in arguments.items() if v is not None}}
        try:
            body = orjson.dumps(request)
        except TypeError as error:
            raise InvalidArgument(f"{operation} takes texts and numbers: {error}") from None
        try:
            frame = await self.link.ask(Type.ADMIN, {}, body, again=again, timeout=timeout)
        except ConnectionLost:
            raise OutcomeUnknown(
                f"the connection broke during {operation}: it may or may not have been done"
            ) from None
        return orjson.loads(frame.body)

    # --- topics -----------------------------------------------------------------------------
    async def create_topic(self, name: str, **settings: Any) -> None:
        """Make a topic. One that exists with these settings is fine."""
        await self.admin("create_topic", topic=name, settings=settings)

    async def change_topic(self, name: str, **changes: Any) -> None:
        await self.admin("change_topic", topic=name, settings=changes)

    async def delete_topic(self, name: str) -> None:
        await self.admin("delete_topic", again=False, topic=name)

    async def topics(self) -> list[str]:
        return [stats["topic"] for stats in await self.admin("topics")]

    async def topic_stats(self, name: str) -> dict[str, Any]:
        stats: dict[str, Any] = await self.admin("topic", topic=name)
        return stats

    async def find(self, message_id: uuid.UUID | str) -> Message:
        return documents.to_message(await self.admin("find", id=str(message_id)))

    # --- subscriptions ------------------------------------------------------------------------
    async def create_subscription(
        self, name: str, topic: str, *, start: Start = "earliest", **settings: Any
    ) -> None:
        """Make a subscription, or change the settings given of one that is there."""
        await self.admin(
            "create_subscription",
            subscription=name,
            topic=topic,
            start=position_text(start),
            settings=settings,
        )

    async def delete_subscription(self, name: str, topic: str | None = None) -> None:
        await self.admin("delete_subscription", again=False, subscription=name, topic=topic)

    async def subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        stats: list[dict[str, Any]] = await self.admin("subscriptions", topic=topic)
        return stats

    async def subscription_stats(self, name: str, topic: str | None = None) -> dict[str, Any]:
        stats: dict[str, Any] = await self.admin("subscription", subscription=name, topic=topic)
        return stats

    async def seek(
        self, name: str, to: Start, *, topic: str | None = None, partition: int | None = None
    ) -> None:
        """Replay a subscription from ``earliest``, ``latest``, an offset or a time on."""
        await self.admin(
            "seek", subscription=name, to=position_text(to), topic=topic, partition=partition
        )

    # --- dead letters and delayed messages ------------------------------------------------------
    async def dead_letters(
        self, subscription: str, *, after: int = -1, limit: int = 100
    ) -> list[DeadLetter]:
        """Messages that the subscription gave up, oldest first."""
        found = await self.admin(
            "dead_letters", subscription=subscription, after=after, limit=limit
        )
        return [documents.to_letter(letter) for letter in found]

    async def redrive(
        self,
        subscription: str,
        *,
        offsets: list[int] | None = None,
        reason: str | None = None,
        topic: str | None = None,
        limit: int | None = None,
        rate: float | None = None,
        to: str = "subscription",
    ) -> int:
        """Publish dead letters back to their origin; returns how many."""
        result = await self.admin(
            "redrive",
            again=False,
            subscription=subscription,
            offsets=offsets,
            reason=reason,
            topic=topic,
            limit=limit,
            rate=rate,
            to=to,
        )
        count: int = result["redriven"]
        return count

    async def edit_dead_letter(
        self,
        subscription: str,
        offset: int,
        *,
        value: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Correct a dead letter before it is redriven; returns its new offset."""
        result = await self.admin(
            "edit_dead_letter",
            again=False,
            subscription=subscription,
            offset=offset,
            value=None if value is None else documents.pack(value),
            headers=None if headers is None else dict(headers),
        )
        new: int = result["offset"]
        return new

    async def purge_dead_letters(self, subscription: str, offsets: list[int] | None = None) -> int:
        """Give dead letters up for good; returns how many."""
        result = await self.admin(
            "purge_dead_letters", again=False, subscription=subscription, offsets=offsets
        )
        count: int = result["purged"]
        return count

    async def scheduled(self, topic: str | None = None, *, limit: int = 1000) -> list[Scheduled]:
        """Messages that wait for their time, soonest first."""
        found = await self.admin("scheduled", topic=topic, limit=limit)
        return [documents.to_scheduled(item) for item in found]

    async def cancel(self, message_id: uuid.UUID | str) -> None:
        """A delayed message will not be published."""
        await self.admin("cancel", again=False, id=str(message_id))

    # --- pipelines --------------------------------------------------------------------------
    async def report_pipeline(self, name: str, report: dict[str, Any]) -> dict[str, Any]:
        """How a running pipeline gets on; the answer says whether it is to ``stop``."""
        answer: dict[str, Any] = await self.admin("report_pipeline", pipeline=name, report=report)
        return answer

    async def pipelines(self) -> list[dict[str, Any]]:
        """The last report of each, and whether it is ``stale``."""
        found: list[dict[str, Any]] = await self.admin("pipelines")
        return found

    async def stop_pipeline(self, name: str) -> None:
        """Ask a pipeline to stop; it hears of it with its next report."""
        await self.admin("stop_pipeline", pipeline=name)

    async def forget_pipeline(self, name: str) -> None:
        """Drop one that has ended from the list."""
        await self.admin("forget_pipeline", again=False, pipeline=name)

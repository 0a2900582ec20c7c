"""Administration by name: one table for every protocol that is not a verb of its own.

An operation takes a JSON object and gives one. ``ADMIN`` frames, text verbs and HTTP call the same
ones, so that a topic is created, described or deleted with the same words everywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from headrace import limits
from headrace.broker.aio import AsyncBroker, split_start
from headrace.errors import InvalidArgument
from headrace.log.interface import completed
from headrace.model import (
    DeadLetter,
    SubscriptionSettings,
    TopicSettings,
    check_headers,
    check_seconds,
    check_subscription_name,
    check_topic_name,
)
from headrace.wire import documents

_REQUIRED = object()
WAIT_S_MAX = 60.0
LETTERS_MAX = 1_000
LETTER_BYTES_MAX = 16 << 20
"""Of one listing of dead letters; ``after`` asks for the next."""


class Arguments:
    """The arguments of one call: taken by name and type, and none left over."""

    def __init__(self, operation: str, values: dict[str, Any]):
        self._operation = operation
        self._values = dict(values)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        value = self._values.pop(name, None)
        if value is None:
            if default is _REQUIRED:
                raise InvalidArgument(f"{self._operation} needs {name!r}", code="missing_argument")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            raise InvalidArgument(f"{name} cannot be {value!r}", code="invalid_argument")
        return value

    def position(self, name: str, default: Any = _REQUIRED) -> Any:
        """``earliest``, ``latest``, an offset, or a time in ISO 8601 or as ``@<ms>``."""
        value = self.take(name, (str, int), default)
        return parse_position(value)

    def subscription(self) -> str:
        """The name of one that is not the broker's own."""
        return check_subscription_name(self.take("subscription", str))

    def settings(self, kind: type[TopicSettings] | type[SubscriptionSettings]) -> dict[str, Any]:
        """Settings by name; a name that is none of them is refused before it becomes an argument."""
        values: dict[str, Any] = self.take("settings", dict, {})
        kind.of(values)
        return values

    def offsets(self, name: str) -> list[int] | None:
        values: list[Any] | None = self.take(name, list, None)
        if values is not None and not all(type(value) is int for value in values):
            raise InvalidArgument(f"{name} is a list of offsets", code="invalid_argument")
        return values

    def positions(self) -> dict[str, dict[int, int]]:
        """``{topic: {partition: offset}}``; JSON has texts for the partitions' numbers."""
        found: dict[str, dict[int, int]] = {}
        for topic, some in self.take("positions", dict).items():
            if not isinstance(some, dict):
                raise InvalidArgument(
                    "positions are {topic: {partition: offset}}", code="invalid_argument"
                )
            found[topic] = {number_of(number, "a partition"): o for number, o in some.items()}
        return found

    def pieces(self) -> list[Any]:
        pieces: list[Any] = self.take("pieces", list)
        return pieces

    def end(self) -> None:
        if self._values:
            raise InvalidArgument(
                f"{self._operation} does not know {', '.join(sorted(self._values))}",
                code="unknown_argument",
            )


def number_of(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise InvalidArgument(f"{name} is a number, not {text[:40]!r}", code="invalid_argument")
    return int(text)


def parse_position(value: Any) -> Any:
    if isinstance(value, str) and value not in ("earliest", "latest"):
        if value.isascii() and value.isdigit() and len(value) <= 20:
            return int(value)
        try:
            if value.startswith("@") and len(value) <= 20:
                return datetime.fromtimestamp(int(value[1:]) / 1000).astimezone()
            return datetime.fromisoformat(value).astimezone()
        except (ValueError, OverflowError, OSError):
            raise InvalidArgument(
                f"{value[:60]!r} is not a position: it is 'earliest', 'latest', an offset, a time such "
                "as 2026-01-31T12:00:00Z, or @ and milliseconds since 1970",
                code="invalid_offset",
            ) from None
    return value


class Operations:
    def __init__(self, broker: AsyncBroker):
        self.broker = broker

    async def call(self, name: object, arguments: object) -> Any:
        if not isinstance(name, str) or name not in TABLE:
            raise InvalidArgument(
                f"there is no operation {name!r}; there are {', '.join(sorted(TABLE))}",
                code="unknown_operation",
            )
        if not isinstance(arguments, dict):
            raise InvalidArgument("the arguments are a JSON object", code="invalid_argument")
        taken = Arguments(name, arguments)
        return await TABLE[name](self, taken)

    # --- topics -----------------------------------------------------------------------------
    async def create_topic(self, args: Arguments) -> Any:
        topic, settings = args.take("topic", str), args.settings(TopicSettings)
        args.end()
        await self.broker.create_topic(topic, **settings)
        return await self.broker.topic_stats(topic)

    async def change_topic(self, args: Arguments) -> Any:
        topic, settings = check_topic_name(args.take("topic", str)), args.settings(TopicSettings)
        args.end()
        await self.broker.change_topic(topic, **settings)
        return await self.broker.topic_stats(topic)

    async def delete_topic(self, args: Arguments) -> Any:
        topic = args.take("topic", str)
        args.end()
        await self.broker.delete_topic(topic)
        return {"deleted": topic}

    async def topics(self, args: Arguments) -> Any:
        args.end()
        return [await self.broker.topic_stats(name) for name in await self.broker.topics()]

    async def topic(self, args: Arguments) -> Any:
        topic = args.take("topic", str)
        create = args.take("create", bool, False)
        args.end()
        if create:
            self.broker.engine.topic_for_publish(topic)
        return await self.broker.topic_stats(topic)

    async def offset_at(self, args: Arguments) -> Any:
        topic, partition = args.take("topic", str), args.take("partition", int, 0)
        where = args.position("at")
        args.end()
        position, time_ms = split_start(where)
        engine = self.broker.engine
        place = engine.partition(topic, partition)
        offset = await completed(lambda: engine.resolve(place, position, time_ms=time_ms))
        return {"offset": offset}

    async def find(self, args: Arguments) -> Any:
        message_id = args.take("id", str)
        args.end()
        return documents.message(await self.broker.find(message_id))

    # --- subscriptions ------------------------------------------------------------------------
    async def create_subscription(self, args: Arguments) -> Any:
        name, topic = args.take("subscription", str), args.take("topic", str)
        start, settings = args.position("start", "earliest"), args.settings(SubscriptionSettings)
        args.end()
        await self.broker.create_subscription(name, topic, start=start, **settings)
        return await self.broker.subscription_stats(name, topic)

    async def delete_subscription(self, args: Arguments) -> Any:
        name, topic = args.subscription(), args.take("topic", str, None)
        args.end()
        await self.broker.delete_subscription(name, topic)
        return {"deleted": name}

    async def subscriptions(self, args: Arguments) -> Any:
        topic = args.take("topic", str, None)
        args.end()
        return await self.broker.subscriptions(topic)

    async def subscription(self, args: Arguments) -> Any:
        name, topic = args.subscription(), args.take("topic", str, None)
        args.end()
        return await self.broker.subscription_stats(name, topic)

    async def seek(self, args: Arguments) -> Any:
        name, topic = args.subscription(), args.take("topic", str, None)
        to, partition = args.position("to"), args.take("partition", int, None)
        args.end()
        await self.broker.seek(name, to, topic=topic, partition=partition)
        if topic is not None and self.broker.engine.subscription_or_none(name, topic) is None:
            topic = None  # one of those that its pattern stands for
        return await self.broker.subscription_stats(name, topic)

    async def advance(self, args: Arguments) -> Any:
        name, topic = args.subscription(), args.take("topic", str, None)
        positions = args.positions()
        args.end()
        await self.broker.advance(name, positions, topic=topic)
        return {"advanced": name}

    # --- jobs of many tasks -------------------------------------------------------------------
    async def positions(self, args: Arguments) -> Any:
        topics, at = args.take("topics", (str, list)), args.take("at", (str, int), None)
        args.end()
        if isinstance(at, str):
            at = parse_position(at)
        return await self.broker.positions(topics, at=at)

    async def wait_for(self, args: Arguments) -> Any:
        positions, topics = args.positions(), args.take("topics", (str, list), None)
        wait = args.take("wait", (int, float))
        args.end()
        seconds = min(check_seconds("wait", wait, limits.DELAY_S_MAX), WAIT_S_MAX)
        return {"news": await self.broker.wait_for(positions, topics=topics, timeout=seconds)}

    async def commit_staged(self, args: Arguments) -> Any:
        name, number, pieces = args.take("name", str), args.take("number", int), args.pieces()
        args.end()
        return {"committed": await self.broker.commit_staged(name, number, pieces)}

    async def abort_staged(self, args: Arguments) -> Any:
        pieces = args.pieces()
        args.end()
        await self.broker.abort_staged(pieces)
        return {"aborted": len(pieces)}

    # --- dead letters -----------------------------------------------------------------------
    async def dead_letter_topics(self, args: Arguments) -> Any:
        args.end()
        letters = self.broker.engine.dead_letters.topics()
        return [{"topic": topic, "letters": count} for topic, count in letters]

    async def dead_letters(self, args: Arguments) -> Any:
        name = args.take("subscription", str)
        after, limit = args.take("after", int, -1), args.take("limit", int, 100)
        args.end()
        found = await self.broker.dead_letters(name, after=after, limit=min(limit, LETTERS_MAX))
        return [documents.letter(letter) for letter in _as_many_as_fit(found)]

    async def dead_letter(self, args: Arguments) -> Any:
        name, offset = args.take("subscription", str), args.take("offset", int)
        args.end()
        letters = self.broker.engine.dead_letters
        return documents.letter(await completed(lambda: letters.show(name, offset)))

    async def redrive(self, args: Arguments) -> Any:
        name = args.take("subscription", str)
        offsets, limit = args.offsets("offsets"), args.take("limit", int, None)
        rate, to = args.take("rate", (int, float), None), args.take("to", str, "subscription")
        where = _letter_filter(args.take("reason", str, None), args.take("topic", str, None))
        args.end()
        count = await self.broker.redrive(
            name, offsets=offsets, where=where, limit=limit, rate=rate, to=to
        )
        return {"redriven": count}

    async def edit_dead_letter(self, args: Arguments) -> Any:
        name, offset = args.take("subscription", str), args.take("offset", int)
        value, headers = args.take("value", dict, None), args.take("headers", dict, None)
        args.end()
        raw = None if value is None else _unpack(value)
        if headers is not None:
            check_headers(headers)
        new = await self.broker.edit_dead_letter(name, offset, value=raw, headers=headers)
        return {"offset": new}

    async def purge_dead_letters(self, args: Arguments) -> Any:
        name, offsets = args.take("subscription", str), args.offsets("offsets")
        args.end()
        return {"purged": await self.broker.purge_dead_letters(name, offsets)}

    # --- delayed messages -------------------------------------------------------------------
    async def scheduled(self, args: Arguments) -> Any:
        topic, limit = args.take("topic", str, None), args.take("limit", int, 1000)
        args.end()
        return [documents.scheduled(s) for s in await self.broker.scheduled(topic, limit=limit)]

    async def cancel(self, args: Arguments) -> Any:
        message_id = args.take("id", str)
        args.end()
        await self.broker.cancel(message_id)
        return {"cancelled": message_id}

    # --- pipelines --------------------------------------------------------------------------
    async def report_pipeline(self, args: Arguments) -> Any:
        name, report = args.take("pipeline", str), args.take("report", dict)
        args.end()
        return await self.broker.report_pipeline(name, report)

    async def pipelines(self, args: Arguments) -> Any:
        args.end()
        return await self.broker.pipelines()

    async def pipeline(self, args: Arguments) -> Any:
        name = args.take("pipeline", str)
        args.end()
        return self.broker.engine.pipelines.show(name)

    async def stop_pipeline(self, args: Arguments) -> Any:
        name = args.take("pipeline", str)
        args.end()
        await self.broker.stop_pipeline(name)
        return self.broker.engine.pipelines.show(name)

    async def forget_pipeline(self, args: Arguments) -> Any:
        name = args.take("pipeline", str)
        args.end()
        await self.broker.forget_pipeline(name)
        return {"deleted": name}

    # --- the broker -------------------------------------------------------------------------
    async def producer(self, args: Arguments) -> Any:
        name = args.take("name", str, None)
        args.end()
        producer_id, epoch = await self.broker.producer(name)
        return {"id": str(producer_id), "epoch": epoch}

    async def flush(self, args: Arguments) -> Any:
        args.end()
        await self.broker.flush()
        return {}

    async def info(self, args: Arguments) -> Any:
        args.end()
        engine = self.broker.engine
        return {
            "server": "headrace",
            "topics": len(await self.broker.topics()),
            "subscriptions": len(engine.subscriptions()),
            "max_message_size": engine.max_message_size,
            "durable": engine.directory is not None,
            "time": engine.now_ms(),
        }


def _as_many_as_fit(letters: list[DeadLetter]) -> list[DeadLetter]:
    """So many that the answer is not too large for any protocol; one at least."""
    size = 0
    for count, letter in enumerate(letters):
        size += len(letter.message.value)
        if size > LETTER_BYTES_MAX and count:
            return letters[:count]
    return letters


def _unpack(document: dict[str, Any]) -> bytes:
    try:
        return documents.unpack(document)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InvalidArgument(
            'a value is {"data": "..."}, with "encoding": "base64" where it is no text',
            code="invalid_value",
        ) from None


def _letter_filter(reason: str | None, topic: str | None) -> Callable[[DeadLetter], bool] | None:
    if reason is None and topic is None:
        return None
    part = None if reason is None else reason.lower()

    def wanted(letter: DeadLetter) -> bool:
        return (part is None or part in letter.reason.lower()) and (
            topic is None or letter.message.topic == topic
        )

    return wanted


TABLE: dict[str, Callable[[Operations, Arguments], Awaitable[Any]]] = {
    name: getattr(Operations, name)
    for name in [
        "create_topic",
        "change_topic",
        "delete_topic",
        "topics",
        "topic",
        "offset_at",
        "find",
        "create_subscription",
        "delete_subscription",
        "subscriptions",
        "subscription",
        "seek",
        "advance",
        "positions",
        "wait_for",
        "commit_staged",
        "abort_staged",
        "dead_letter_topics",
        "dead_letters",
        "dead_letter",
        "redrive",
        "edit_dead_letter",
        "purge_dead_letters",
        "scheduled",
        "cancel",
        "report_pipeline",
        "pipelines",
        "pipeline",
        "stop_pipeline",
        "forget_pipeline",
        "producer",
        "flush",
        "info",
    ]
}

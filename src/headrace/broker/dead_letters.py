"""Dead letters: messages that a subscription gave up, kept in ``<subscription>.dlq``.

A dead letter is an ordinary record: the payload, key and headers as they were, plus headers that say
where it came from and why (``headrace-*`` below). What has been redriven, edited or purged is *done*
in a hidden subscription over that topic; what is listed is what is not done. So the list costs no
structure of its own, and retention keeps what nobody has looked at.

Rules:
- The dead letter is durable before its original is done. A crash in between may double it.
- Redriving publishes back to the origin, meant for the subscription that failed and for no other
  (``to="topic"`` for all); the dead letter is done once that is durable.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.broker.cursor import Cursor
from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    OffsetOutOfRange,
    SubscriptionNotFound,
)
from headrace.log.batch import LOST
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import DEAD_LETTER_SUFFIX, DeadLetter, Message, TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic

KEEPER = "__dead_letters"
PREFIX = "headrace-"
TOPIC = PREFIX + "origin-topic"
PARTITION = PREFIX + "origin-partition"
OFFSET = PREFIX + "origin-offset"
ID = PREFIX + "origin-id"
SUBSCRIPTION = PREFIX + "subscription"
REASON = PREFIX + "reason"
ATTEMPTS = PREFIX + "attempts"
_OURS = (TOPIC, PARTITION, OFFSET, ID, SUBSCRIPTION, REASON, ATTEMPTS)

Select = Callable[[DeadLetter], bool]
RedriveDone = Callable[[int, HeadraceError | None], None]


class DeadLetters:
    def __init__(self, engine: Engine):
        self._engine = engine

    # --- burying ----------------------------------------------------------------------------
    def bury(
        self, subscription: Subscription, cursor: Cursor, offset: int, attempt: int, reason: str
    ) -> None:
        """Store the message as a dead letter and tell the subscription."""
        partition = cursor.partition
        try:
            batch = partition.log.read(offset, 1)[0]
            index = offset - batch.base_offset
            message = batch.messages(partition.topic, partition.number, index, index + 1)[0]
            topic = self._topic(subscription, partition.topic)
        except (HeadraceError, OSError, IndexError) as error:
            self._engine.call_soon(subscription.buried, cursor, offset, error)
            return
        headers = {name: value for name, value in message.headers.items() if name not in _OURS} | {
            TOPIC: message.topic,
            PARTITION: str(message.partition),
            OFFSET: str(message.offset),
            ID: str(message.id),
            SUBSCRIPTION: subscription.name,
            REASON: " ".join(reason.split())[:1000],
            ATTEMPTS: str(attempt),
        }
        key = message.key
        columns = Columns([message.value], None if key is None else [key], [headers])

        def stored(entry: Append) -> None:
            subscription.buried(cursor, offset, entry.error)

        self._engine.append(topic, 0, Append(columns, None, stored))

    def topic_name(self, subscription: Subscription, source: str) -> str:
        name = subscription.settings.dead_letter_topic
        name = name or (subscription.name + DEAD_LETTER_SUFFIX)
        # A subscription over its own dead letters does not feed itself.
        return name + DEAD_LETTER_SUFFIX if name == source else name

    def _topic(self, subscription: Subscription, source: str) -> Topic:
        """The dead-letter topic, made when first needed."""
        engine = self._engine
        name = self.topic_name(subscription, source)
        topic = engine.topics.get(name)
        if topic is None:
            durable = engine.topics.find(source).settings.durable
            topic = engine.create_topic(
                name, TopicSettings(durable=durable, retention_hours=None), internal=True
            )
        if engine.subscription_or_none(KEEPER, name) is None:
            engine.subscribe(KEEPER, name, start="earliest", internal=True)
        return topic

    # --- listing ----------------------------------------------------------------------------
    def _open(self, name: str) -> tuple[Topic, Subscription, Cursor]:
        """By the subscription's name or by the dead-letter topic's."""
        engine = self._engine
        candidates = [name, name + DEAD_LETTER_SUFFIX]
        for subscription in engine.subscriptions():
            if subscription.name == name and subscription.settings.dead_letter_topic:
                candidates.insert(0, subscription.settings.dead_letter_topic)
        for candidate in candidates:
            keeper = engine.subscription_or_none(KEEPER, candidate)
            topic = engine.topics.get(candidate)
            if keeper is not None and topic is not None:
                return topic, keeper, keeper.cursors[(candidate, 0)]
        raise SubscriptionNotFound(
            f"there are no dead letters of {name!r}: no message of it was given up so far",
            code="no_dead_letters",
        )

    def topics(self) -> list[tuple[str, int]]:
        """(dead-letter topic, how many letters it has)."""
        return [(s.pattern, s.lag()) for s in self._engine.all_subscriptions() if s.name == KEEPER]

    def letters(
        self, name: str, *, after: int = -1, limit: int = 100, where: Select | None = None
    ) -> list[DeadLetter]:
        """Letters that were not redriven, edited or purged, oldest first."""
        topic, _, cursor = self._open(name)
        log = topic.partitions[0].log
        found: list[DeadLetter] = []
        batch = None
        for offset in cursor.undone(log.end_offset):
            if offset <= after:
                continue
            if len(found) >= limit:
                break
            if batch is None or offset >= batch.end_offset:
                try:
                    batch = log.read(offset, 1)[0]
                except OffsetOutOfRange:
                    continue
            if batch.flags & LOST:
                continue
            index = offset - batch.base_offset
            letter = _letter(batch.messages(topic.name, 0, index, index + 1)[0])
            if where is None or where(letter):
                found.append(letter)
        return found

    def show(self, name: str, offset: int) -> DeadLetter:
        letters = self.letters(name, after=offset - 1, limit=1)
        if not letters or letters[0].offset != offset:
            raise MessageNotFound(f"{name!r} has no dead letter {offset}, or it was dealt with")
        return letters[0]

    # --- dealing with them ---------------------------------------------------------------------
    def purge(self, name: str, offsets: list[int] | None, done: RedriveDone) -> None:
        """Give letters up for good: the ones named, or all there are now."""
        topic, _, cursor = self._open(name)
        end = topic.partitions[0].log.end_offset
        chosen = [
            offset
            for offset in (cursor.undone(end) if offsets is None else offsets)
            if offset < end and not cursor.is_done(offset)
        ]
        for offset in chosen:
            cursor.done(offset)
        self._engine.changed(cursor)
        self._engine.state.flush(lambda error: done(len(chosen), error))

    def edit(
        self,
        name: str,
        offset: int,
        value: bytes | None,
        headers: Mapping[str, str] | None,
        done: RedriveDone,
    ) -> None:
        """Replace a letter by a corrected one; ``done`` gets its new offset."""
        topic, _, cursor = self._open(name)
        letter = self.show(name, offset)
        message = letter.message
        own = dict(message.headers if headers is None else headers)
        columns = Columns(
            [message.value if value is None else value],
            None if message.key is None else [message.key],
            [own | _origin(letter)],
        )

        def stored(entry: Append) -> None:
            if entry.error is None:
                cursor.done(offset)
                self._engine.changed(cursor)
            done(entry.first_offset, entry.error)

        self._engine.append(topic, 0, Append(columns, None, stored))

    def redrive(
        self,
        name: str,
        done: RedriveDone,
        *,
        offsets: list[int] | None = None,
        where: Select | None = None,
        limit: int | None = None,
        rate: float | None = None,
        to: str = "subscription",
    ) -> None:
        """Publish letters back to where they came from, at most ``rate`` a second."""
        if to not in ("subscription", "topic"):
            raise InvalidArgument(
                f"to is 'subscription' (only the one that failed) or 'topic' (all), not {to!r}"
            )
        if rate is not None and not rate > 0:
            raise InvalidArgument(f"rate is messages per second, above 0, not {rate!r}")
        topic, _, cursor = self._open(name)
        run = _Redrive(self, name, topic, cursor, done, where, limit, rate, to)
        run.only = None if offsets is None else set(offsets)
        run.step()


class _Redrive:
    """One redrive under way: a page of letters at a time, each done when it is durable again."""

    PAGE = 500

    def __init__(
        self,
        letters: DeadLetters,
        name: str,
        topic: Topic,
        cursor: Cursor,
        done: RedriveDone,
        where: Select | None,
        limit: int | None,
        rate: float | None,
        to: str,
    ):
        self._letters = letters
        self._engine = letters._engine
        self._name, self._topic, self._cursor = name, topic, cursor
        self._done, self._where, self._limit = done, where, limit
        self._rate, self._to = rate, to
        self.only: set[int] | None = None
        self._end = topic.partitions[0].log.end_offset
        self._after = -1
        self._count = 0
        self._error: HeadraceError | None = None

    def step(self) -> None:
        page = self.PAGE if self._rate is None else max(1, min(self.PAGE, int(self._rate / 10)))
        if self._limit is not None:
            page = min(page, self._limit - self._count)
        try:
            letters = (
                self._letters.letters(self._name, after=self._after, limit=page, where=self._wanted)
                if page > 0
                else []
            )
        except HeadraceError as error:
            self._finish(error)
            return
        if not letters or self._error is not None:
            self._finish(self._error)
            return
        self._after = letters[-1].offset
        waiting = len(letters)

        def stored(letter: DeadLetter, error: HeadraceError | None) -> None:
            nonlocal waiting
            waiting -= 1
            if error is None:
                self._count += 1
                self._cursor.done(letter.offset)
                self._engine.changed(self._cursor)
            else:
                self._error = error
            if waiting == 0:
                if self._rate is None:
                    self._engine.call_soon(self.step)
                else:
                    self._engine.call_later(len(letters) / self._rate, self.step)

        for letter in letters:
            self._send(letter, stored)

    def _wanted(self, letter: DeadLetter) -> bool:
        return (
            letter.offset < self._end
            and (self.only is None or letter.offset in self.only)
            and (self._where is None or self._where(letter))
        )

    def _send(
        self, letter: DeadLetter, stored: Callable[[DeadLetter, HeadraceError | None], None]
    ) -> None:
        message = letter.message
        columns = Columns(
            [message.value],
            None if message.key is None else [message.key],
            [dict(message.headers)] if message.headers else None,
            ids=[message.id.bytes],
            targets=[letter.subscription.encode()] if self._to == "subscription" else None,
        )
        try:
            topic = self._engine.topic_for_publish(message.topic)
            number = min(message.partition, len(topic.partitions) - 1)
        except HeadraceError as error:
            self._engine.call_soon(stored, letter, error)
            return
        self._engine.append(
            topic, number, Append(columns, None, lambda entry: stored(letter, entry.error))
        )

    def _finish(self, error: HeadraceError | None) -> None:
        self._engine.state.flush(lambda failed: self._done(self._count, error or failed))


def _origin(letter: DeadLetter) -> dict[str, str]:
    message = letter.message
    return {
        TOPIC: message.topic,
        PARTITION: str(message.partition),
        OFFSET: str(message.offset),
        ID: str(message.id),
        SUBSCRIPTION: letter.subscription,
        REASON: letter.reason,
        ATTEMPTS: str(letter.attempts),
    }


def _letter(stored: Message) -> DeadLetter:
    """Take a stored record apart. One that lacks our headers was published there by hand."""
    headers = stored.headers
    own = {name: value for name, value in headers.items() if name not in _OURS}
    origin_id = headers.get(ID)
    message = Message(
        headers.get(TOPIC, stored.topic),
        _int(headers.get(PARTITION), 0),
        _int(headers.get(OFFSET), stored.offset),
        stored.timestamp,
        stored.key,
        stored.value,
        own,
        uuid.UUID(origin_id).bytes if origin_id else None,
    )
    return DeadLetter(
        stored.offset,
        message,
        headers.get(SUBSCRIPTION, stored.topic.removesuffix(DEAD_LETTER_SUFFIX)),
        headers.get(REASON, "published by hand"),
        _int(headers.get(ATTEMPTS), 0),
        stored.timestamp,
    )


def _int(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else otherwise

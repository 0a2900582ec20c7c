"""Dead letters: messages that a subscription gave up, kept in ``<subscription>.dlq``.

A dead letter is an ordinary record: the payload, key and headers as they were, plus headers that say
where it came from and why (``headrace-*`` below). What has been redriven, edited or purged is *done*
in a hidden subscription over that topic; what is listed is what is not done. So the list costs no
structure of its own, and retention keeps what nobody has looked at.

Rules:
- The dead letter is durable before its original is done. A crash in between may double it.
- Redriving publishes back to the origin, meant for the subscription that failed and for no other
  (``to="topic"`` for all); the dead letter is done once that is durable. Its time is that of the redrive,
  because times to live and retention count from it, and its attempts begin anew. A header
  (``headrace-origin-timestamp``) says when it was first published, so a second dead letter knows that, too.
- Anybody who may publish can forge a letter. One that cannot be redriven is skipped and counted, and never
  stands in the way of the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.pace import Pace
from headrace.contents import check_headers, check_value
from headrace.errors import (
    Closed,
    Conflict,
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    NotFound,
    OffsetOutOfRange,
    ReadOnly,
    StorageFailed,
    SubscriptionNotFound,
)
from headrace.log.batch import LOST
from headrace.log.columns import Columns
from headrace.log.interface import Append, ReadPending
from headrace.model import (
    DEAD_LETTER_HEADERS,
    DEAD_LETTER_SUFFIX,
    DeadLetter,
    Message,
    TopicSettings,
)
from headrace.operations.results import Redriven

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic

KEEPER = "__dead_letters"
TOPIC, PARTITION, OFFSET, ID, SUBSCRIPTION, REASON, ATTEMPTS, TIME = DEAD_LETTER_HEADERS
REASON_CHARS_MAX = 1000
PAGE = 500
"""Letters that a redrive publishes at a time."""

Select = Callable[[DeadLetter], bool]
CountDone = Callable[[int, HeadraceError | None], None]
RedriveDone = Callable[[Redriven | None, HeadraceError | None], None]


_ITS_OWN_FAULT = (InvalidArgument, Conflict, NotFound, ReadOnly)
"""Errors that concern one letter or its topic; any other ends a redrive."""


class DeadLetters:
    def __init__(self, engine: Engine):
        self._engine = engine
        self.under_way: set[tuple[str, int]] = set()
        """(topic, offset) of letters that a redrive is publishing: another one leaves them alone."""

    # --- burying ----------------------------------------------------------------------------
    def bury(
        self, subscription: Subscription, cursor: Cursor, offset: int, attempt: int, reason: str
    ) -> None:
        """Store the message as a dead letter and tell the subscription."""
        partition = cursor.partition
        try:
            batch = partition.log.read_cached(offset)
            message = batch.message(partition.topic, partition.number, offset)
            topic = self._topic(subscription, partition.topic)
        except ReadPending as pending:
            pending.then(lambda: self.bury(subscription, cursor, offset, attempt, reason))
            return
        except (HeadraceError, OSError) as error:
            self._engine.call_soon(subscription.buried, cursor, offset, error)
            return
        letter = DeadLetter(offset, message, subscription.name, _one_line(reason), attempt, 0)
        headers = _without_origin(message.headers) | _origin(letter)
        # It was redriven: this says when it was first published.
        headers[TIME] = str(_time(message.headers.get(TIME), message.timestamp))
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
            if subscription.settings.dead_letter_topic:  # a topic that somebody has chosen
                engine.topics.owner = subscription.owner
            try:
                # On disk even if the source is in memory: letters of other sources come here, too.
                topic = engine.create_topic(
                    name, TopicSettings(retention_hours=None), internal=True
                )
            finally:
                engine.topics.owner = None
        engine.keeper(KEEPER, name)
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
            if topic is not None and keeper is None and candidate != name:
                # A crash came before it was in the journal.
                keeper = engine.keeper(KEEPER, candidate)
            if topic is not None and keeper is not None:
                return topic, keeper, keeper.cursors[(candidate, 0)]
        raise SubscriptionNotFound(
            f"there are no dead letters of {name!r}: no message of it was given up so far",
            code="no_dead_letters",
        )

    def topics(self) -> list[tuple[str, int]]:
        """(dead-letter topic, how many letters it has), whoever has put them there."""
        found = {s.pattern: s.lag() for s in self._engine.all_subscriptions() if s.name == KEEPER}
        for topic in self._engine.topics:
            if topic.name.endswith(DEAD_LETTER_SUFFIX) and topic.name not in found:
                log = topic.partitions[0].log
                if log.end_offset > log.start_offset:
                    found[topic.name] = log.end_offset - log.start_offset
        return sorted(found.items())

    def listing(
        self, name: str, *, after: int = -1, limit: int = 100, where: Select | None = None
    ) -> Listing:
        """Letters that were not redriven, edited or purged, oldest first."""
        topic, _, cursor = self._open(name)
        return Listing(topic, cursor, self._engine.pace, after, limit, where)

    def show(self, name: str, offset: int) -> DeadLetter:
        topic, _, cursor = self._open(name)
        log = topic.partitions[0].log
        if log.start_offset <= offset < log.end_offset and not cursor.is_done(offset):
            batch = log.read_cached(offset)
            if not batch.flags & LOST:
                return _letter(batch.message(topic.name, 0, offset))
        raise MessageNotFound(f"{name!r} has no dead letter {offset}, or it was dealt with")

    # --- dealing with them ---------------------------------------------------------------------
    def purge(self, name: str, offsets: list[int] | None, done: CountDone) -> None:
        """Give letters up for good: the ones named, or all there are now."""
        self._engine.check_open()
        topic, _, cursor = self._open(name)
        end = topic.partitions[0].log.end_offset
        if offsets is None:
            count = cursor.undone_count(end)
            cursor.done_run(cursor.position, end)
        else:
            count = sum(cursor.done(offset) for offset in offsets if offset < end)
        self._engine.changed(cursor)
        self._engine.state.flush(lambda error: done(count, error))

    def edit(
        self,
        name: str,
        offset: int,
        value: bytes | None,
        headers: Mapping[str, str] | None,
        done: CountDone,
    ) -> None:
        """Replace a letter by a corrected one; ``done`` gets its new offset."""
        topic, _, cursor = self._open(name)
        letter = self.show(name, offset)
        message = letter.message
        own = dict(message.headers if headers is None else check_headers(headers))
        columns = Columns(
            [message.value if value is None else check_value(value, self._engine.max_message_size)],
            None if message.key is None else [message.key],
            [own | _origin(letter)],
        )

        def stored(entry: Append) -> None:
            if entry.error is not None:
                done(entry.first_offset, entry.error)
                return
            cursor.done(offset)
            self._engine.changed(cursor)
            self._engine.state.flush(lambda error: done(entry.first_offset, error))

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
        topic, _, cursor = self._open(name)
        only = None if offsets is None else set(offsets)
        end = topic.partitions[0].log.end_offset
        engine = self._engine
        _Redrive(self, engine, name, topic, cursor, done, only, where, limit, rate, to, end).step()


@dataclass(slots=True, eq=False)
class Listing:
    """A page of letters. Where the log still fetches them, ``collect`` is called again.

    So it is when it has kept the loop for long enough: a filter may look through all letters for one.
    """

    _topic: Topic
    _cursor: Cursor
    _pace: Pace
    _after: int
    _limit: int
    _where: Select | None
    _found: list[DeadLetter] = field(default_factory=list)

    def collect(self) -> list[DeadLetter]:
        topic, found = self._topic, self._found
        log = topic.partitions[0].log
        batch = None
        deadline = self._pace.deadline()
        for offset in self._cursor.undone(log.end_offset, self._after + 1):
            if len(found) >= self._limit:
                break
            if batch is not None and self._pace.is_past(deadline):
                raise ReadPending(self._pace.soon)
            if batch is None or offset >= batch.end_offset:
                try:
                    batch = log.read_cached(offset)
                except OffsetOutOfRange:
                    self._after = offset
                    continue
            if not batch.flags & LOST:
                letter = _letter(batch.message(topic.name, 0, offset))
                if self._where is None or self._where(letter):
                    found.append(letter)
            self._after = offset
        return found


@dataclass(slots=True, eq=False)
class _Redrive:
    """One redrive under way: a page of letters at a time, each done when it is durable again."""

    _letters: DeadLetters
    _engine: Engine
    _name: str
    """Of the subscription or the topic, as it was given."""
    _topic: Topic
    _cursor: Cursor
    _done: RedriveDone
    _only: set[int] | None
    """The offsets that were named; None: all."""
    _where: Select | None
    _limit: int | None
    _rate: float | None
    _to: str
    _end: int
    """Letters that are stored later are left for the next redrive."""
    _after: int = -1
    _count: int = 0
    _error: HeadraceError | None = None
    _listing: Listing | None = None
    """The page that is being collected."""
    _skipped: int = 0
    _reason: str | None = None
    """Why the first of those was skipped."""

    def step(self) -> None:
        if self._engine.failed is not None or self._engine.closing:
            self._finish(self._engine.failed or Closed("the broker is closed"))
            return
        page = PAGE if self._rate is None else max(1, min(PAGE, int(self._rate / 10)))
        if self._limit is not None:
            page = min(page, self._limit - self._count)
        try:
            if self._listing is None:
                self._listing = self._letters.listing(
                    self._name, after=self._after, limit=max(page, 0), where=self._wanted
                )
            letters = self._listing.collect()
            self._listing = None
        except ReadPending as pending:
            pending.then(self.step)
            return
        except HeadraceError as error:
            self._finish(error)
            return
        except OSError as error:
            self._finish(StorageFailed(f"the dead letters cannot be read: {error}"))
            return
        except Exception as error:  # the caller's own filter
            self._finish(InvalidArgument(f"the filter failed: {error!r}", code="invalid_filter"))
            return
        if not letters or self._error is not None:
            self._finish(self._error)
            return
        self._after = letters[-1].offset
        # While the log was fetching, others may have dealt with some of them.
        letters = [
            letter
            for letter in letters
            if self._wanted(letter) and not self._cursor.is_done(letter.offset)
        ]
        if not letters:
            self._engine.call_soon(self.step)
            return
        waiting = len(letters)

        def stored(letter: DeadLetter, error: HeadraceError | None) -> None:
            nonlocal waiting
            waiting -= 1
            self._letters.under_way.discard((self._topic.name, letter.offset))
            if error is None:
                self._count += 1
                self._cursor.done(letter.offset)
                self._engine.changed(self._cursor)
            elif isinstance(error, _ITS_OWN_FAULT):
                self._skipped += 1
                self._reason = self._reason or f"dead letter {letter.offset}: {error.message}"
            else:
                self._error = error
            if waiting == 0:
                if self._rate is None:
                    self._engine.call_soon(self.step)
                else:
                    self._engine.call_later(len(letters) / self._rate, self.step)

        self._letters.under_way.update((self._topic.name, letter.offset) for letter in letters)
        for letter in letters:
            self._send(letter, stored)

    def _wanted(self, letter: DeadLetter) -> bool:
        return (
            letter.offset < self._end
            and (self._topic.name, letter.offset) not in self._letters.under_way
            and (self._only is None or letter.offset in self._only)
            and (self._where is None or self._where(letter))
        )

    def _send(
        self, letter: DeadLetter, stored: Callable[[DeadLetter, HeadraceError | None], None]
    ) -> None:
        message = letter.message
        columns = Columns(
            [message.value],
            None if message.key is None else [message.key],
            [{**message.headers, TIME: str(message.timestamp)}],
            ids=[message.id.bytes],
            targets=[letter.subscription.encode()] if self._to == "subscription" else None,
        )
        try:
            if message.topic == self._topic.name:  # it would come back here, and say less
                raise Conflict(
                    "it does not say which topic it came from; publish it again yourself, then purge it",
                    code="no_origin",
                )
            topic = self._engine.topic_for_publish(message.topic)
            number = min(message.partition, len(topic.partitions) - 1)
        except HeadraceError as error:
            self._engine.call_soon(stored, letter, error)
            return
        self._engine.append(
            topic, number, Append(columns, None, lambda entry: stored(letter, entry.error))
        )

    def _finish(self, error: HeadraceError | None) -> None:
        def flushed(failed: HeadraceError | None) -> None:
            result = Redriven(redriven=self._count, skipped=self._skipped, reason=self._reason)
            self._done(result, error or failed)

        self._engine.state.flush(flushed)


def _without_origin(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name not in DEAD_LETTER_HEADERS}


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
        TIME: str(message.timestamp),
    }


def _letter(stored: Message) -> DeadLetter:
    """Take a stored record apart. One that lacks our headers was published there by hand."""
    headers = stored.headers
    attempts = _int(headers.get(ATTEMPTS), 0)
    message = Message(
        headers.get(TOPIC, stored.topic),
        _int(headers.get(PARTITION), 0),
        _int(headers.get(OFFSET), stored.offset),
        _time(headers.get(TIME), stored.timestamp),
        stored.key,
        stored.value,
        _without_origin(headers),
        _id_bytes(headers.get(ID)),
        max(attempts, 1),
    )
    return DeadLetter(
        stored.offset,
        message,
        headers.get(SUBSCRIPTION, stored.topic.removesuffix(DEAD_LETTER_SUFFIX)),
        headers.get(REASON, "published by hand"),
        attempts,
        stored.timestamp,
    )


def _int(text: str | None, otherwise: int) -> int:
    is_number = text is not None and len(text) < 20 and text.isascii() and text.isdigit()
    return int(text or "") if is_number else otherwise


def _time(text: str | None, otherwise: int) -> int:
    """Letters of earlier versions do not say it, and anybody may have written it."""
    time = _int(text, otherwise)
    return time if time <= limits.TIMESTAMP_MS_MAX else otherwise


def _id_bytes(text: str | None) -> bytes | None:
    try:
        return uuid.UUID(text).bytes if text else None
    except ValueError:
        return None


def _one_line(reason: str) -> str:
    """As a header can carry it, whatever a consumer wrote."""
    text = " ".join(reason[: 2 * REASON_CHARS_MAX].split())[:REASON_CHARS_MAX]
    return "".join(char if char.isprintable() else "?" for char in text)

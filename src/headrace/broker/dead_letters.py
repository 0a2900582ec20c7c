"""Dead letters: messages that a subscription gave up, kept in ``<subscription>.dlq``.

A dead letter is an ordinary record: the payload, key and headers as they were, plus headers that say
where it came from and why (``headrace-*`` below). What has been redriven, edited or purged is *done*
in a hidden subscription over that topic; what is listed is what is not done. So the list costs no
structure of its own, and retention keeps what nobody has looked at.

Rules:
- The dead letter is durable before its original is done. A crash in between may double it.
- Redriving publishes back to the origin, meant for the subscription that failed and for no other
  (``to="topic"`` for all), exactly once (``redriving.py``). Its time is that of the redrive,
  because times to live and retention count from it, and its attempts begin anew. A header
  (``headrace-origin-timestamp``) says when it was first published, so a second dead letter knows that, too.
- Anybody who may publish can forge a letter. One that cannot be redriven is skipped and counted, and never
  stands in the way of the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.pace import Pace
from headrace.broker.redrives import Redrives
from headrace.broker.redriving import (
    Begun,
    Choice,
    Redrive,
    RedriveDone,
    Rounds,
    Select,
    Target,
)
from headrace.contents import check_headers, check_value
from headrace.errors import (
    HeadraceError,
    MessageNotFound,
    OffsetOutOfRange,
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
from headrace.operations.arguments import Correction

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic

KEEPER = "__dead_letters"
TOPIC, PARTITION, OFFSET, ID, SUBSCRIPTION, REASON, ATTEMPTS, TIME = DEAD_LETTER_HEADERS
REASON_CHARS_MAX = 1000
BY_BROKER = "broker"
CountDone = Callable[[int, HeadraceError | None], None]


class DeadLetters:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._rounds: dict[str, Rounds] = {}
        """Of the redrives of each dead-letter topic."""
        self.redrives = Redrives(engine)

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
        columns = Columns([message.value or b""], None if key is None else [key], [headers])

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
        if topic is None and engine.cluster is not None:
            raise ReadPending(partial(engine.cluster.create_letters, name, subscription.owner))
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
        if topic.partitions[0].log.owned:
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
                cursor = keeper.cursors.get((candidate, 0))
                if cursor is None:
                    raise StorageFailed(
                        f"another node has the dead letters of {name!r} now; try again",
                        code="partition_moved",
                    )
                return topic, keeper, cursor
        raise SubscriptionNotFound(
            f"there are no dead letters of {name!r}: no message of it was given up so far. Is the name right?",
            code="no_dead_letters",
        )

    def topic_of(self, name: str) -> str:
        """The dead-letter topic, by the subscription's name or by its own."""
        return self._open(name)[0].name

    def topics(self) -> list[tuple[str, int]]:
        """(dead-letter topic, how many letters it has), whoever has put them there."""
        found = {s.pattern: s.lag() for s in self._engine.all_subscriptions() if s.name == KEEPER}
        for topic in self._engine.topics:
            if topic.name.endswith(DEAD_LETTER_SUFFIX) and topic.name not in found:
                log = topic.partitions[0].log
                if log.owned and log.end_offset > log.start_offset:
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
            [
                message.value or b""
                if value is None
                else check_value(value, self._engine.max_message_size)
            ],
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
        destination: str | None = None,
        transform: Any = None,
        corrections: Mapping[int, Correction] | None = None,
        allowed: Select | None = None,
        begun: Begun | None = None,
    ) -> Redrive:
        """Publish letters back to where they came from, or to ``destination``, at most ``rate`` a second.

        ``corrections``: new contents, by offset; only these letters are redriven. ``allowed``: those that the
        caller may redrive; the others are skipped.
        """
        topic, _, cursor = self._open(name)
        only = None if offsets is None else set(offsets)
        if corrections is not None:
            only = {*corrections} if only is None else only & corrections.keys()
        end = topic.partitions[0].log.end_offset
        rounds = self._rounds.setdefault(topic.name, Rounds(self._engine, topic.name))

        def page(after: int, limit: int, wanted: Select) -> Listing:
            return Listing(topic, cursor, self._engine.pace, after, limit, wanted)

        target = Target(topic.name, to, destination, transform, corrections or {})
        choice = Choice(only, where, allowed, limit, end)
        begun = begun or Begun(uuid.uuid4(), BY_BROKER, self._engine.now_ms())
        redrive = Redrive(self._engine, rounds, cursor, page, target, choice, rate, begun)
        redrive.then(lambda: done(redrive.status(), redrive.error))
        self.redrives.begin(redrive)
        return redrive


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

"""Dead letters on their way back: rounds of publishing, each letter exactly once.

A round takes some letters, publishes them as one batch for each partition, as an idempotent producer that
belongs to the dead-letter topic, then marks them done, durably; only then the next round of that topic
begins, of whatever redrive. So after a crash only the newest batch of that producer in a partition can hold letters
that were published and are not marked. The first round that writes to a partition looks into it, and marks
those letters without publishing them again.

A letter is found there by its message's id and by the subscription that the message is meant for. A message that was redriven
and died again has the same id; its letter says that it came from that very record, and so it is another one.

Rejected: a producer for each letter, which needs no rounds, but a partition remembers a bounded number of producers,
and a large redrive would make it forget those of its clients.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.publishing import RESERVED_PRODUCERS
from headrace.broker.transforming import transformed
from headrace.clock import Timer
from headrace.contents import check_headers, check_value
from headrace.errors import (
    Closed,
    Conflict,
    HeadraceError,
    InvalidArgument,
    NotFound,
    ReadOnly,
    StorageFailed,
)
from headrace.log.columns import Columns
from headrace.log.interface import Append, Log, ReadPending
from headrace.model import DEAD_LETTER_HEADERS, DeadLetter
from headrace.operations.arguments import Correction
from headrace.operations.results import Redriven

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.topic import Topic

TIME = DEAD_LETTER_HEADERS[-1]
PAGE = 500
"""Letters that a redrive publishes at a time."""
Select = Callable[[DeadLetter], bool]
RedriveDone = Callable[[Redriven | None, HeadraceError | None], None]
_ITS_OWN_FAULT = (InvalidArgument, Conflict, NotFound, ReadOnly)
"""Errors that concern one letter or its topic; any other ends a redrive."""
_RETRY_S = 1.0
FORBIDDEN_MAX = 10_000
"""Letters that a caller may not redrive are counted up to here."""


class LetterPage(Protocol):
    """Some letters. ``collect`` raises ``ReadPending`` while they are fetched, and is then called again."""

    def collect(self) -> list[DeadLetter]: ...


class CorrectedLetter(NamedTuple):
    """A letter, and what is published for it."""

    letter: DeadLetter
    value: bytes
    key: bytes | None
    headers: dict[str, str]


class Target(NamedTuple):
    """Where letters go, and how they are changed on the way."""

    letters: str
    """Their topic."""
    to: str
    destination: str | None
    transform: Any
    """A JSON patch for each payload."""
    corrections: Mapping[int, Correction]
    """New contents, by the letter's offset."""

    def message(self, letter: DeadLetter, max_message_size: int) -> CorrectedLetter:
        """What is published for a letter."""
        message = letter.message
        correction = self.corrections.get(letter.offset, Correction())
        value = (message.value or b"") if correction.value is None else correction.value
        if self.transform is not None:
            value = transformed(value, self.transform)
        headers = message.headers if correction.headers is None else correction.headers
        return CorrectedLetter(
            letter,
            check_value(value, max_message_size),
            message.key if correction.key is None else correction.key,
            {**check_headers(headers), TIME: str(message.timestamp)},
        )

    def columns(self, found: list[CorrectedLetter]) -> Columns:
        """A batch of messages that go to the same partition."""
        is_for_one = self.to == "subscription" and self.destination is None
        keys = [each.key for each in found]
        return Columns(
            [each.value for each in found],
            keys if any(key is not None for key in keys) else None,
            [each.headers for each in found],
            ids=[each.letter.message.id.bytes for each in found],
            targets=[each.letter.subscription.encode() for each in found] if is_for_one else None,
        )

    def place(self, engine: Engine, letter: DeadLetter) -> tuple[Topic, int]:
        """The topic and the partition that a letter goes to."""
        message = letter.message
        if message.topic == self.letters and self.destination is None:
            raise Conflict(  # it would come back here, and say less
                "it does not say which topic it came from; publish it again yourself, then purge it",
                code="no_origin",
            )
        topic = engine.topic_for_publish(self.destination or message.topic)
        return topic, min(message.partition, len(topic.partitions) - 1)


# --- rounds -------------------------------------------------------------------------------------------
class Rounds:
    """The rounds of all redrives of one dead-letter topic, one after the other."""

    def __init__(self, engine: Engine, topic: str):
        self._engine = engine
        digest = hashlib.sha256(f"redrive {topic}".encode()).digest()
        self.producer = RESERVED_PRODUCERS | int.from_bytes(digest[:8], "little")
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._looked: set[Log] = set()
        """Partitions whose newest batch is known to be marked."""

    def begin(self, work: Callable[[], None]) -> None:
        """Call ``work`` when no other round is under way; it ends with :meth:`end`."""
        if self._is_busy:
            self._waiting.append(work)
            return
        self._is_busy = True
        work()

    def end(self, done: Callable[[HeadraceError | None], None]) -> None:
        """Begin the next round when it is durable which letters are done."""
        engine = self._engine

        def flushed(error: HeadraceError | None) -> None:
            if error is not None and engine.failed is None and not engine.closing:
                engine.call_later(_RETRY_S, engine.state.flush, flushed)
                return
            self._is_busy = False
            if self._waiting:
                engine.call_soon(self.begin, self._waiting.popleft())
            done(error)

        engine.state.flush(flushed)

    def published(self, topic: Topic, number: int, letters: list[DeadLetter]) -> set[int]:
        """The offsets of letters that a round before the broker's start has published there."""
        log = topic.partitions[number].log
        if log in self._looked or not log.owned:
            return set()
        last = log.last_producer_batch(self.producer)
        found = set()
        if last is not None:
            offset, count = last
            for place, id_, target in _records(log, offset, count):
                origin = (topic.name, number, place)
                for letter in letters:
                    message = letter.message
                    if (
                        message.id.bytes == id_
                        and target in (b"", letter.subscription.encode())
                        and (message.topic, message.partition, message.offset) != origin
                    ):
                        found.add(letter.offset)
        return found

    def wrote(self, log: Log) -> None:
        self._looked.add(log)


def _records(log: Log, offset: int, count: int) -> list[tuple[int, bytes, bytes]]:
    """(offset, id, for which subscription) of some records; ``ReadPending`` while they are fetched."""
    try:
        batch = log.read_cached(offset)  # it may begin earlier, and end later
    except HeadraceError:
        return []  # retention has dropped it, long after the letters were marked
    low = offset - batch.base_offset
    ids = batch.ids(low, low + count) or []
    targets = batch.targets(low, low + count) or [b""] * count
    return list(zip(range(offset, offset + count), ids, targets, strict=False))


# --- a redrive ----------------------------------------------------------------------------------------
class Begun(NamedTuple):
    """How a redrive began."""

    id: uuid.UUID
    by: str
    time_ms: int
    lease_s: float | None = None
    """It stops when nobody asks for it for so long."""


class Choice(NamedTuple):
    """Which letters are redriven."""

    only: set[int] | None
    """The offsets that were named; None: all."""
    where: Select | None
    allowed: Select | None
    """Those that the caller may redrive; the others are skipped."""
    limit: int | None
    end: int
    """Letters that are stored later are left for the next redrive."""

    def wants(self, letter: DeadLetter) -> bool:
        return (
            letter.offset < self.end
            and (self.only is None or letter.offset in self.only)
            and (self.where is None or self.where(letter))
        )


@dataclass(slots=True, eq=False)
class Redrive:
    """One redrive: a page of letters at a time, until there are no more or somebody stops it."""

    _engine: Engine
    _rounds: Rounds
    _cursor: Cursor
    _page: Callable[[int, int, Select], LetterPage]
    _target: Target
    _choice: Choice
    _rate: float | None
    begun: Begun
    state: Literal["running", "done", "stopped", "failed"] = "running"
    error: HeadraceError | None = None
    """That has ended it."""
    _why: str | None = None
    """Why it is to stop."""
    _is_ending: bool = False
    _waiters: list[Callable[[], object]] = field(default_factory=list)
    _timer: Timer | None = None
    """Until its next page, if it has a rate."""
    _after: int = -1
    _count: int = 0
    _failure: HeadraceError | None = None
    """Of a write of this round."""
    _listing: LetterPage | None = None
    """The page that is being collected."""
    _skipped: int = 0
    _forbidden: set[int] = field(default_factory=set)
    """The offsets of letters that the caller may not redrive."""
    _reason: str | None = None
    """Why the first of those was skipped."""
    _waiting: int = 0
    """Batches of this round that are not stored yet."""
    _sent: int = 0
    """Letters of this round that were published."""

    @property
    def letters(self) -> str:
        """The topic of the letters."""
        return self._target.letters

    def status(self) -> Redriven:
        reason = self._reason
        if reason is None and self._forbidden:
            reason = f"{self.begun.by} may not publish to the topics they come from"
        return {
            "id": str(self.begun.id),
            "state": self.state,
            "redriven": self._count,
            "skipped": self._skipped + len(self._forbidden),
            "reason": reason,
            "left": self._left(),
            "rate": self._rate,
            "by": self.begun.by,
            "began": self.begun.time_ms,
            "why": self.error.message if self.error is not None else self._why,
        }

    def _left(self) -> int:
        """Letters that it has not looked at, whether or not it wants them."""
        choice, cursor, start = self._choice, self._cursor, self._after + 1
        if self.state == "done" or start >= choice.end:
            return 0
        if choice.only is not None:
            left = sum(
                start <= offset < choice.end and not cursor.is_done(offset)
                for offset in choice.only
            )
        else:
            left = cursor.undone_count(choice.end) - cursor.undone_count(start)
        return left if choice.limit is None else min(left, choice.limit - self._count)

    # --- its end ------------------------------------------------------------------------------
    def then(self, call: Callable[[], object]) -> None:
        """Call it when the redrive has ended."""
        if self.state == "running":
            self._waiters.append(call)
        else:
            call()

    def forget(self, call: Callable[[], object]) -> None:
        if call in self._waiters:
            self._waiters.remove(call)

    def stop(self, why: str) -> None:
        """Publish no further page of letters. It ends when the one that is under way is stored."""
        if self._is_ending or self._why is not None:
            return
        self._why = why
        if self._timer is not None:
            self._finish(None)

    def close(self, error: HeadraceError) -> None:
        """The broker closes, and the next page is due later."""
        if self._timer is not None:
            self._timer.cancel()
            self._end(error)

    def _finish(self, error: HeadraceError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_ending = True
        self._engine.state.flush(lambda failed: self._end(error or failed))

    def _end(self, error: HeadraceError | None) -> None:
        if self.state != "running":
            return
        self._is_ending = True
        self.error = error
        self.state = "failed" if error is not None else "done" if self._why is None else "stopped"
        waiters, self._waiters = self._waiters, []
        for call in waiters:
            call()

    # --- its pages ----------------------------------------------------------------------------
    def step(self) -> None:
        self._timer = None
        if self._is_ending:
            return
        if self._engine.failed is not None or self._engine.closing:
            self._finish(self._engine.failed or Closed("the broker is closed"))
            return
        if self._why is not None:
            self._finish(None)
            return
        page, limit = PAGE, self._choice.limit
        if self._rate is not None:
            page = max(1, min(PAGE, int(self._rate / 10)))
        if limit is not None:
            page = min(page, limit - self._count)
        try:
            if self._listing is None:
                self._listing = self._page(self._after, max(page, 0), self._wanted)
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
        if not letters or self._failure is not None:
            self._finish(self._failure)
            return
        letters = self._fitting(letters)
        self._after = letters[-1].offset
        self._rounds.begin(lambda: self._round(letters))

    def _wanted(self, letter: DeadLetter) -> bool:
        if not self._choice.wants(letter):
            return False
        allowed = self._choice.allowed
        if allowed is None or allowed(letter):
            return True
        if len(self._forbidden) < FORBIDDEN_MAX:
            self._forbidden.add(letter.offset)
        return False

    def _fitting(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """The first of them, which are one batch of each partition."""
        size = headers = count = 0
        for letter in letters:
            message = letter.message
            correction = self._target.corrections.get(letter.offset)
            size += len(message.value or b"") + len((correction and correction.value) or b"")
            headers += 1 + len(message.headers) + len((correction and correction.headers) or {})
            if count and (size > limits.BATCH_BYTES_TARGET or headers > limits.BATCH_HEADERS_MAX):
                break
            count += 1
        return letters[:count]

    def _round(self, letters: list[DeadLetter]) -> None:
        """Publish letters that nobody has dealt with meanwhile."""
        engine = self._engine
        if self._why is not None:  # it was stopped while it waited for the round of another one
            self._after = letters[0].offset - 1
            letters = []
        letters = [letter for letter in letters if not self._cursor.is_done(letter.offset)]
        places: dict[tuple[str, int], tuple[Topic, list[CorrectedLetter]]] = {}
        skipped: list[tuple[DeadLetter, HeadraceError]] = []
        for letter in letters:
            try:
                topic, number = self._target.place(engine, letter)
                made = self._target.message(letter, engine.max_message_size)
            except HeadraceError as error:
                skipped.append((letter, error))
            else:
                places.setdefault((topic.name, number), (topic, []))[1].append(made)
        published: set[int] = set()
        try:
            for (_, number), (topic, made_there) in places.items():
                published |= self._rounds.published(topic, number, [m.letter for m in made_there])
        except ReadPending as pending:
            pending.then(lambda: self._round(letters))
            return
        except OSError as error:  # what was published before is unknown, so nothing is
            self._waiting = 1
            self._stored([], StorageFailed(f"messages that were redriven cannot be read: {error}"))
            return
        for letter, why in skipped:
            self._skip([letter], why)
        self._mark([letter for letter in letters if letter.offset in published])
        self._waiting = 1
        for (_, number), (topic, made_there) in places.items():
            left = [made for made in made_there if made.letter.offset not in published]
            if left:
                self._waiting += 1
                self._sent += len(left)
                self._send(topic, number, left)
        self._stored([], None)

    def _send(self, topic: Topic, number: int, made: list[CorrectedLetter]) -> None:
        log, producer = topic.partitions[number].log, self._rounds.producer
        letters = [each.letter for each in made]

        def stored(entry: Append) -> None:
            if entry.error is None:
                self._rounds.wrote(log)
                lives, now_ms = self._engine.history.lives, self._engine.now_ms()
                for at, letter in enumerate(letters):
                    place = (topic.name, number, entry.first_offset + at)
                    lives.redriven(letter, now_ms, place)
            self._stored(letters, entry.error)

        entry = Append(self._target.columns(made), None, stored)
        if log.owned:  # another node has no producers of ours
            entry.producer_id, entry.first_sequence = producer, log.next_sequence(producer)
        self._engine.append(topic, number, entry)

    def _stored(self, letters: list[DeadLetter], error: HeadraceError | None) -> None:
        if error is None:
            self._mark(letters)
        elif isinstance(error, _ITS_OWN_FAULT):
            self._skip(letters, error)
        else:
            self._failure = error
        self._waiting -= 1
        if not self._waiting:
            self._rounds.end(self._ended)

    def _ended(self, error: HeadraceError | None) -> None:
        if error is not None:
            self._finish(error)
        elif self._rate is None or self._why is not None:
            self._engine.call_soon(self.step)
        else:
            self._timer = self._engine.call_later(self._sent / self._rate, self.step)
        self._sent = 0

    def _mark(self, letters: list[DeadLetter]) -> None:
        for letter in letters:
            self._count += 1
            self._cursor.done(letter.offset)
        if letters:
            self._engine.changed(self._cursor)

    def _skip(self, letters: list[DeadLetter], error: HeadraceError) -> None:
        self._skipped += len(letters)
        for letter in letters:
            self._reason = self._reason or f"dead letter {letter.offset}: {error.message}"

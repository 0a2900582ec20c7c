"""Staged batches and their atomic commit: how a job of many tasks writes exactly once.

Tasks *stage* batches: durable, but nobody sees them. The job then *commits* a list of pieces under a
name and a number, in one step: all of them appear in their partitions at once, or none. Committing the
same number again changes nothing and is answered like the first time, so a driver that does not know
whether its commit arrived simply repeats it. What is never committed is aborted, or expires.

A piece is a record of the internal topic ``__staged``: its value is the batch, its headers say where it
is to go, its id is its place. A hidden subscription over that topic knows which pieces are done. A commit
goes through three steps, each of which survives a crash::

    decided   one journal entry (name, number, pieces): from here on it will happen
    applied   in every partition the end is held, the batches are stored behind it as an idempotent
              producer of this one commit, then all ends are released in the same turn of the loop
    finished  one journal entry: the pieces are done

After a crash between *decided* and *finished* the partitions that already have (a part of) it hold their
end before it until the rest is stored: readers never see half a commit. Commits are applied one at a
time, so two that share partitions cannot wait for each other.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.broker import state
from headrace.broker.cursor import Cursor
from headrace.broker.topic import Partition
from headrace.errors import Conflict, HeadraceError, InvalidArgument, MessageNotFound
from headrace.log import batch as batches
from headrace.log.batch import LOST, Batch
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import (
    Message,
    TopicSettings,
    check_subscription_name,
    derive_id,
    parse_id,
    split_id,
    topic_hash,
)

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__staged"
KEEPER = "__staging"
_TOPIC_HEADER = "topic"
_PARTITION_HEADER = "partition"
Done = Callable[[HeadraceError | None], None]
StageDone = Callable[[uuid.UUID | None, HeadraceError | None], None]


class Decision:
    """A commit that will happen."""

    __slots__ = ("finished", "name", "number", "pieces")

    def __init__(self, name: str, number: int, pieces: list[int], finished: bool = False):
        self.name = name
        self.number = number
        self.pieces = pieces
        self.finished = finished

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "number": self.number,
            "pieces": self.pieces,
            "finished": self.finished,
        }

    @property
    def producer_id(self) -> int:
        digest = hashlib.sha256(f"{self.name}\0{self.number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & ~(1 << 63) | 1


class Staging:
    def __init__(self, engine: Engine):
        self._engine = engine
        self.decisions: dict[str, Decision] = {}
        """The newest of each name; the journal keeps these."""
        self._queue: deque[tuple[Decision, list[Done]]] = deque()
        self._applying: tuple[Decision, list[Done]] | None = None

    # --- starting ---------------------------------------------------------------------------
    def load(self, decisions: list[dict[str, Any]]) -> None:
        """Hide what an unfinished commit has already written, and finish it."""
        for item in decisions:
            decision = Decision(item["name"], item["number"], item["pieces"], item["finished"])
            self.decisions[decision.name] = decision
        for decision in self.decisions.values():
            if decision.finished:
                continue
            logger.warning("commit %s/%d is finished now", decision.name, decision.number)
            self._queue.append((decision, []))
            for partition in self._by_partition(decision):
                applied = partition.log.next_sequence(decision.producer_id)
                if applied:  # the last records there: nothing else was let in behind them
                    partition.log.hide_from(partition.log.end_offset - applied)
        if self._queue:
            self._engine.call_soon(self._next)

    # --- staging ----------------------------------------------------------------------------
    def stage(self, topic: str, partition: int | None, batch: Batch, done: StageDone) -> None:
        """Keep a checked batch out of sight; ``done`` gets the piece's id."""
        engine = self._engine
        engine.check_open()
        target = engine.topic_for_publish(topic)
        number = (
            target.next_partition() if partition is None else target.partition(partition).number
        )
        home = engine.topics.get(TOPIC)
        if home is None:
            home = engine.create_topic(
                TOPIC, TopicSettings(retention_hours=0.0, segment_bytes=64 << 20), internal=True
            )
            self._cursor()
        headers = {_TOPIC_HEADER: topic, _PARTITION_HEADER: str(number)}

        def stored(entry: Append) -> None:
            if entry.error is not None:
                done(None, entry.error)
            else:
                done(derive_id(topic_hash(TOPIC), 0, entry.first_offset), None)

        engine.append(home, 0, Append(Columns([batch.raw()], None, [headers]), None, stored))

    def _cursor(self) -> Cursor:
        engine = self._engine
        keeper = engine.subscription_or_none(KEEPER, TOPIC)
        if keeper is None:
            keeper = engine.subscribe(KEEPER, TOPIC, start="earliest", internal=True)
        return keeper.cursors[(TOPIC, 0)]

    def _offset(self, piece: uuid.UUID | str) -> int:
        parts = split_id(parse_id(piece))
        if parts is None or parts[0] != topic_hash(TOPIC):
            raise InvalidArgument(f"{piece} is not the id of a staged batch", code="invalid_piece")
        return parts[2]

    # --- committing -------------------------------------------------------------------------
    def commit(self, name: str, number: int, pieces: list[uuid.UUID | str], done: Done) -> None:
        """Show all pieces at once. Numbers of a name go up; a repeated one changes nothing."""
        engine = self._engine
        engine.check_open()
        check_subscription_name(name)
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise InvalidArgument(f"a commit's number is a whole number, not {number!r}")
        offsets = [self._offset(piece) for piece in pieces]
        known = self.decisions.get(name)
        if known is not None and number <= known.number:
            self._again(known, number, offsets, done)
            return
        for offset in offsets:
            if self._cursor().is_done(offset):
                raise MessageNotFound(
                    "a staged batch is gone: it was aborted, it expired, or it was committed "
                    "under another name",
                    code="piece_gone",
                )
            self._read(offset)
        decision = Decision(name, number, offsets)
        self.decisions[name] = decision

        def decided(error: HeadraceError | None) -> None:
            if error is not None:
                if self.decisions.get(name) is decision:
                    self._restore(name, known)
                done(error)
                return
            self._queue.append((decision, [done]))
            self._next()

        engine.state.write(_entry(decision), decided)

    def _restore(self, name: str, known: Decision | None) -> None:
        if known is None:
            del self.decisions[name]
        else:
            self.decisions[name] = known

    def _again(self, known: Decision, number: int, offsets: list[int], done: Done) -> None:
        """A repetition: wait for the first one, or say that it is done. Its own pieces go."""
        engine = self._engine
        leftover = [offset for offset in offsets if offset not in known.pieces]
        self._drop(leftover)
        if number < known.number or known.finished:
            engine.call_soon(done, None)
            return
        waiting = [*([self._applying] if self._applying else []), *self._queue]
        for decision, waiters in waiting:
            if decision is known:
                waiters.append(done)
                return
        raise Conflict(f"commit {known.name}/{number} is being decided; ask again", retryable=True)

    def abort(self, pieces: list[uuid.UUID | str], done: Done) -> None:
        """Give pieces up. What a commit has decided about is not touched."""
        self._engine.check_open()
        taken = {offset for decision in self.decisions.values() for offset in decision.pieces}
        offsets = [self._offset(piece) for piece in pieces]
        self._drop([offset for offset in offsets if offset not in taken])
        self._engine.state.flush(done)

    def expire_orphans(self) -> None:
        """What was staged a day ago and never committed belongs to a job that is gone."""
        self.expire(self._engine.now_ms() - limits.STAGED_KEPT_S * 1000)

    def expire(self, before_ms: int) -> int:
        """Drop pieces that nobody has committed since; returns how many."""
        home = self._engine.topics.get(TOPIC)
        if home is None:
            return 0
        log = home.partitions[0].log
        taken = {o for d in self.decisions.values() if not d.finished for o in d.pieces}
        end = log.offset_at(before_ms)
        stale = [offset for offset in self._cursor().undone(end) if offset not in taken]
        self._drop(stale)
        return len(stale)

    def _drop(self, offsets: list[int]) -> None:
        if offsets:
            cursor = self._cursor()
            for offset in offsets:
                cursor.done(offset)
            self._engine.changed(cursor)

    # --- applying ---------------------------------------------------------------------------
    def _read(self, offset: int) -> Message:
        log = self._engine.topics.find(TOPIC).partitions[0].log
        batch = log.read(offset, 1)[0]
        if batch.flags & LOST:
            raise MessageNotFound("a staged batch was lost", code="piece_gone")
        index = offset - batch.base_offset
        return batch.messages(TOPIC, 0, index, index + 1)[0]

    def _by_partition(self, decision: Decision) -> dict[Partition, list[Batch]]:
        found: dict[Partition, list[Batch]] = {}
        for offset in decision.pieces:
            message = self._read(offset)
            topic = self._engine.topics.get(message.headers[_TOPIC_HEADER])
            if topic is None:
                logger.error(
                    "commit %s/%d: topic %s was deleted meanwhile",
                    decision.name, decision.number, message.headers[_TOPIC_HEADER],
                )  # fmt: skip
                continue
            number = min(int(message.headers[_PARTITION_HEADER]), len(topic.partitions) - 1)
            batch = batches.parse(message.value)
            assert batch is not None, "staged batches are checked before they are stored"
            found.setdefault(topic.partitions[number], []).append(batch)
        return found

    def _next(self) -> None:
        if self._applying is not None or not self._queue or self._engine.failed is not None:
            return
        self._applying = self._queue.popleft()
        decision, _ = self._applying
        _Apply(self._engine, decision, self._by_partition(decision), self._applied).start()

    def _applied(self, error: HeadraceError | None) -> None:
        assert self._applying is not None
        decision, waiters = self._applying
        if error is not None:
            # It is decided, so it must happen: try again soon, and let the caller wait.
            logger.error("commit %s/%d: %s", decision.name, decision.number, error)
            self._queue.appendleft(self._applying)
            self._applying = None
            self._engine.call_later(1.0, self._next)
            return
        decision.finished = True
        self._drop(decision.pieces)
        decision.pieces = []

        def finished(failed: HeadraceError | None) -> None:
            for done in waiters:
                done(failed)

        self._applying = None
        self._engine.state.write(_entry(decision), finished)
        self._next()


class _Apply:
    """One commit on its way into its partitions."""

    def __init__(
        self,
        engine: Engine,
        decision: Decision,
        parts: dict[Partition, list[Batch]],
        done: Done,
    ):
        self._engine = engine
        self._decision = decision
        self._parts = parts
        self._done = done
        self._waiting = 1
        self._error: HeadraceError | None = None

    def start(self) -> None:
        producer_id = self._decision.producer_id
        for partition, pieces in self._parts.items():
            if not partition.log.is_held:
                partition.log.hold()
            applied = partition.log.next_sequence(producer_id)
            sequence = 0
            for batch in pieces:
                if sequence >= applied:
                    self._waiting += 1
                    partition.log.append(
                        Append(
                            None,
                            batch,
                            self._stored,
                            producer_id=producer_id,
                            first_sequence=sequence,
                            hidden=True,
                        )
                    )
                sequence += batch.count
        self._finish_one()

    def _stored(self, entry: Append) -> None:
        if entry.error is not None:
            self._error = entry.error
        self._finish_one()

    def _finish_one(self) -> None:
        self._waiting -= 1
        if self._waiting:
            return
        if self._error is None:
            # In one turn of the loop: nobody can look in between.
            for partition in self._parts:
                partition.log.release()
        self._done(self._error)


def _entry(decision: Decision) -> bytes:
    return state.decide(decision.as_dict())

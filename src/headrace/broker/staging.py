"""Staged batches and their atomic commit: how a job of many tasks writes exactly once.

Tasks *stage* batches: durable, but nobody sees them. The job then *commits* a list of pieces under a
name and a number, in one step: all of them appear in their partitions at once, or none. Committing the
same number again changes nothing, so a driver that does not know whether its commit arrived simply
repeats it. What is never committed is aborted, or expires.

A piece is a batch in the internal topic ``__staged``, exactly as it arrived. Its id says where it lies
and where it is to go, and is checked against what is there. A hidden subscription over that topic knows
which pieces are done. A commit goes through three steps, each of which survives a crash::

    decided   one journal entry (name, number, pieces): from here on it will happen
    applied   in every partition the end is held, the batches are stored behind it as an idempotent
              producer, then all ends are released in the same turn of the loop (``staged_commit.py``)
    finished  one journal entry; then the pieces are done, and their files go

After a crash between *decided* and *finished* the partitions that already have (a part of) it hold their
end before it until the rest is stored: readers never see half a commit. Commits are applied one at a
time, so two that share partitions cannot wait for each other, and of one name the next is not decided
before the last is finished.

A name is one idempotent producer, chosen at random among ids that no client may use when the name is first
seen, and each of its commits is the next epoch of it. If a partition knows a higher epoch all the same
(forged, when ids were not reserved yet), the commit gets a new producer and goes on. A commit that cannot go on
is tried again and again, because it is decided; ``trouble`` says so to who asks whether the broker is ready. A name that nobody has used for ``COMMIT_NAMES_KEPT_S`` is forgotten: should it
come back, it is a new one.

Pieces that were staged *for* a name and number are dropped when a commit of that name and number, or of
a later one, is finished without them: they are what failed attempts have left behind. Others stay for
``STAGED_KEPT_S``, and hold all that was staged after them for so long.

Delayed messages are pieces for the topic in which such messages wait (``schedule.py``), and begin to wait
when their commit is shown.

Rejected: a batch inside of a record, which costs two copies and a checksum for each byte; checking
every piece at its commit, because nothing can have happened to it since it was stored: only what was
staged before the broker's last start is read and checked before anything is decided.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.broker import state
from headrace.broker.cursor import Cursor
from headrace.broker.publishing import RESERVED_PRODUCERS
from headrace.broker.schedule import TOPIC as SCHEDULED
from headrace.broker.staged_commit import (
    CommitRun,
    Decision,
    StagedPiece,
    read_in_background,
    read_piece,
    target_of,
    unmade_target,
)
from headrace.broker.topic import Topic
from headrace.clock import Timer
from headrace.errors import (
    DataCorrupt,
    Done,
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    ProducerFenced,
    QueueFull,
    ReadOnly,
    TooLarge,
    refused_by_disk,
)
from headrace.log.batch import Batch
from headrace.log.interface import Append, ReadPending
from headrace.model import INTERNAL_PREFIX, TopicSettings, check_subscription_name

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__staged"
KEEPER = "__staging"
SEGMENT_BYTES = 64 << 20
SETTINGS = TopicSettings(retention_hours=0.0, segment_bytes=SEGMENT_BYTES)
ROLL_BYTES_MIN = 1 << 20
"""A segment of pieces that are all done is closed, to be deleted, if it has at least this much."""
RETRY_S = 1.0
StageDone = Callable[[str | None, HeadraceError | None], None]
CommitDone = Callable[[bool, HeadraceError | None], None]
"""Told whether this call was the first for its name and number."""


class Staging:
    def __init__(self, engine: Engine, random: Random):
        self._engine = engine
        self._random = random
        self.decisions: dict[str, Decision] = {}
        """The newest of each name, the one used longest ago first; the journal keeps these."""
        self._pieces: dict[int, StagedPiece] = {}
        """By offset, what is staged and known to be whole: since the start, or checked since."""
        self._owned: dict[str, dict[int, list[StagedPiece]]] = {}
        """Name -> number -> what was staged for that commit."""
        self._taken: set[int] = set()
        """Offsets of pieces of commits that are not finished."""
        self._queue: deque[Decision] = deque()
        self._applying: Decision | None = None
        self._retry: Timer | None = None
        self.trouble: str | None = None
        """Why a decided commit, and all that wait behind it, cannot go on; None if they can."""

    # --- starting and ending ------------------------------------------------------------------
    def load(self, items: Iterable[dict[str, Any]]) -> None:
        """Hide what an unfinished commit has already written, and finish it."""
        for decision in sorted(map(Decision.of, items), key=lambda decision: decision.time):
            self.decisions[decision.name] = decision
            if not decision.finished and self._is_applied(decision):
                decision.finished = True  # it was shown, too; only that was not written any more
            if decision.finished:
                self._drop(decision.pieces)
                decision.pieces = []
                continue
            logger.warning("commit %s/%d is finished now", decision.name, decision.number)
            self._taken.update(piece.offset for piece in decision.pieces)
            if self._hide(decision):
                self._queue.appendleft(decision)  # at most one: what it has begun comes first
            else:
                self._queue.append(decision)
        home = self._home()
        if home is not None and self._engine.lost_positions:
            # Nobody knows what of this was committed before the journal was damaged.
            self._expire_to(home.partitions[0].log.end_offset)
        if self._queue:
            self._engine.call_soon(self._next)

    def _is_applied(self, decision: Decision) -> bool:
        """Whether every partition has all that is meant for it."""
        wanted: dict[Any, int] = {}
        for piece in decision.pieces:
            partition = target_of(self._engine, piece)
            if partition is not None:
                wanted[partition] = wanted.get(partition, 0) + piece.records
        return all(
            decision.applied_in(partition.log) == count for partition, count in wanted.items()
        )

    def _hide(self, decision: Decision) -> bool:
        """Hold the ends of partitions before what they have of it; False: none has anything."""
        hidden = False
        for partition in {target_of(self._engine, piece) for piece in decision.pieces}:
            if partition is None:
                continue
            log = partition.log
            applied = decision.applied_in(log)
            last = log.last_producer_batch(decision.identity_in(log)[0])
            if applied and last is not None:
                log.hide_from(last[0] + last[1] - applied)
                hidden = True
        return hidden

    def close(self, error: HeadraceError) -> None:
        """The broker ends: whoever waits is told. What is decided is finished at the next start."""
        if self._retry is not None:
            self._retry.cancel()
        for decision in list(self.decisions.values()):
            decision.answer(error)

    def _later(self, step: Callable[[], None]) -> None:
        """Try a step of the commit that is being applied once more; there is only one at a time."""
        self._retry = self._engine.call_later(RETRY_S, step)

    # --- staging ----------------------------------------------------------------------------
    def stage(
        self,
        topic: str,
        partition: int | None,
        batch: Batch,
        done: StageDone,
        *,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> None:
        """Keep a checked batch out of sight; ``done`` gets the piece's id.

        The batch must be the caller's to give away: it is stored as it is. ``name`` and ``number``
        say for which commit it is meant. ``delayed``: its times say when each record is to be
        published, from its commit on.
        """
        engine = self._engine
        engine.check_open()
        if (name is None) != (number is None):
            raise InvalidArgument("give name and number, or neither", code="invalid_commit")
        if name is not None:
            check_commit(name, number)
        target = engine.topic_for_publish(topic)
        engine.budget.check(batch.stored_bytes)
        done = self._after(target, done)
        if delayed:
            if partition is not None:
                target.partition(partition)

            def prepared(made: Batch | None, error: HeadraceError | None) -> None:
                try:
                    if made is None:
                        raise error or InvalidArgument("there is nothing to stage")
                    engine.check_open()
                    kept = self._after(engine.schedule.home(), done)
                    self._keep(SCHEDULED, 0, made, kept, name, number)
                except HeadraceError as refusal:
                    done(None, refusal)

            engine.schedule.prepare(topic, partition, batch, prepared)
            return
        place = (
            target.next_partition(batch.stored_bytes)
            if partition is None
            else target.partition(partition).number
        )
        self._keep(topic, place, batch, done, name, number)

    def _after(self, topic: Topic, done: StageDone) -> StageDone:
        """``done``, when the topic is stored, too: a piece that is answered can be committed after a crash."""

        def staged(piece: str | None, error: HeadraceError | None) -> None:
            def made(refusal: HeadraceError | None) -> None:
                done(None if refusal is not None else piece, refusal)

            if error is not None:
                done(None, error)
            else:
                self._engine.topics.when_made(topic, made)

        return staged

    def _keep(
        self,
        topic: str,
        place: int,
        batch: Batch,
        done: StageDone,
        name: str | None,
        number: int | None,
    ) -> None:
        """Store a piece for a partition of a topic."""
        engine = self._engine
        home = self._home() or self._make_home()
        self._cursor()
        if not home.settings.durable:
            self._check_room(home, batch)

        def stored(entry: Append) -> None:
            if entry.error is not None:
                done(None, entry.error)
                return
            piece = StagedPiece(entry.first_offset, entry.count, place, topic)
            self._pieces[piece.offset] = piece
            if name is not None and number is not None:
                self._owned.setdefault(name, {}).setdefault(number, []).append(piece)
            done(piece.id(home.incarnation), None)

        engine.append(home, 0, Append(None, batch, stored, staged=True))

    def _home(self) -> Topic | None:
        return self._engine.topics.get(TOPIC)

    def _make_home(self) -> Topic:
        # In memory the bytes are counted, not the records.
        limit = None if self._engine.directory is not None else limits.OFFSET_MAX
        settings = SETTINGS.but({"max_queue_size": limit})
        return self._engine.create_topic(TOPIC, settings, internal=True)

    @staticmethod
    def _check_room(home: Topic, batch: Batch) -> None:
        if home.size_bytes() + batch.stored_bytes > limits.STAGED_MEMORY_BYTES_MAX:
            raise QueueFull(
                f"{home.size_bytes() >> 20} MiB are staged in memory, the limit is "
                f"{limits.STAGED_MEMORY_BYTES_MAX >> 20}; commit or abort some",
                code="staging_full",
            )

    def _cursor(self) -> Cursor:
        return self._engine.keeper(KEEPER, TOPIC).cursors[(TOPIC, 0)]

    # --- committing -------------------------------------------------------------------------
    def commit(self, name: str, number: int, pieces: list[Any], done: CommitDone) -> None:
        """Show all pieces at once. Numbers of a name go up; a repeated one changes nothing."""
        self._engine.check_open()
        check_commit(name, number)
        self._commit(name, number, parse_pieces(pieces), done)

    def _commit(
        self, name: str, number: int, given: list[tuple[int, StagedPiece]], done: CommitDone
    ) -> None:
        known = self.decisions.get(name)
        if known is not None and number <= known.number:
            self._again(known, number, given, done)
            return

        def once_more(error: HeadraceError | None) -> None:
            try:
                if error is not None:
                    raise error
                self._engine.check_open()
                self._commit(name, number, given, done)
            except HeadraceError as error:
                done(False, error)

        if known is not None and not known.finished:
            known.after.append(once_more)
            return
        pieces = [self._check_piece(incarnation, piece) for incarnation, piece in given]
        unmade = unmade_target(self._engine, pieces)
        if unmade is not None:  # if it cannot be, the commit is not decided
            self._engine.topics.when_made(unmade, once_more)
            return
        self._check_targets(pieces)
        unknown = [piece for piece in pieces if piece.offset not in self._pieces]
        if unknown:
            self._look_into(unknown, once_more)
        else:
            self._decide(name, number, pieces, done)

    def _check_piece(self, incarnation: int, piece: StagedPiece) -> StagedPiece:
        home = self._home()
        if (
            home is None
            or home.incarnation != incarnation
            or piece.offset in self._taken
            or piece.offset >= home.partitions[0].log.end_offset
            or self._cursor().is_done(piece.offset)
        ):
            raise MessageNotFound(
                "a staged batch is gone: it was aborted, it expired, or it was committed under another name",
                code="piece_gone",
            )
        internal = piece.topic.startswith(INTERNAL_PREFIX) and piece.topic != SCHEDULED
        if internal or self._pieces.get(piece.offset, piece) != piece:
            raise not_a_piece(piece.id(incarnation))
        return piece

    def _check_targets(self, pieces: list[StagedPiece]) -> None:
        """Once it is decided it has to happen, so whatever stands against it is looked for before."""
        topics: dict[str, int] = {}
        for piece in pieces:
            topics[piece.topic] = topics.get(piece.topic, 0) + piece.records
        for name, count in topics.items():
            topic = self._engine.topics.find(name)
            refusal = self._engine.publishing.refusal(topic, count)
            if refusal is not None:
                raise refusal
        if any(count > limits.COMMIT_RECORDS_MAX for count in topics.values()):
            raise TooLarge(
                f"a commit has at most {limits.COMMIT_RECORDS_MAX} records of one topic",
                code="commit_too_large",
            )
        for name, number in {(piece.topic, piece.partition) for piece in pieces}:
            why = self._engine.partition(name, number).log.read_only
            if why is not None:
                raise ReadOnly(why)

    def _look_into(self, pieces: list[StagedPiece], done: Done) -> None:
        """Pieces of an earlier run: are they what their ids say, and whole?"""
        log = self._engine.partition(TOPIC).log
        left = deque(pieces)

        def are_whole() -> bool:
            while left:
                if read_piece(log, left[0]) is None:
                    return False
                left.popleft()
            return True

        def looked(whole: bool | None, error: BaseException | None) -> None:
            if whole is False:
                done(
                    DataCorrupt("a staged batch is damaged, or was never there", code="piece_lost")
                )
            elif isinstance(error, OSError):
                done(refused_by_disk(error))
            elif error is not None:
                raise error
            else:
                self._pieces.update((piece.offset, piece) for piece in pieces)
                done(None)

        read_in_background(self._engine, log, are_whole, looked)

    def _decide(self, name: str, number: int, pieces: list[StagedPiece], done: CommitDone) -> None:
        known = self.decisions.pop(name, None)
        if (
            known is None
            or known.epoch == limits.EPOCH_MAX
            or known.producer < RESERVED_PRODUCERS  # of an earlier version: anybody may use it
        ):
            producer, epoch = self._new_producer(), 0
        else:
            producer, epoch = known.producer, known.epoch + 1
        decision = Decision(name, number, producer, epoch, pieces, self._engine.now_ms())
        decision.finished = not pieces
        decision.waiters.append((True, done))
        self.decisions[name] = decision
        self._taken.update(piece.offset for piece in pieces)

        def decided(error: HeadraceError | None) -> None:
            if error is not None:
                self._taken.difference_update(piece.offset for piece in pieces)
                del self.decisions[name]
                if known is not None:
                    self.decisions[name] = known
                decision.answer(error)
            elif not pieces:
                self._finished(decision)
            else:
                self._queue.append(decision)
                self._next()

        self._engine.state.write(_entry(decision), decided)

    def _new_producer(self) -> int:
        return RESERVED_PRODUCERS | self._random.getrandbits(63)

    def _again(
        self, known: Decision, number: int, given: list[tuple[int, StagedPiece]], done: CommitDone
    ) -> None:
        """A repetition waits until the commit is visible. Its own pieces are dropped."""
        self._drop(self._droppable(given))
        known.time = self._engine.now_ms()
        # After a restart an unfinished commit has no waiters; while it is recorded it has.
        if number == known.number and (known.waiters or not known.finished):
            known.waiters.append((False, done))
        else:
            self._engine.call_soon(done, False, None)

    def _droppable(self, given: list[tuple[int, StagedPiece]]) -> list[StagedPiece]:
        """Those that are here, and that no commit has decided about."""
        home = self._home()
        if home is None:
            return []
        end = home.partitions[0].log.end_offset
        return [
            piece
            for incarnation, piece in given
            if incarnation == home.incarnation
            and piece.offset not in self._taken
            and self._pieces.get(piece.offset, piece) == piece
            and piece.offset + piece.records <= end
        ]

    def last_commit(self, name: str, done: Callable[[int, HeadraceError | None], None]) -> None:
        """The number of the newest commit of the name, when it is visible; -1 if there is none."""
        known = self.decisions.get(name)
        if known is None:
            done(-1, None)
            return
        number = known.number
        self._again(known, number, [], lambda _, error: done(number, error))

    # --- giving up ----------------------------------------------------------------------------
    def abort(self, pieces: list[Any], done: Done) -> None:
        """Give pieces up. What a commit has decided about is not touched."""
        self._engine.check_open()
        self._drop(self._droppable(parse_pieces(pieces)))
        self._engine.state.flush(done)

    def expire_orphans(self, now: int | None = None) -> None:
        """What was staged a day ago and never committed belongs to a job that is gone. ``now``: when this began, because
        a log that has to fetch the answer is asked for the same time again."""
        if self._engine.failed or self._engine.closing:
            return
        now = self._engine.now_ms() if now is None else now
        try:
            self.expire(now - limits.STAGED_KEPT_S * 1000)
        except ReadPending as pending:
            pending.then(partial(self.expire_orphans, now))
            return
        except (HeadraceError, OSError) as error:  # the next round tries again
            logger.error("staged batches cannot be looked at: %s", error)
        self._forget_names(now - limits.COMMIT_NAMES_KEPT_S * 1000)
        self._let_go_of_files()

    def expire(self, before_ms: int) -> int:
        """Drop pieces that nobody has committed since; returns how many records that were."""
        home = self._home()
        if home is None:
            return 0
        log = home.partitions[0].log
        if self._cursor().position == log.end_offset:
            return 0
        return self._expire_to(log.offset_at(before_ms))

    def _expire_to(self, end: int) -> int:
        cursor = self._cursor()
        undone = cursor.undone_count(end)
        at = cursor.position
        kept = sorted(p for d in self.decisions.values() if not d.finished for p in d.pieces)
        for piece in kept:
            cursor.done_run(at, min(piece.offset, end))
            at = piece.offset + piece.records
        cursor.done_run(at, end)
        self._pieces = {o: p for o, p in self._pieces.items() if o >= end or o in self._taken}
        self._owned = {
            name: left for name, some in self._owned.items() if (left := _from(some, end))
        }
        self._engine.changed(cursor)
        return undone - cursor.undone_count(end)

    def _forget_names(self, before_ms: int) -> None:
        while self.decisions:
            oldest = next(iter(self.decisions.values()))
            too_many = len(self.decisions) > limits.COMMIT_NAMES_MAX
            if not oldest.finished or not (too_many or oldest.time < before_ms):
                return
            del self.decisions[oldest.name]

    def _drop(self, pieces: Iterable[StagedPiece]) -> None:
        """Pieces that are done, one way or the other."""
        if self._home() is None:
            return
        cursor = self._cursor()
        for piece in pieces:
            self._pieces.pop(piece.offset, None)
            cursor.done_run(piece.offset, piece.offset + piece.records)
        self._engine.changed(cursor)

    def _drop_owned(self, name: str, number: int) -> None:
        """What was staged for this commit or an earlier one and is in none of them."""
        owned = self._owned.get(name)
        if owned is None:
            return
        for old in [other for other in owned if other <= number]:
            self._drop(piece for piece in owned.pop(old) if piece.offset not in self._taken)
        if not owned:
            del self._owned[name]

    def _let_go_of_files(self) -> None:
        """Files of pieces that are all done are deleted, also the one that is being written."""
        home = self._home()
        if home is None:
            return
        partition = home.partitions[0]
        log = partition.log
        if self._cursor().position == log.end_offset:
            log.roll_soon(ROLL_BYTES_MIN)
        self._engine.retention.drop_done(partition)

    # --- applying ---------------------------------------------------------------------------
    def _next(self) -> None:
        engine = self._engine
        if self._applying is not None or not self._queue or engine.failed or engine.closing:
            return
        self._applying = decision = self._queue.popleft()
        home = self._home()
        log = None if home is None else home.partitions[0].log
        CommitRun(engine, log, decision, self._applied).start()

    def _applied(self, error: HeadraceError | None) -> None:
        decision = self._applying
        assert decision is not None
        engine = self._engine
        if error is not None:
            if not (engine.failed or engine.closing):
                # It is decided, so it must happen: try again soon, and let the caller wait.
                logger.error("commit %s/%d: %s", decision.name, decision.number, error)
                self.trouble = f"commit {decision.name}/{decision.number} cannot go on: {error}"
                if isinstance(error, ProducerFenced):
                    self._change_producer(decision)
                    return
                self._queue.appendleft(decision)
                self._applying = None
                self._later(self._next)
            return
        self.trouble = None
        decision.finished = True
        self._record()

    def _change_producer(self, decision: Decision) -> None:
        """A partition has fenced it off: store the rest under a new producer, which nobody knows."""
        decision.earlier.append((decision.producer, decision.epoch))
        decision.producer, decision.epoch = self._new_producer(), 0

        def write() -> None:
            self._engine.state.write(_entry(decision), written)

        def written(error: HeadraceError | None) -> None:
            if error is None:
                self._queue.appendleft(decision)
                self._applying = None
                self._next()
            elif not (self._engine.failed or self._engine.closing):
                self._later(write)  # the journal must know it first

        write()

    def _record(self) -> None:
        """Write that it is finished; only then may the pieces go."""
        decision, engine = self._applying, self._engine
        assert decision is not None

        def recorded(error: HeadraceError | None) -> None:
            if error is None:
                self._applying = None
                self._finished(decision)
                self._next()
            elif not (engine.failed or engine.closing):
                self._later(self._record)

        engine.state.write(_entry(decision), recorded)

    def _finished(self, decision: Decision) -> None:
        pieces, decision.pieces = decision.pieces, []
        self._taken.difference_update(piece.offset for piece in pieces)
        self._drop(pieces)
        self._drop_owned(decision.name, decision.number)
        home = self._home()
        if home is not None:
            self._engine.retention.drop_done(home.partitions[0])
        error = None
        if decision.lost:
            error = DataCorrupt(
                f"{decision.lost} records of commit {decision.name}/{decision.number} were damaged "
                "before they could be shown; readers find them missing, explicitly",
                code="records_lost",
            )
        decision.answer(error)


def _from(owned: dict[int, list[StagedPiece]], offset: int) -> dict[int, list[StagedPiece]]:
    """What lies at the offset or behind it."""
    left = {number: [p for p in some if p.offset >= offset] for number, some in owned.items()}
    return {number: some for number, some in left.items() if some}


def check_commit(name: object, number: object) -> None:
    check_subscription_name(name)
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise InvalidArgument(
            f"a commit's number is a whole number, not {number!r}", code="invalid_commit"
        )


def parse_pieces(pieces: object) -> list[tuple[int, StagedPiece]]:
    """(incarnation of the staging topic, piece) for each id."""
    if not isinstance(pieces, (list, tuple)):
        raise InvalidArgument(f"pieces are a list of ids, not {pieces!r}", code="invalid_piece")
    if len(pieces) > limits.COMMIT_PIECES_MAX:
        raise TooLarge(
            f"{len(pieces)} pieces are too many, the limit is {limits.COMMIT_PIECES_MAX}; stage "
            "larger batches",
            code="commit_too_large",
        )
    parsed = []
    for text in pieces:
        piece = StagedPiece.parse(text)
        if piece is None:
            raise not_a_piece(text)
        parsed.append(piece)
    if len({piece.offset for _, piece in parsed}) != len(parsed):
        raise InvalidArgument("the same piece is there twice", code="invalid_piece")
    return parsed


def not_a_piece(text: object) -> InvalidArgument:
    return InvalidArgument(
        f"{str(text)[:80]!r} is not the id of a staged batch", code="invalid_piece"
    )


def _entry(decision: Decision) -> bytes:
    return state.decide(decision.as_dict())

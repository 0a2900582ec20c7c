"""A decided commit on its way into its partitions. See ``staging.py`` for the whole of it.

Pieces are read in a worker, a few megabytes at a time, and handed to their partitions in order. At most
``COMMIT_WINDOW_BYTES`` are under way at once, however large the commit is, and the loop only passes them
on. The ends of all partitions are held from the beginning and released together.

A partition knows by the producer's sequence how much of the commit it has, so a run can begin again at
any point: after an error, and after a crash. Where the producer was fenced off, nothing of the commit is
stored, and it goes on there under another one: a commit's partition is held, so nobody can fence it midway.

A piece that cannot be read any more, though it was whole when its commit was decided, is stored as a
batch that is *lost*: the commit is shown, and readers get an explicit error for those records.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headrace import limits
from headrace.broker import schedule
from headrace.broker.topic import Partition, Topic
from headrace.errors import (
    DataCorrupt,
    Done,
    HeadraceError,
    OffsetOutOfRange,
    StorageFull,
    refused_by_disk,
)
from headrace.log import batch as batches
from headrace.log.batch import COLUMNS, COMPRESSION, LOST, Batch
from headrace.log.interface import Append, Log, ReadPending

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
Result = TypeVar("Result")
_ID = re.compile(r"([0-9a-f]{1,16})/([0-9]{1,19})/([0-9]{1,7})/([0-9]{1,4})/([\w.-]{1,249})", re.A)
READ_BYTES = 8 << 20
"""One job of a worker reads this much, and finishes its last piece."""
READ_PIECES_MAX = 64


class StagedPiece(NamedTuple):
    """A staged batch: where it lies, and where it is to go."""

    offset: int
    records: int
    partition: int
    topic: str

    def id(self, incarnation: int) -> str:
        return f"{incarnation:x}/{self.offset}/{self.records}/{self.partition}/{self.topic}"

    @classmethod
    def parse(cls, text: object) -> tuple[int, StagedPiece] | None:
        """(incarnation of the staging topic, piece), or None."""
        match = _ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return None
        incarnation, offset, count, partition, topic = match.groups()
        piece = cls(int(offset), int(count), int(partition), topic)
        if not 0 < piece.records <= limits.BATCH_RECORDS_MAX or piece.offset > limits.OFFSET_MAX:
            return None
        return int(incarnation, 16), piece


@dataclass(slots=True, eq=False)
class Decision:
    """A commit that will happen, or has."""

    name: str
    number: int
    producer: int
    epoch: int
    pieces: list[StagedPiece]
    time: int
    finished: bool = False
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """(producer, epoch) under which some partitions may have stored their part before another one was
    fenced off."""
    lost: int = 0
    """Records that could not be read any more."""
    waiters: list[tuple[bool, Callable[[bool, HeadraceError | None], None]]] = field(
        default_factory=list
    )
    """(whether it was the first, done) of the callers that wait for it."""
    after: list[Done] = field(default_factory=list)
    """Commits of the same name that are decided after it."""

    def answer(self, error: HeadraceError | None) -> None:
        """Tell all that wait; the commits after it are decided now, whatever became of this one."""
        waiters, self.waiters = self.waiters, []
        after, self.after = self.after, []
        for first, done in waiters:
            done(first, error)
        for go_on in after:
            go_on(None)

    def identity_in(self, log: Log) -> tuple[int, int]:
        """(producer, epoch) under which the partition stores its part: the one that it began with."""
        for producer, epoch in self.earlier:
            if log.next_sequence(producer, epoch):
                return producer, epoch
        return self.producer, self.epoch

    def applied_in(self, log: Log) -> int:
        """How many records of it the partition has."""
        return log.next_sequence(*self.identity_in(log))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "number": self.number,
            "producer": self.producer,
            "epoch": self.epoch,
            "time": self.time,
            "pieces": [list(piece) for piece in self.pieces],
            "finished": self.finished,
            **({"earlier": [list(identity) for identity in self.earlier]} if self.earlier else {}),
        }

    @classmethod
    def of(cls, item: dict[str, Any]) -> Decision:
        known = {name: item[name] for name in ("name", "number", "producer", "epoch", "time")}
        pieces = [StagedPiece(*piece) for piece in item["pieces"]]
        earlier = [(producer, epoch) for producer, epoch in item.get("earlier", ())]
        return cls(**known, pieces=pieces, finished=item["finished"], earlier=earlier)


def target_of(engine: Engine, piece: StagedPiece) -> Partition | None:
    """The partition that the piece is meant for; None when its topic was deleted meanwhile."""
    topic = engine.topics.get(piece.topic)
    if topic is None:
        return None
    return topic.partitions[min(piece.partition, len(topic.partitions) - 1)]


def unmade_target(engine: Engine, pieces: Iterable[StagedPiece]) -> Topic | None:
    """A topic that pieces are meant for and that is not stored yet; its logs are held."""
    for name in {piece.topic for piece in pieces}:
        topic = engine.topics.get(name)
        if topic is not None and topic.making is not None:
            return topic
    return None


def read_piece(log: Log, piece: StagedPiece) -> Batch | None:
    """The piece's batch, under a header of its own; None when it cannot be read any more.

    Any thread, for a log on disk. The body is shared with whatever is cached, the header is not.
    """
    try:
        batch = log.read(piece.offset, 1)[0]
    except (DataCorrupt, OffsetOutOfRange, FileNotFoundError, IndexError) as error:
        logger.error("a staged batch at offset %d cannot be read: %s", piece.offset, error)
        return None
    if batch.base_offset != piece.offset or batch.count != piece.records or batch.flags & LOST:
        return None
    return unstamped(batch)


def unstamped(batch: Batch) -> Batch:
    """The same records as a batch that has no place and no times of its own yet."""
    return Batch(batch.body, batch.body_crc, batch.count, batch.flags & (COLUMNS | COMPRESSION))


def _read_some(log: Log, pieces: Sequence[StagedPiece]) -> list[Batch | None]:
    """The first of the pieces, up to about ``READ_BYTES``."""
    found: list[Batch | None] = []
    size = 0
    for piece in pieces:
        batch = read_piece(log, piece)
        found.append(batch)
        size += 0 if batch is None else batch.stored_bytes
        if size >= READ_BYTES:
            break
    return found


def read_in_background(
    engine: Engine,
    log: Log,
    work: Callable[[], Result],
    done: Callable[[Result | None, BaseException | None], None],
) -> None:
    """Run ``work``, which reads the log, without holding up the loop; ``done`` gets the result.

    In a worker, where the log allows it. Otherwise on the loop: there the records are in memory, or
    ``work`` is called again when the log has fetched them.
    """
    if log.thread_safe_reads:
        engine.workers.submit(work, done)
        return

    def run() -> None:
        try:
            result = work()
        except ReadPending as pending:
            pending.then(run)
        except Exception as error:
            engine.call_soon(done, None, error)
        else:
            engine.call_soon(done, result, None)

    run()


@dataclass(slots=True, eq=False)
class CommitRun:
    """Stores the pieces of a decided commit, then shows them all at once."""

    _engine: Engine
    _log: Log | None
    _decision: Decision
    _done: Done
    _todo: deque[tuple[StagedPiece, Partition, int]] = field(default_factory=deque)
    """(piece, where it goes, its first record's sequence there)."""
    _held: dict[Partition, int] = field(default_factory=dict)
    _reading: bool = False
    _handing: bool = False
    _under_way: int = 0
    """Bytes that were handed to partitions and are not stored yet."""
    _error: HeadraceError | None = None

    def start(self) -> None:
        decision = self._decision
        unmade = unmade_target(self._engine, decision.pieces)
        if unmade is not None:  # deleted since it was decided, and created again
            self._engine.topics.when_made(unmade, lambda error: self.start())
            return
        sequences: dict[Partition, int] = {}
        for piece in decision.pieces:
            partition = target_of(self._engine, piece)
            if partition is None:
                logger.error(
                    "commit %s/%d: topic %s was deleted meanwhile",
                    decision.name, decision.number, piece.topic,
                )  # fmt: skip
                continue
            if partition not in self._held:
                log = partition.log
                if not log.is_held:
                    log.hold()
                self._held[partition] = decision.applied_in(log)
            sequence = sequences.get(partition, 0)
            sequences[partition] = sequence + piece.records
            if sequence >= self._held[partition]:
                self._todo.append((piece, partition, sequence))
        self._go_on()

    def _go_on(self) -> None:
        """Read more if there is room for it; end when there is nothing left to wait for."""
        if self._reading or self._handing:
            return
        if self._todo and self._error is None:
            if self._under_way < limits.COMMIT_WINDOW_BYTES:
                self._read()
        elif not self._under_way:
            self._end()

    def _read(self) -> None:
        self._reading = True
        pieces = [self._todo[n][0] for n in range(min(len(self._todo), READ_PIECES_MAX))]
        log = self._log
        if log is None:  # the topic was deleted, with all pieces
            self._engine.call_soon(self._was_read, [None] * len(pieces), None)
        else:
            read_in_background(self._engine, log, lambda: _read_some(log, pieces), self._was_read)

    def _was_read(self, found: list[Batch | None] | None, error: BaseException | None) -> None:
        self._reading = False
        if isinstance(error, OSError):
            self._error = refused_by_disk(error)
        elif error is not None:
            raise error
        else:
            assert found is not None
            self._handing = True
            for batch in found:
                self._hand_over(*self._todo.popleft(), batch)
            self._handing = False
        self._go_on()

    def _hand_over(
        self, piece: StagedPiece, partition: Partition, sequence: int, batch: Batch | None
    ) -> None:
        if batch is None:
            self._decision.lost += piece.records
            batch = batches.lost(0, piece.records, 0)
        producer, epoch = self._decision.identity_in(partition.log)
        entry = Append(
            None,
            batch,
            self._stored,
            producer_id=producer,
            producer_epoch=epoch,
            first_sequence=sequence,
            hidden=True,
        )
        self._under_way += entry.bytes
        topic = self._engine.topics.get(partition.topic)
        if topic is not None:
            topic.published_bytes += entry.bytes
        partition.log.append(entry)

    def _stored(self, entry: Append) -> None:
        self._under_way -= entry.bytes
        if entry.error is not None and self._error is None:
            self._error = entry.error
            if isinstance(entry.error, StorageFull):
                self._engine.guard.hit_the_wall()
        self._go_on()

    def _end(self) -> None:
        if self._error is None:
            # In one turn of the loop: no reader sees a state in between.
            for partition in self._held:
                shown = partition.log.end_offset
                partition.log.release()
                if partition.topic == schedule.TOPIC:
                    self._engine.schedule.take_in(shown, partition.log.end_offset)
        self._done(self._error)

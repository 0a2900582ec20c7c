"""The interface between broker and log: everything that a log engine has to provide.

Two engines exist, ``partition.PartitionLog`` (disk) and ``memory.MemoryLog``; an engine over a
network is the third. The broker uses :class:`Storage`, which opens logs, and :class:`Log`, which is
one partition: records at gapless offsets from ``start_offset`` up to, but not including,
``end_offset``.

Every engine keeps these promises:
- All methods are called on the event loop's thread and return at once, except where ``thread_safe_reads``
  allows more.
- ``append`` never raises for a failure of storage: it answers through ``Append.done``, once, on the
  loop, with ``first_offset`` set or with ``error`` set. Entries are stored in the order of the calls.
- When ``done`` reports an offset, the record is as durable as the log's mode promises, and only
  then does ``end_offset`` move past it and ``on_advance`` run: no reader sees a record earlier.
- An error is definite (nothing of this entry was stored) unless it is ``OutcomeUnknown``.
- An offset that was returned once means the same bytes for ever, or an explicit error.
- A read (``read``, ``read_cached``, ``offset_at``, ``whereabouts``, ``closed_segments``) that has to wait for a disk or
  a network raises :class:`ReadPending` and begins to fetch. The caller reads again when the log tells it to. The log keeps
  fetched records for at least ``limits.READ_KEPT_S``, so that a caller that needs several reads
  gets all of them.

Rejected: reads as coroutines or with a callback. Every delivery reads, nearly always from memory,
and would pay a task or a closure for it. An exception costs nothing when it is not raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import HeadraceError, OutcomeUnknown
from headrace.log.batch import Batch
from headrace.log.columns import Columns
from headrace.model import TopicSettings

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Append:
    """Records to append to a log, together with the callback for the result.

    An entry has either ``columns`` (gathered with other waiting entries into one batch) or ``batch`` (a
    whole batch, checked, stored unchanged). With ``producer_id`` the entry is idempotent: it stays a batch
    of its own, and a repetition is not stored but answered with the first offset.
    """

    columns: Columns | None
    batch: Batch | None
    done: Callable[[Append], None]
    producer_id: int = 0
    producer_epoch: int = 0
    first_sequence: int = 0
    context: object = None
    hidden: bool = False
    """Stored after a held end; shown when the log is released."""
    refusal: HeadraceError | None = None
    """Of an idempotent entry: why it is not stored if it is new. A repetition is answered all the same."""
    at_once: bool = False
    """Its commit need not wait for others of this turn of the loop: they are gathered in it already."""
    staged: bool = False
    """A whole batch that waits here for its commit: its times are not changed."""
    copied: bool = False
    """A whole batch of another log, which goes to the same offset here: nothing of it is changed."""
    count: int = 0
    bytes: int = 0
    first_offset: int = -1
    timestamp: int = 0
    duplicate: bool = False
    error: HeadraceError | None = None
    then: Callable[[Append], None] | None = None
    """The caller's ``done``, while the broker counts the entry's memory."""

    def __post_init__(self) -> None:
        if self.batch is not None:
            self.count = self.batch.count
            self.bytes = self.batch.stored_bytes
        else:
            assert self.columns is not None
            self.count = len(self.columns.values)
            self.bytes = _size(self.columns)

    @classmethod
    def of_batch(cls, batch: Batch, done: Callable[[Append], None]) -> Append:
        """A batch as a producer has numbered it."""
        return cls(None, batch, done, batch.producer_id, batch.producer_epoch, batch.first_sequence)

    def fail(self, error: HeadraceError) -> None:
        self.error = error
        self.done(self)


def _size(columns: Columns) -> int:
    """The approximate size of the records; it bounds queues and gathered batches."""
    size = sum(map(len, columns.values)) + 64 * len(columns.values)
    if columns.keys is not None:
        size += sum([len(key) for key in columns.keys if key])
    if columns.headers is not None:
        for headers in columns.headers:
            if headers:
                size += sum(map(len, headers)) + sum(map(len, headers.values())) + 8 * len(headers)
    return size


# --- reading --------------------------------------------------------------------------------------
class ReadPending(Exception):
    """The log does not have the records yet and fetches them.

    This is not an error, so it is not a :class:`HeadraceError`: callers either pass it on or call ``then``.
    """

    def __init__(
        self,
        then: Callable[[Callable[[], None]], None],
        leave: Callable[[Callable[[], None]], None] = lambda callback: None,
    ):
        super().__init__("the records are being fetched")
        self.then = then
        """Takes a callback, which runs once, on the loop, when the caller should read again."""
        self.leave = leave
        """Takes a callback that was given to ``then``: the caller does not want the records any more."""

    @classmethod
    def for_all(cls, pending: Sequence[ReadPending]) -> ReadPending:
        """For a caller that needs several reads: when it should do all of them again."""
        counting: dict[Callable[[], None], Callable[[], None]] = {}

        def then(callback: Callable[[], None]) -> None:
            left = len(pending)

            def one_is_there() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    callback()

            counting[callback] = one_is_there
            for each in pending:
                each.then(one_is_there)

        def leave(callback: Callable[[], None]) -> None:
            for each in pending:
                each.leave(counting[callback])

        return cls(then, leave)


async def completed(
    read: Callable[[], Result], before: Callable[[], Awaitable[None]] | None = None
) -> Result:
    """The result of ``read``, which is called again after each :class:`ReadPending`; each time after ``before``."""
    while True:
        if before is not None:
            await before()
        try:
            return read()
        except ReadPending as pending:
            fetched, leave = asyncio.Event(), pending.leave
            pending.then(fetched.set)
        try:
            await fetched.wait()
        except asyncio.CancelledError:
            leave(fetched.set)
            raise


class Whereabouts(NamedTuple):
    """A part of a file that holds whole batches, one after the other.

    The first batch may begin before the requested offset. After ``end_offset`` there may be
    batches that are not confirmed yet.
    """

    path: Path
    identity: str
    position: int
    length: int


class ClosedSegment(NamedTuple):
    """Records that retention can drop together."""

    base_offset: int
    end_offset: int
    bytes: int
    max_timestamp: int


class Log(Protocol):
    """One partition, as the broker sees it."""

    start_offset: int
    end_offset: int
    durable: bool
    """Whether the records survive the end of the process. If not, the broker drops records that every
    subscription has finished, and ``drop_before`` is exact."""
    thread_safe_reads: bool
    """Whether reads may be called from any thread; in other threads than the loop's they block, and never
    raise :class:`ReadPending`."""
    read_only: str | None
    """Why publishes are refused, or None."""
    owned: bool
    """Whether this node serves the partition. If not, it can be read here, and ``append`` passes entries on."""
    on_advance: Callable[[], None]
    """Called on the loop whenever ``end_offset`` has grown."""

    def append(self, entry: Append) -> None:
        """Store the entry; answered through ``entry.done``."""

    def read(self, offset: int, max_bytes: int = ...) -> list[Batch]:
        """Whole batches, beginning with the one that holds ``offset``; at least one, except at the end.

        :class:`OffsetOutOfRange` outside of start..end, :class:`DataCorrupt` for a damaged range.
        """

    def read_cached(self, offset: int) -> Batch:
        """The batch that holds the offset, kept for the next reader. On the loop only.

        Raises like ``read``, and :class:`OffsetOutOfRange` at the end.
        """

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset whose record is not older than the time, or ``end_offset``."""

    def whereabouts(self, offset: int) -> Whereabouts | None:
        """The file and position of the records from ``offset`` on; None if they are in no file."""

    def hold(self) -> None:
        """Do not move ``end_offset`` until ``release``; only hidden entries are stored until then."""

    @property
    def is_held(self) -> bool: ...

    def hide_from(self, offset: int) -> None:
        """At a start: hold the end at an offset, to hide records that are already stored after it."""

    def release(self) -> None:
        """Show all hidden entries, at once."""

    def last_producer_batch(self, producer_id: int) -> tuple[int, int] | None:
        """(offset, count) of the producer's newest batch, if it is still known."""

    def next_sequence(self, producer_id: int, epoch: int | None = None) -> int:
        """The sequence that the producer's next record must have; 0 for an unknown producer.

        With an epoch: also 0 if the producer is known with another epoch.
        """

    def producers_dump(self) -> bytes:
        """The table of idempotent producers as a snapshot (``producers.py``), with hidden batches."""

    def readable_from(self, offset: int) -> int:
        """The first offset at or after this one that is not damaged. Like ``read``, it may take time."""

    def size_bytes(self) -> int: ...

    def closed_segments(self) -> list[ClosedSegment]:
        """The units that retention by age and size can drop, oldest first."""

    def roll_if_old(self, now_ms: int) -> None:
        """Close the active segment if it is too old, so that retention can delete it."""

    def roll_soon(self, bytes_min: int) -> None:
        """Close the active segment after the waiting entries, if it has this many bytes."""

    def drop_before(self, offset: int) -> None:
        """Drop records before the offset, as far as whole segments allow."""

    def change(self, settings: TopicSettings) -> None:
        """Use new settings of the topic from the next commit on."""

    def close(self, done: Callable[[], None]) -> None:
        """Store the waiting entries, release everything, then call ``done`` on the loop."""


# --- topics in storage ----------------------------------------------------------------------------
class TopicRecord(NamedTuple):
    """A topic as it is stored.

    ``incarnation`` distinguishes it from an earlier topic of the same name, so that a subscription's
    position in the deleted topic is not taken for a position in the new one.
    """

    name: str
    settings: TopicSettings
    incarnation: int
    created_ms: int
    owner: str | None = None
    """The principal that created it; None: an administrator, the broker itself, or an older version."""
    adopted: bool = False
    """Its settings were lost, and nobody has set them since."""


class Creation(NamedTuple):
    """A new topic. Its logs take entries at once, and keep them until it is stored."""

    logs: list[Log]
    store: Callable[[], None]
    """Makes the topic durable. It takes long, and may be called in any thread. If it raises, the topic does not
    exist."""
    finish: Callable[[HeadraceError | None], None]
    """On the loop, after ``store``: the logs store what waits in them, or refuse it with the error."""


class Deletion(NamedTuple):
    """A deleted topic: no later start finds it."""

    finish: Callable[[Callable[[], None]], None]
    """Frees the space after the logs are closed, then calls back on the loop."""
    unsure: OutcomeUnknown | None = None
    """Why the topic may exist again after a crash; None if it cannot."""


class LastStop(NamedTuple):
    """How the last owner of a log stopped, and how far the log had come."""

    suspect: bool = False
    """It stopped because a sync failed; unsynced bytes are not trusted."""
    unclean: bool = False
    """It did not stop cleanly, and why is unknown."""
    reached: int = 0
    """All offsets before this one were once on disk, so what is missing of them is damage."""


CLEAN = LastStop()


class Storage(Protocol):
    """Creates, lists, opens and deletes the topics of one broker. Only a storage knows the engines."""

    durable: bool
    """False: nothing survives the end of the process, so every topic is in memory."""
    slot_of: Callable[[str, int], int] | None
    """With several nodes: the slot of a topic's partition. Whoever owns a slot owns its partitions, and their state."""
    on_sync: Callable[[float], None]
    """Called after each sync with its duration in seconds."""
    on_commit: Callable[[float, int], None]
    """Called after each commit with the seconds since the first entry arrived, and the number of records."""

    def topics(self, defaults: TopicSettings) -> list[TopicRecord]:
        """Every stored topic. A topic whose settings are lost gets ``defaults``."""

    def create(self, topic: TopicRecord) -> list[Log]:
        """Store a new topic and open its partitions. If it raises OSError, the topic does not exist.

        ``create``, ``add`` and ``save`` take long, and may be called in any thread: no two of them for one
        topic at a time.
        """

    def begin(self, topic: TopicRecord) -> Creation:
        """``create`` for a caller that cannot wait: nothing is stored yet."""

    def add(self, topic: TopicRecord, numbers: range) -> list[Log]:
        """Open partitions that are new. Raises OSError if that fails."""

    def save(self, topic: TopicRecord) -> None:
        """Store changed settings. Raises OSError if that fails."""

    def open(self, topic: TopicRecord, number: int, stop: LastStop = CLEAN) -> Log:
        """The log of a partition, created if it does not exist."""

    def delete(self, topic: TopicRecord) -> Deletion:
        """Delete the topic, so that the next start does not find it. If it raises, nothing has changed."""

    def close(self) -> None:
        """Release what the storage itself holds; its logs are closed. May block for a moment."""


class StateLog(Protocol):
    """The journal of the broker's own state: a file (``journal.Journal``), or what another engine offers.

    All methods block; one at a time. They raise OSError if nothing was stored, or if the caller has to write
    everything again, and SyncFailed if the broker must stop.
    """

    damaged: int
    """Entries that could not be read."""
    size: int

    def open(self) -> list[bytes] | None:
        """All entries, oldest first; None if there never was a journal."""

    def append(self, payloads: list[bytes]) -> None: ...

    def rewrite(self, payloads: list[bytes]) -> None:
        """Replace everything by these."""

    @property
    def wants_rewrite(self) -> bool: ...

    def close(self) -> None: ...

"""The line between broker and log: what another engine (say, a replicated one) has to offer.

A log is one partition: records at gapless offsets from ``start_offset`` up to, but not including,
``end_offset``. All methods are called on the event loop's thread, except ``read`` and ``offset_at``,
which may be called from any thread; none of them blocks on more than a read from the page cache or
disk.

The promises every engine keeps:
- ``append`` never raises for what is its business: it answers through ``Append.done``, once, on the
  loop, with ``first_offset`` set or with ``error`` set. Entries are stored in the order of the calls.
- When ``done`` reports an offset, the record is as durable as the log's mode promises, and only
  then does ``end_offset`` move past it and ``on_advance`` run: nobody sees a record earlier.
- An error is definite (nothing of this entry was stored) unless it is ``OutcomeUnknown``.
- An offset, once given out, means the same bytes for ever or an explicit error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.log.batch import Batch
from headrace.log.columns import Columns


class Append:
    """Records on their way into a log, together with whoever waits for them.

    Either ``columns`` (gathered with what else is waiting into one batch) or ``batch`` (a whole
    one, checked, stored as it is). With ``producer_id`` the entry is idempotent: it stays a batch
    of its own, and a repetition is answered with the first offset and stored once.
    """

    __slots__ = (
        "batch",
        "bytes",
        "columns",
        "context",
        "count",
        "done",
        "duplicate",
        "error",
        "first_offset",
        "first_sequence",
        "hidden",
        "producer_epoch",
        "producer_id",
        "staged",
        "timestamp",
    )

    def __init__(
        self,
        columns: Columns | None,
        batch: Batch | None,
        done: Callable[[Append], None],
        *,
        producer_id: int = 0,
        producer_epoch: int = 0,
        first_sequence: int = 0,
        context: object = None,
        hidden: bool = False,
        staged: bool = False,
    ):
        self.columns = columns
        self.batch = batch
        self.done = done
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.first_sequence = first_sequence
        self.context = context
        self.hidden = hidden
        """Stored behind a held end; shown when the log is released."""
        self.staged = staged
        """A whole batch that is only kept here: its times are left as they are."""
        if batch is not None:
            self.count = batch.count
            self.bytes = batch.stored_bytes
        else:
            assert columns is not None
            self.count = len(columns.values)
            self.bytes = _size(columns)
        self.first_offset = -1
        self.timestamp = 0
        self.duplicate = False
        self.error: HeadraceError | None = None

    def fail(self, error: HeadraceError) -> None:
        self.error = error
        self.done(self)


def _size(columns: Columns) -> int:
    """About how many bytes the records take; what bounds queues and gathered batches counts this."""
    size = sum(map(len, columns.values)) + 64 * len(columns.values)
    if columns.keys is not None:
        size += sum([len(key) for key in columns.keys if key])
    if columns.headers is not None:
        for headers in columns.headers:
            if headers:
                size += sum(map(len, headers)) + sum(map(len, headers.values())) + 8 * len(headers)
    return size


class Whereabouts(NamedTuple):
    """A part of a file that holds whole batches, one behind the other.

    The first one may be before the one that was asked for; and behind ``end_offset`` there may be
    some that nobody was promised yet.
    """

    path: Path
    identity: str
    position: int
    length: int


class Log(Protocol):
    """One partition, as the broker sees it."""

    start_offset: int
    end_offset: int
    read_only: str | None
    """Why publishes are refused, or None."""
    on_advance: Callable[[], None]
    """Called on the loop whenever ``end_offset`` has grown."""

    def append(self, entry: Append) -> None:
        """Store the entry; answered through ``entry.done``."""

    def read(self, offset: int, max_bytes: int = ...) -> list[Batch]:
        """Whole batches from the one that holds ``offset`` on, at least one unless at the end.

        :class:`OffsetOutOfRange` outside of start..end, :class:`DataCorrupt` for a damaged range.
        """

    def whereabouts(self, offset: int) -> Whereabouts | None:
        """Where the records from ``offset`` on lie; None when that is not in a file."""

    def read_cached(self, offset: int) -> Batch:
        """The batch that holds the offset, kept for the next reader. On the loop only."""

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset whose record is not older than the time, or ``end_offset``."""

    def drop_before(self, offset: int) -> None:
        """Forget what lies before the offset, as far as whole units allow."""

    def hold(self) -> None:
        """Keep ``end_offset`` where it is; only hidden entries are stored meanwhile."""

    def release(self) -> None:
        """Show all that was stored hidden, at once."""

    def size_bytes(self) -> int: ...

    def last_producer_batch(self, producer_id: int) -> tuple[int, int] | None:
        """(offset, count) of the producer's newest batch, if it is still known."""

    def next_sequence(self, producer_id: int, epoch: int | None = None) -> int:
        """The sequence that the producer's next record must have; 0 for one not known.

        With an epoch: 0, too, when the producer is known by another one.
        """

    def close(self, done: Callable[[], None]) -> None:
        """Write and sync what waits, give up the files, then call ``done`` on the loop."""

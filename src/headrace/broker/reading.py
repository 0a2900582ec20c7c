"""Which partitions of a subscription have something to read, and whose turn it is.

One batch of each partition in turn. A partition that cannot be read does not stop the others. At
damage it is *blocked* until the subscription is moved past it; after an error of the disk it is tried
again a moment later; a partition whose log still fetches the records waits until they have come; where
retention was faster, reading continues with the first record that exists.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.cursor import Cursor
from headrace.broker.delivery import Context, Tally
from headrace.clock import Timer
from headrace.errors import DataCorrupt, OffsetOutOfRange
from headrace.log.batch import Batch
from headrace.log.interface import ReadPending

logger = logging.getLogger("headrace.broker")
PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class Reading:
    _name: str
    _context: Context
    _tally: Tally
    _wake: Callable[[], None]
    _queue: deque[Cursor] = field(default_factory=deque)
    _queued: set[int] = field(default_factory=set)
    """Numbers of the cursors in the queue, and of those that wait for their log."""
    _pending: set[int] = field(default_factory=set)
    """Numbers of the cursors that wait for their log."""
    _paused: dict[int, Timer] = field(default_factory=dict)
    """By the number of the cursor, whose partition cannot be read now."""

    def __len__(self) -> int:
        """How many partitions are to be read."""
        return len(self._queue)

    @property
    def is_fetching(self) -> bool:
        return bool(self._pending)

    def advanced(self, cursor: Cursor) -> None:
        """There may be something to read at the cursor."""
        if self._enqueue(cursor):
            self._wake()

    def _enqueue(self, cursor: Cursor) -> bool:
        if (
            cursor.number in self._queued
            or cursor.blocked is not None
            or cursor.next >= cursor.partition.log.end_offset
        ):
            return False
        self._queued.add(cursor.number)
        self._queue.append(cursor)
        return True

    def next(self, may_read: Callable[[Cursor], bool]) -> tuple[Cursor, Batch] | None:
        """A cursor and the batch at it, or None when there is nothing to read.

        Partitions for which ``may_read`` says no keep their place and hold up no other.
        """
        refused = 0
        while refused < len(self._queue):
            cursor = self._queue[0]
            if cursor.next >= cursor.partition.log.end_offset or cursor.blocked is not None:
                self._dequeue(cursor)
            elif not may_read(cursor):
                self._queue.rotate(-1)
                refused += 1
            else:
                batch = self._read(cursor)
                if batch is not None:
                    return cursor, batch
        return None

    def _read(self, cursor: Cursor) -> Batch | None:
        try:
            return cursor.partition.log.read_cached(cursor.next)
        except ReadPending as pending:
            self._queue.remove(cursor)
            self._pending.add(cursor.number)
            pending.then(lambda: self._fetched(cursor))
        except OffsetOutOfRange:
            self._skip_missing(cursor)
        except DataCorrupt as error:
            self._block(cursor, error.message)
        except OSError as error:
            self._block(cursor, f"cannot be read: {error}")
            self._paused[cursor.number] = self._context.call_later(PAUSE_S, self._resume, cursor)
        return None

    def read(self, cursor: Cursor, offset: int) -> None:
        """Everything before the offset was read; the other partitions have their turn first."""
        cursor.next = offset
        self._dequeue(cursor)
        self._enqueue(cursor)

    def forget(self, cursor: Cursor) -> None:
        """The cursor is moved, or gone."""
        self._dequeue(cursor)
        if (timer := self._paused.pop(cursor.number, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()

    def _dequeue(self, cursor: Cursor) -> None:
        if cursor.number in self._queued:
            self._queued.remove(cursor.number)
            if cursor.number in self._pending:
                self._pending.remove(cursor.number)
            else:
                self._queue.remove(cursor)

    def _fetched(self, cursor: Cursor) -> None:
        """The log has what it was asked for, or an error to raise."""
        if cursor.number in self._pending:
            self._dequeue(cursor)
            self.advanced(cursor)

    def _skip_missing(self, cursor: Cursor) -> None:
        """Retention has overtaken the subscription: continue with the first record that exists."""
        start = cursor.partition.log.start_offset
        logger.warning(
            "subscription %s lost %d messages of %s/%d to retention (offsets %d to %d)",
            self._name,
            start - cursor.next,
            cursor.partition.topic,
            cursor.partition.number,
            cursor.next,
            start - 1,
            extra=self._about(cursor),
        )
        self._tally.lost += start - cursor.next
        cursor.done_run(cursor.next, start)
        cursor.next = start
        self._context.changed(cursor)

    def _block(self, cursor: Cursor, why: str) -> None:
        cursor.blocked = why
        self._dequeue(cursor)
        logger.error(
            "subscription %s stops at %s/%d offset %d: %s",
            self._name,
            cursor.partition.topic,
            cursor.partition.number,
            cursor.next,
            why,
            extra=self._about(cursor),
        )

    def _about(self, cursor: Cursor) -> dict[str, str]:
        """Fields of a line in the log."""
        return {"topic": cursor.partition.topic, "subscription": self._name}

    def _resume(self, cursor: Cursor) -> None:
        del self._paused[cursor.number]
        cursor.blocked = None
        self.advanced(cursor)

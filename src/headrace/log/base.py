"""The part of a log that disk and memory share: a held end, producers, and its callbacks.

While the end is *held*, hidden entries are stored after it and all other entries wait. ``release``
shows all hidden entries at once; the entries that waited follow. So a commit to many partitions
becomes visible in all of them in the same turn of the loop.

The log of a topic that is being created is held from the beginning: its entries wait until the topic is stored, or
fail if it cannot be (``abandon``).
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.clock import Clock, Loop
from headrace.errors import Closed, HeadraceError, OffsetOutOfRange
from headrace.log.commit import CommitGroup, gather
from headrace.log.interface import Append
from headrace.log.producers import Producers


class BaseLog:
    """See :class:`headrace.log.interface.Log`."""

    start_offset: int
    end_offset: int
    owned = True

    def __init__(self, clock: Clock, loop: Loop, producers: Producers):
        self._clock, self._loop = clock, loop
        self._producers = producers
        self._last_timestamp = 0
        self._next_offset = 0
        """The offset of the next record. Ahead of ``end_offset`` only while the end is held."""
        self._held = False
        self._parked: list[Append] = []
        self._closing: Callable[[], None] | None = None
        self._closed = False
        self.read_only: str | None = None
        self.failed: HeadraceError | None = None
        """Why it takes no entries any more."""
        self.on_advance: Callable[[], None] = lambda: None
        self.on_commit: Callable[[float, int], None] = lambda seconds, count: None

    # --- writing ----------------------------------------------------------------------------
    def _enqueue(self, entry: Append) -> None:
        """Add the entry to the next commit."""
        raise NotImplementedError

    def _put(self, entry: Append) -> None:
        if self._held and not entry.hidden:
            self._parked.append(entry)
        else:
            self._enqueue(entry)

    def _gather(self, entries: list[Append]) -> tuple[CommitGroup, list[Append]]:
        return gather(
            entries,
            end_offset=self._next_offset,
            last_timestamp=self._last_timestamp,
            now_ms=self._clock.now_ms(),
            producers=self._producers,
        )

    def _answer(self, entries: list[Append], *, shown: bool) -> None:
        """The entries are stored: tell readers, unless they are hidden, then the publishers."""
        try:
            if shown:
                self.on_advance()  # first: readers that wait for the message have waited longest
        finally:
            for entry in entries:
                entry.done(entry)

    # --- holding the end ----------------------------------------------------------------------
    @property
    def is_held(self) -> bool:
        return self._held

    def hold(self) -> None:
        """Entries that were appended earlier are not affected: their commit moves the end."""
        assert not self._held
        self._held = True

    def hide_from(self, offset: int) -> None:
        self.hold()
        self.end_offset = offset

    def release(self) -> None:
        assert self._held
        self._held = False
        if self._next_offset != self.end_offset:
            self.end_offset = self._next_offset
            # In the next turn, when a caller that releases several partitions has released all of them.
            self._loop.call_soon(self.on_advance)
        parked, self._parked = self._parked, []
        for entry in parked:
            self._enqueue(entry)

    def _refuse_parked(self) -> None:
        parked, self._parked = self._parked, []
        for entry in parked:
            entry.fail(self.failed or Closed("the log is closed"))

    def abandon(self, error: HeadraceError) -> None:
        """Its topic could not be created: entries that wait fail, and so do those that come later."""
        self.failed = error
        self.close(lambda: None)

    def close(self, done: Callable[[], None]) -> None:
        raise NotImplementedError

    # --- closing ----------------------------------------------------------------------------
    def _begins_to_close(self, done: Callable[[], None]) -> bool:
        """Whether this call is the first. ``done`` is called when the log is closed, whoever was the first."""
        if self._closed:
            done()
            return False
        first, self._closing = self._closing, done
        if first is None:
            return True

        def both() -> None:
            first()
            done()

        self._closing = both
        return False

    # --- asking -----------------------------------------------------------------------------
    def last_producer_batch(self, producer_id: int) -> tuple[int, int] | None:
        return self._producers.last(producer_id)

    def next_sequence(self, producer_id: int, epoch: int | None = None) -> int:
        return self._producers.next_sequence(producer_id, epoch)

    def producers_dump(self) -> bytes:
        return self._producers.dump()

    def readable_from(self, offset: int) -> int:
        return offset


def out_of_range(offset: int, start: int, end: int) -> OffsetOutOfRange:
    holds = f"holds {start} to {end - 1}" if end > start else f"is empty (next offset {end})"
    return OffsetOutOfRange(f"offset {offset} does not exist: the partition {holds}")

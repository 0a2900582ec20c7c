"""Messages of a subscription that are to be delivered again: at once, or when their time comes.

A message whose log still fetches it is *pending*, and ready again when the log has it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.broker.cursor import Cursor

Item = tuple[Cursor, int]


@dataclass(slots=True, eq=False)
class Retries:
    """``ready`` in the order in which they became so; ``later`` by the time they are due."""

    ready: deque[Item] = field(default_factory=deque)
    later: list[tuple[float, int, Cursor, int]] = field(default_factory=list)
    _pending: list[Item] = field(default_factory=list)
    _count: int = 0

    def __len__(self) -> int:
        return len(self.ready) + len(self.later) + len(self._pending)

    def __iter__(self) -> Iterator[Item]:
        yield from self.ready
        yield from ((cursor, offset) for _, _, cursor, offset in self.later)
        yield from self._pending

    @property
    def is_fetching(self) -> bool:
        return bool(self._pending)

    def add(self, cursor: Cursor, offset: int) -> None:
        self.ready.append((cursor, offset))

    def add_first(self, cursor: Cursor, offsets: list[int]) -> None:
        self.ready.extendleft([(cursor, offset) for offset in reversed(offsets)])

    def add_at(self, due: float, cursor: Cursor, offset: int) -> None:
        self._count += 1
        heapq.heappush(self.later, (due, self._count, cursor, offset))

    def wait_for_log(self, cursor: Cursor, offsets: Iterable[int]) -> None:
        self._pending += [(cursor, offset) for offset in offsets]

    def fetched(self) -> None:
        """The log has something: try the pending ones again."""
        self.ready.extend(self._pending)
        self._pending = []

    def collect(self, now: float) -> None:
        """Those whose time has come become ready."""
        while self.later and self.later[0][0] <= now:
            _, _, cursor, offset = heapq.heappop(self.later)
            self.ready.append((cursor, offset))

    def next_due(self) -> float | None:
        return self.later[0][0] if self.later else None

    def forget(self, cursor: Cursor, before: int | None = None) -> None:
        """Drop those of one partition; with ``before`` only what lies before that offset."""

        def stays(item_cursor: Cursor, offset: int) -> bool:
            return item_cursor is not cursor or (before is not None and offset >= before)

        self.ready = deque(item for item in self.ready if stays(*item))
        self._pending = [item for item in self._pending if stays(*item)]
        self.later = [item for item in self.later if stays(*item[2:])]
        heapq.heapify(self.later)

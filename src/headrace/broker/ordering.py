"""Order by key: which keys have a message under way, and what waits behind it.

A key is *busy* from the moment its message is handed out until that message is done, through all its
retries. Later messages of a busy key are parked, in order; when the key becomes free the first of
them takes its place at once, so no other message of the key can slip in between.
"""

from __future__ import annotations

from collections import deque

from headrace import limits
from headrace.broker.cursor import Cursor

Item = tuple[Cursor, int]


class KeyOrder:
    __slots__ = ("busy", "parked")

    def __init__(self) -> None:
        self.busy: set[bytes] = set()
        self.parked: dict[bytes, deque[Item]] = {}

    def has_room(self, cursor: Cursor) -> bool:
        return cursor.parked < limits.ORDERED_PARKED_MAX

    def park(self, key: bytes, cursor: Cursor, offset: int) -> None:
        self.parked.setdefault(key, deque()).append((cursor, offset))
        cursor.parked += 1

    def free(self, key: bytes) -> Item | None:
        """The key's message is done. Its next one, which keeps the key busy, or None."""
        waiting = self.parked.get(key)
        if not waiting:
            self.busy.discard(key)
            return None
        cursor, offset = waiting.popleft()
        cursor.parked -= 1
        if not waiting:
            del self.parked[key]
        return cursor, offset

    def forget(self, cursor: Cursor) -> None:
        """Drop what is parked of one partition."""
        for key, waiting in list(self.parked.items()):
            kept = deque(item for item in waiting if item[0] is not cursor)
            if kept:
                self.parked[key] = kept
            else:
                del self.parked[key]
        cursor.parked = 0

    def restart(self, held: set[bytes]) -> list[Item]:
        """Only ``held`` keys are busy now; returns what may go because its key is not."""
        self.busy = held | set(self.parked)
        freed = [self.free(key) for key in list(self.parked) if key not in held]
        return [item for item in freed if item is not None]

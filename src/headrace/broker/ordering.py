"""Order by key: which message holds a key, and which ones wait for it.

A key is *busy* from the moment its message is handed out until that message is done, through all its
retries and until its dead letter is stored. Later messages of a busy key are parked, in order; when
the key becomes free the first of them takes it over at once, so no other message of the key can slip
in between. The holder of a key is remembered by its offset, so that the key is freed even when the
message can no longer be read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace import limits
from headrace.broker.cursor import Cursor

Item = tuple[Cursor, int]


@dataclass(slots=True, eq=False)
class KeyOrder:
    busy: set[bytes] = field(default_factory=set)
    _held: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Cursor number -> offset -> the key that the message there holds."""
    _parked: dict[bytes, deque[Item]] = field(default_factory=dict)

    def has_room(self, cursor: Cursor) -> bool:
        return cursor.parked < limits.ORDERED_PARKED_MAX and not cursor.waiting

    def hold(self, key: bytes, cursor: Cursor, offset: int) -> None:
        """The message is handed out: its key is busy."""
        self.busy.add(key)
        self._held.setdefault(cursor.number, {})[offset] = key

    def park(self, key: bytes, cursor: Cursor, offset: int) -> None:
        self._parked.setdefault(key, deque()).append((cursor, offset))
        cursor.parked += 1

    def free(self, cursor: Cursor, offset: int) -> Item | None:
        """The message is done. The next one of its key, which holds the key now, or None."""
        held = self._held.get(cursor.number)
        key = held.pop(offset, None) if held else None
        return None if key is None else self._next(key)

    def _next(self, key: bytes) -> Item | None:
        waiting = self._parked.get(key)
        if not waiting:
            self.busy.discard(key)
            return None
        cursor, offset = waiting.popleft()
        cursor.parked -= 1
        if not waiting:
            del self._parked[key]
        self.hold(key, cursor, offset)
        return cursor, offset

    def forget(self, cursor: Cursor, before: int | None = None) -> list[Item]:
        """Drop the messages of one partition, or only those before an offset of it.

        Returns what may go now because its key is free.
        """

        def is_kept(item: Item) -> bool:
            return item[0] is not cursor or (before is not None and item[1] >= before)

        for key, waiting in list(self._parked.items()):
            kept = deque(item for item in waiting if is_kept(item))
            cursor.parked -= len(waiting) - len(kept)
            if kept:
                self._parked[key] = kept
            else:
                del self._parked[key]
        held = self._held.get(cursor.number, {})
        gone = [offset for offset in held if not is_kept((cursor, offset))]
        freed = [self._next(key) for key in [held.pop(offset) for offset in gone]]
        return [item for item in freed if item is not None]

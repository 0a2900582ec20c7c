"""How far each partition once reached, durably: what other files say about its end.

The end of a log cannot speak for itself: a last batch with a flipped bit looks like one that was never
completed. Two witnesses can tell:

- the mark of the last clean stop (``@run``, ``directory.py``): it has the end offset of each partition, and a
  running broker keeps the ends of the stop before, because a log never becomes shorter;
- the positions in the journal of subscriptions: a message is done only after it was delivered, and it is
  delivered only after it was on disk. This is true only for ``durability=always``.

Here is all that this package knows about the journal's entries (``broker/state.py`` writes them): ``K`` gives a
cursor its number, ``C`` moves it. The doctor reads them here, too.
"""

from __future__ import annotations

import struct

import orjson

from headrace.log.interface import TopicRecord

Ends = dict[str, tuple[int, list[int]]]
"""Topic -> (incarnation, end offset of each partition)."""
_CURSOR = struct.Struct("<IBQII")


class Witnesses:
    def __init__(self, ends: Ends | None = None):
        self._ends = ends or {}
        self._cursors: dict[int, tuple[str, int, int]] = {}
        """Cursor number -> (topic, incarnation, partition)."""
        self._highest: dict[int, int] = {}
        """Cursor number -> the offset after the highest that it says is done."""
        self._positions: dict[tuple[str, int], dict[int, int]] | None = None

    def add(self, payload: bytes) -> None:
        """An entry of the journal; ``ValueError`` or ``KeyError`` if it makes no sense."""
        kind = payload[:1]
        if kind == b"C":
            number, high = _reach(payload)
            if high > self._highest.get(number, 0):
                self._highest[number] = high
        elif kind == b"K":
            item = orjson.loads(payload[1:])
            number = item["cursor"]
            self._cursors[number] = (item["topic"], item["incarnation"], item["partition"])
            self._highest.pop(number, None)

    def ends(self, topic: TopicRecord) -> list[int]:
        """For each partition the offset that its log had reached; 0 if nobody knows."""
        settings = topic.settings
        found = [0] * settings.partitions
        incarnation, ends = self._ends.get(topic.name, (None, []))
        if incarnation == topic.incarnation:
            found[: len(ends)] = ends[: len(found)]
        if settings.durability == "always":
            by_partition = self._by_topic().get((topic.name, topic.incarnation), {})
            for number, high in by_partition.items():
                if number < len(found):
                    found[number] = max(found[number], high)
        return found

    def _by_topic(self) -> dict[tuple[str, int], dict[int, int]]:
        """(topic, incarnation) -> partition -> the highest position; computed when all entries are added."""
        if self._positions is None:
            self._positions = {}
            for cursor, (topic, incarnation, number) in self._cursors.items():
                highest = self._positions.setdefault((topic, incarnation), {})
                highest[number] = max(highest.get(number, 0), self._highest.get(cursor, 0))
        return self._positions


def _reach(payload: bytes) -> tuple[int, int]:
    """(cursor number, the offset after the highest that is done) of a ``C`` entry."""
    try:
        number, _, position, runs, _ = _CURSOR.unpack_from(payload, 1)
        edges = struct.unpack_from(f"<{2 * runs}Q", payload, 1 + _CURSOR.size)
    except struct.error as error:
        raise ValueError(str(error)) from None
    return number, max(position, *edges[1::2]) if runs else position

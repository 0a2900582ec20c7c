"""Logs whose reads complete later, as over a network.

``SlowStorage`` goes around another storage. The first read of a place raises ``ReadPending``; the log
has it after ``delay_s`` seconds (0: in the next turn of the loop) and keeps it as long as the
interface promises, no longer, so that a caller that asks too late waits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headrace import limits
from headrace.clock import Loop
from headrace.log.batch import Batch
from headrace.log.interface import (
    CLEAN,
    Creation,
    Deletion,
    LastStop,
    Log,
    ReadPending,
    Storage,
    TopicRecord,
)
from headrace.model import TopicSettings

Result = TypeVar("Result")


class SlowLog:
    """See :class:`headrace.log.interface.Log`. Everything but reading is that of the other log."""

    thread_safe_reads = False

    def __init__(self, log: Log, loop: Loop, delay_s: float):
        self._log, self._loop, self._delay_s = log, loop, delay_s
        self._fetching: dict[object, list[Callable[[], None]]] = {}
        self._fetched: dict[object, float] = {}
        self._runs: dict[int, int] = {}
        """Offset that was fetched -> the end of its batch."""
        self.waited = 0
        """Reads that had to wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    @property
    def on_advance(self) -> Callable[[], None]:
        return self._log.on_advance

    @on_advance.setter
    def on_advance(self, callback: Callable[[], None]) -> None:
        self._log.on_advance = callback

    def read(self, offset: int, max_bytes: int = limits.READ_BYTES_DEFAULT) -> list[Batch]:
        return self._later((offset, max_bytes), lambda: self._log.read(offset, max_bytes))

    def read_cached(self, offset: int) -> Batch:
        fetched = [first for first, end in self._runs.items() if first <= offset < end]
        batch = self._later(
            fetched[0] if fetched else offset, lambda: self._log.read_cached(offset)
        )
        if batch.count > 1:  # all of it was fetched
            self._runs[offset] = batch.end_offset
        return batch

    def offset_at(self, timestamp_ms: int) -> int:
        return self._later(f"at {timestamp_ms}", lambda: self._log.offset_at(timestamp_ms))

    def whereabouts(self, offset: int) -> None:
        return None

    def _later(self, place: object, read: Callable[[], Result]) -> Result:
        if self._loop.time() - self._fetched.get(place, -1e9) <= limits.READ_KEPT_S:
            return read()
        self.waited += 1
        if place not in self._fetching:
            self._fetching[place] = []
            if self._delay_s:
                self._loop.call_later(self._delay_s, self._arrived, place)
            else:
                self._loop.call_soon(self._arrived, place)
        raise ReadPending(self._fetching[place].append)

    def _arrived(self, place: object) -> None:
        self._fetched[place] = self._loop.time()
        for callback in self._fetching.pop(place):
            callback()


class SlowStorage:
    """See :class:`headrace.log.interface.Storage`. Opens slow logs over those of another storage."""

    def __init__(self, storage: Storage, loop: Loop, delay_s: float = 0.0):
        self._storage, self._loop, self._delay_s = storage, loop, delay_s
        self.durable, self.slot_of = storage.durable, storage.slot_of
        self.logs: list[SlowLog] = []

    @property
    def on_sync(self) -> Callable[[float], None]:
        return self._storage.on_sync

    @on_sync.setter
    def on_sync(self, callback: Callable[[float], None]) -> None:
        self._storage.on_sync = callback

    @property
    def on_commit(self) -> Callable[[float, int], None]:
        return self._storage.on_commit

    @on_commit.setter
    def on_commit(self, callback: Callable[[float, int], None]) -> None:
        self._storage.on_commit = callback

    def topics(self, defaults: TopicSettings) -> list[TopicRecord]:
        return self._storage.topics(defaults)

    def create(self, topic: TopicRecord) -> list[Log]:
        return [self._slow(log) for log in self._storage.create(topic)]

    def begin(self, topic: TopicRecord) -> Creation:
        creation = self._storage.begin(topic)
        return creation._replace(logs=[self._slow(log) for log in creation.logs])

    def add(self, topic: TopicRecord, numbers: range) -> list[Log]:
        return [self._slow(log) for log in self._storage.add(topic, numbers)]

    def save(self, topic: TopicRecord) -> None:
        self._storage.save(topic)

    def open(self, topic: TopicRecord, number: int, stop: LastStop = CLEAN) -> Log:
        return self._slow(self._storage.open(topic, number, stop))

    def delete(self, topic: TopicRecord) -> Deletion:
        return self._storage.delete(topic)

    def close(self) -> None:
        self._storage.close()

    def _slow(self, log: Log) -> Log:
        slow = SlowLog(log, self._loop, self._delay_s)
        self.logs.append(slow)
        return slow

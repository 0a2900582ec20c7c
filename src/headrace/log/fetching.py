"""Reads that would make the loop wait for a disk: a disk thread does them first.

On the loop, a read takes what is in memory: the cache of batches, an index that is loaded, an open file, and bytes that
the system has in its page cache (``Files.read_at_once``). If something of that is missing, or if damage has to be looked
for, the read ends with :class:`NotAtHand`. Then a disk thread does the same read and waits for the disk, and the reader
hears of it by :class:`ReadPending`, as from a log over a network::

    the loop                                   a disk thread
    read ──▶ at hand ──▶ batches
         └─▶ NotAtHand ─▶ ReadPending ───────▶ read: files are opened, pages come into the page cache
    read again ◀──── the callbacks run ◀─────────┘
         └─▶ at hand, or the error of the disk thread

Rules:
- A fetch keeps no records: they are in the page cache, where they count for nobody. It keeps its error, for those that
  have waited for it, and an answer that is as small as an offset, if the reader says so.
- If what was fetched is not at hand, and so it is fetched a second time (the page cache is too small, or too many files are
  read), the last few results are kept for a second: whoever reads comes to an end.
- Only a few fetches run at a time, and the others wait: one of each partition in turn, so that nobody waits for all that
  somebody else asks of another one. Commits use the same threads, and must find one that is free.
- A fetch serves all readers that ask for the same meanwhile. If all of them have left before it began, it does not begin:
  clients that ask and leave must not fill the queue.
- Where the file system does not tell what is in memory, a read that was fetched in the last seconds may wait: there is
  hardly anything to wait for.
- Other threads (``Broker.fetch``) do not come here: they may wait, and read by themselves.

Rejected: to ask the system to read ahead and to try again later (nobody says when the bytes are there, and an error of
the disk would never be reported); to keep whatever a thread has read (clients that ask and leave would fill the memory).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from headrace import limits
from headrace.clock import Loop, runs_here
from headrace.files import NotAtHand
from headrace.log.interface import ReadPending
from headrace.log.workers import Workers

Result = TypeVar("Result")
Key = tuple[Hashable, ...]
"""What is read; first of all, in which partition."""
ENDED_MAX = 16_384
"""Fetches that have ended and are remembered; more than partitions, because one request may ask all of them."""
RESULT_KEPT_S = 1.0


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch that waits, or is under way."""

    key: Key
    read: Callable[[bool], object]
    small: bool
    again: bool
    """It was fetched a moment ago, and was not at hand all the same."""
    readers: list[Callable[[], None]] = field(default_factory=list)
    """Those that wait for it."""


@dataclass(slots=True)
class _Ended:
    """A fetch that has ended. A caller that needs several reads begins again with the first, so it stays for a while."""

    at: float
    error: BaseException | None
    readers: int
    """Those that have not heard of the error yet."""
    answer: Any
    """If it is small."""


class Fetching:
    """The fetches of all partitions of a storage."""

    def __init__(self, loop: Loop, workers: Workers, most: int = limits.FETCHES_MAX):
        self._loop, self._workers, self._most = loop, workers, most
        self._fetches: dict[Key, _Fetch] = {}
        self._waiting: OrderedDict[Hashable, OrderedDict[Key, _Fetch]] = OrderedDict()
        """By their partitions. The one whose turn it is comes first."""
        self._under_way = 0
        self._ended: OrderedDict[Key, _Ended] = OrderedDict()
        self._results: OrderedDict[Key, tuple[float, Any]] = OrderedDict()
        """When, and what: of fetches that had to be repeated. Later reads forget them, at the latest those of retention."""

    def read(self, key: Key, read: Callable[[bool], Result], *, small: bool = False) -> Result:
        """``read(at_once)``; on the loop at once, or :class:`ReadPending`. ``small``: always in a disk thread
        first, and ``answer`` has the result."""
        if not runs_here(self._loop):
            return read(False)
        self._forget_results()
        ended = self._recent(key)
        if ended is not None and ended.error is not None and ended.readers:
            ended.readers -= 1
            raise ended.error.with_traceback(None)
        was_read = ended is not None and ended.error is None
        if (
            small and ended is None
        ):  # it takes longer than to ask for it: a request may do this for every partition
            self._fetch(key, read, small, was_read)
        try:
            return read(True)
        except NotAtHand as missing:
            if key in self._results:
                found: Result = self._results[key][1]
                return found
            if missing.unknown and was_read:
                return read(False)
        self._fetch(key, read, small, was_read)

    def answer(self, key: Key) -> Any:
        """The small answer of a fetch in the last seconds; None if there was none."""
        ended = self._recent(key) if runs_here(self._loop) else None
        return None if ended is None else ended.answer

    def _recent(self, key: Key) -> _Ended | None:
        ended = self._ended.get(key)
        if ended is not None and self._loop.time() - ended.at > limits.READ_KEPT_S:
            del self._ended[key]
            return None
        return ended

    def _fetch(
        self, key: Key, read: Callable[[bool], object], small: bool, again: bool
    ) -> NoReturn:
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = _Fetch(key, read, small, again)
            self._waiting.setdefault(key[0], OrderedDict())[key] = fetch
            self._begin()
        raise ReadPending(fetch.readers.append, partial(self._leave, fetch))

    def _leave(self, fetch: _Fetch, reader: Callable[[], None]) -> None:
        """The reader does not want it any more."""
        if reader not in fetch.readers:  # it was told
            return
        fetch.readers.remove(reader)
        waiting = self._waiting.get(fetch.key[0])
        if fetch.readers or waiting is None or waiting.pop(fetch.key, None) is None:
            return
        del self._fetches[fetch.key]
        if not waiting:
            del self._waiting[fetch.key[0]]

    def _begin(self) -> None:
        while self._waiting and self._under_way < self._most:
            partition, waiting = self._waiting.popitem(last=False)
            _, fetch = waiting.popitem(last=False)
            if waiting:
                self._waiting[partition] = waiting  # after those of the others
            self._under_way += 1
            self._workers.submit(partial(fetch.read, False), partial(self._end, fetch))

    def _end(self, fetch: _Fetch, result: object, error: BaseException | None) -> None:
        self._under_way -= 1
        key, readers = fetch.key, fetch.readers
        del self._fetches[key]
        if error is None and fetch.again:
            self._keep(key, result)
        if error is not None:  # the frames of its traceback hold what was read
            error = error.with_traceback(None)
            error.__context__ = None
        # Somebody who waits for several fetches may not have asked to hear of this one.
        count, answer = max(len(readers), 1), result if fetch.small else None
        self._ended[key] = _Ended(self._loop.time(), error, count, answer)
        self._ended.move_to_end(key)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for callback in readers:  # an error of one must not keep the others waiting
            self._loop.call_soon(callback)
        self._begin()

    def _keep(self, key: Key, result: object) -> None:
        self._results[key] = self._loop.time(), result
        self._results.move_to_end(key)
        if len(self._results) > self._most:
            self._results.popitem(last=False)

    def _forget_results(self) -> None:
        while self._results:
            key, (at, _) = next(iter(self._results.items()))
            if self._loop.time() - at <= RESULT_KEPT_S:
                break
            del self._results[key]

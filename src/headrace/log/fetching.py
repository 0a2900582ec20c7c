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
- Only a few fetches run at a time, and the others wait in their order. Commits use the same threads, and must find one
  that is free.
- A fetch serves all readers that ask for the same meanwhile.
- Where the file system does not tell what is in memory, a read that was fetched in the last seconds may wait: there is
  hardly anything to wait for.
- Other threads (``Broker.fetch``) do not come here: they may wait, and read by themselves.

Rejected: to ask the system to read ahead and to try again later (nobody says when the bytes are there, and an error of
the disk would never be reported); to keep whatever a thread has read (clients that ask and leave would fill the memory).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from headrace import limits
from headrace.clock import Loop, runs_here
from headrace.files import NotAtHand
from headrace.log.interface import ReadPending
from headrace.log.workers import Workers

Result = TypeVar("Result")
ENDED_MAX = 16_384
"""Fetches that have ended and are remembered; more than partitions, because one request may ask all of them."""
RESULT_KEPT_S = 1.0


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
    """The fetches of all partitions of a storage. A key says what is read."""

    def __init__(self, loop: Loop, workers: Workers, most: int = limits.FETCHES_MAX):
        self._loop, self._workers, self._most = loop, workers, most
        self._readers: dict[Hashable, list[Callable[[], None]]] = {}
        """Those that wait for a fetch."""
        self._waiting: deque[tuple[Hashable, Callable[[], Any], bool]] = deque()
        self._under_way = 0
        self._ended: OrderedDict[Hashable, _Ended] = OrderedDict()
        self._results: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        """When, and what: of fetches that had to be repeated. Later reads forget them, at the latest those of retention."""

    def read(self, key: Hashable, read: Callable[[bool], Result], *, small: bool = False) -> Result:
        """``read(at_once)``; on the loop at once, or :class:`ReadPending`. ``small``: always in a disk thread
        first, and ``answer`` has the result."""
        if not runs_here(self._loop):
            return read(False)
        self._forget_results()
        ended = self._recent(key)
        if ended is not None and ended.error is not None and ended.readers:
            ended.readers -= 1
            raise ended.error.with_traceback(None)
        if (
            small and ended is None
        ):  # it takes longer than to ask for it: a request may do this for every partition
            self._fetch(key, read, small)
        try:
            return read(True)
        except NotAtHand as missing:
            if key in self._results:
                found: Result = self._results[key][1]
                return found
            if missing.unknown and ended is not None and ended.error is None:
                return read(False)
        self._fetch(key, read, small)

    def answer(self, key: Hashable) -> Any:
        """The small answer of a fetch in the last seconds; None if there was none."""
        ended = self._recent(key) if runs_here(self._loop) else None
        return None if ended is None else ended.answer

    def _recent(self, key: Hashable) -> _Ended | None:
        ended = self._ended.get(key)
        if ended is not None and self._loop.time() - ended.at > limits.READ_KEPT_S:
            del self._ended[key]
            return None
        return ended

    def _fetch(self, key: Hashable, read: Callable[[bool], object], small: bool) -> NoReturn:
        readers = self._readers.get(key)
        if readers is None:
            readers = self._readers[key] = []
            self._waiting.append((key, lambda: read(False), small))
            self._begin()
        raise ReadPending(readers.append)

    def _begin(self) -> None:
        while self._waiting and self._under_way < self._most:
            self._under_way += 1
            key, read, small = self._waiting.popleft()

            def ended(
                result: object,
                error: BaseException | None,
                key: Hashable = key,
                small: bool = small,
            ) -> None:
                self._under_way -= 1
                self._begin()
                self._end(key, result, error, small)

            self._workers.submit(read, ended)

    def _end(self, key: Hashable, result: object, error: BaseException | None, small: bool) -> None:
        readers = self._readers.pop(key)
        before = self._recent(key)
        if error is None and before is not None and before.error is None:
            self._keep(key, result)
        if error is not None:  # the frames of its traceback hold what was read
            error = error.with_traceback(None)
            error.__context__ = None
        # Somebody who waits for several fetches may not have asked to hear of this one.
        count, answer = max(len(readers), 1), result if small else None
        self._ended[key] = _Ended(self._loop.time(), error, count, answer)
        self._ended.move_to_end(key)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for callback in readers:  # an error of one must not keep the others waiting
            self._loop.call_soon(callback)

    def _keep(self, key: Hashable, result: object) -> None:
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

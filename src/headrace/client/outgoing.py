"""Publishes that the producer does not have yet: plain messages are gathered before anything is made of them.

``publish_nowait`` in a plain loop is how most programs publish, so the call does almost nothing. A value (and
its key) is appended to the open :class:`Bundle` of its topic, and the caller gets a publication that names the
bundle and a number. One wake-up of the loop then hands over everything that was published meanwhile. A bundle is one
item of the producer: it is placed, encoded, sent and answered as a whole::

    caller                      PublishQueue                      the loop
      │ publish_nowait(value) ──▶ bundle.rows.append(value)        │
      │ ◀── (bundle, 0)            │── wake, once ─────────────────▶│
      │ publish_nowait(value) ──▶ bundle.rows.append(value)        │
      │ ◀── (bundle, 1)            │                                │ hand_over: the bundle is closed,
      │                            │                                │ Producer.publish(all its values)
      │ publication.result() ─────▶ the bundle's answer, for number 1

The producer may cut a bundle: by partition if its messages have keys, and into halves if the broker refuses one of
them. So a bundle has a list of answers, and almost always exactly one.

Memory is bounded: at most ``BUFFER_BYTES_MAX`` wait here and in the producer. A thread that publishes more waits
until half of it is stored. Where nobody may wait (with asyncio, or while the broker is away), it is refused.

Rejected: an object, a deadline and a callback for each message (11 µs a message, now 1).
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from headrace import limits
from headrace.contents import check_key, check_value
from headrace.errors import Closed, HeadraceError, OutcomeUnknown, QueueFull
from headrace.log.columns import Columns
from headrace.model import Receipt, checked_topic
from headrace.publication import Failures, Pending, Publication

BUFFER_BYTES_MAX = 64 << 20
RECORD_BYTES = 32
"""What a message costs besides its value."""
RECORDS_MAX = limits.BATCH_RECORDS_TARGET - 1
WAIT_S = 0.1
"""How often a thread that waits for room looks whether the broker is still connected."""
Handle = TypeVar("Handle")


def size_of(values: Sequence[bytes]) -> int:
    return sum(map(len, values)) + RECORD_BYTES * len(values)


def buffer_full(waiting: int) -> QueueFull:
    return QueueFull(
        f"{waiting >> 20} MiB wait to be sent; wait for some of them first",
        code="client_buffer_full",
    )


def may_be_stored(why: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"{why}: the message may or may not be stored")


def not_sent() -> Closed:
    return Closed("the client was closed before the message was sent")


@dataclass(slots=True, eq=False, repr=False)
class Bundle:
    """Messages of one topic that were published one after another, and what became of them."""

    topic: str
    has_keys: bool
    _failures: Failures
    rows: list[Any] = field(default_factory=list)
    """Values, or (value, key), until it is handed over. One list: an interrupt (Ctrl-C) between two
    appends must not give a message the key of another."""
    bytes: int = 0
    futures: dict[int, asyncio.Future[Receipt]] = field(default_factory=dict)
    """By number, with asyncio."""
    _answers: list[tuple[Sequence[int], Receipt | None, HeadraceError | None]] = field(
        default_factory=list
    )
    _looked_at: dict[int, Pending[Receipt]] = field(default_factory=dict)
    """The messages whose results somebody asked for."""

    def take(self) -> Columns:
        """The messages. Publications keep the bundle, so it must not keep them."""
        rows, self.rows = self.rows, []
        return Columns(*map(list, zip(*rows, strict=True))) if self.has_keys else Columns(rows)

    def settle(
        self, numbers: Sequence[int], receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        """Some of the messages, or all, are stored or have failed. The receipt is for all of them."""
        self._answers.append((numbers, receipt, error))  # from here on, new callers find it
        if self.futures:
            self._settle_futures(numbers, receipt, error)
        elif error is not None:
            for number in numbers:
                self._failures.add(error, BundledPublication(self, number))
        for number, pending in list(self._looked_at.items()):
            answer = self.answer(number)
            if answer is not None:
                pending.settle(*answer)

    def _settle_futures(
        self, numbers: Sequence[int], receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        for place, number in enumerate(numbers):
            future = self.futures.get(number)
            if future is None or future.done():
                continue
            if error is not None:
                future.set_exception(error)
                self._failures.add(error, future)
            else:
                future.set_result(_receipt(receipt, place))

    def answer(self, number: int) -> tuple[Receipt | None, HeadraceError | None] | None:
        """What became of a message; None if that is not known yet."""
        for numbers, receipt, error in self._answers:
            place = bisect_left(numbers, number)
            if place < len(numbers) and numbers[place] == number:
                return (None, error) if receipt is None else (_receipt(receipt, place), None)
        return None

    def pending(self, number: int) -> Pending[Receipt]:
        """The result of a message, to wait for."""
        pending = self._looked_at.get(number)
        if pending is None:
            pending = self._looked_at.setdefault(number, Pending(self._failures))
        if not pending.done():
            # ``settle`` appends the answer first and looks here afterwards: one of the two finds it.
            answer = self.answer(number)
            if answer is not None:
                pending.settle(*answer)
        return pending

    def is_seen(self, number: int) -> bool:
        pending = self._looked_at.get(number)
        return pending is not None and pending.is_seen


def _receipt(whole: Receipt | None, place: int) -> Receipt:
    """One message's part of the receipt of several."""
    assert whole is not None
    assert whole.offset is not None
    return Receipt(
        whole.topic, whole.partition, whole.offset + place, whole.timestamp, 1, whole.duplicate
    )


class BundlePart:
    """Whom to tell about some messages of a bundle. The producer may cut it further."""

    __slots__ = ("_bundle", "_numbers", "_outgoing", "bytes")

    def __init__(
        self, bundle: Bundle, numbers: Sequence[int], outgoing: PublishQueue[Any], size: int
    ):
        self._bundle = bundle
        self._numbers = numbers
        self._outgoing = outgoing
        self.bytes = size

    def __call__(self, receipt: Receipt | None, error: HeadraceError | None) -> None:
        self._outgoing.left(self.bytes)
        self._bundle.settle(self._numbers, receipt, error)

    def cut(self, indexes: Sequence[int], size: int) -> BundlePart:
        """The messages at the indexes, in ascending order."""
        numbers = self._numbers
        if isinstance(indexes, range):
            chosen: Sequence[int] = numbers[indexes.start : indexes.stop]
        else:
            chosen = [numbers[index] for index in indexes]
        return BundlePart(self._bundle, chosen, self._outgoing, size)


class BundledPublication(Publication):
    """A message of a bundle."""

    __slots__ = ("_bundle", "_number")

    def __init__(self, bundle: Bundle, number: int):
        self._bundle = bundle
        self._number = number

    def result(self, timeout: Any = None) -> Receipt:
        return self._bundle.pending(self._number).result(timeout)

    def done(self) -> bool:
        return self._bundle.answer(self._number) is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._bundle.pending(self._number).add_done_callback(lambda pending: callback(self))

    @property
    def is_seen(self) -> bool:  # type: ignore[override]
        return self._bundle.is_seen(self._number)


class PublishQueue(Generic[Handle]):
    """What was published and not handed over. Any thread adds to it; ``hand_over`` runs on the loop."""

    def __init__(
        self,
        wake: Callable[[], None],
        handle: Callable[[Bundle, int], Handle],
        failures: Failures,
        batch_bytes: int,
        may_wait: Callable[[], bool] = lambda: False,
    ):
        self._wake = wake
        self._handle = handle
        """What the caller gets for a message."""
        self._failures = failures
        self._batch_bytes = batch_bytes
        self._may_wait = may_wait
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        """Threads that wait for room."""
        self._open: dict[str, Bundle] = {}
        """Topic -> the bundle that takes more messages."""
        self._queue: deque[Bundle | tuple[Callable[..., None], Callable[..., None]]] = deque()
        """Bundles, and other publishes: how to publish, and whom to tell if that never happens."""
        self._bytes = 0
        """What is gathered here, or is a bundle's and not answered yet."""
        self._is_woken = False
        self._is_adding = False
        self.is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether every plain message so far is stored or has failed."""
        return not self._bytes

    def add(self, topic: str, value: object, key: object, bytes_max: int) -> Handle:
        """Publish a plain message."""
        if type(value) is not bytes or len(value) > bytes_max:
            value = check_value(value, bytes_max)
        if key is not None:
            key = check_key(key)
        size = len(value) + RECORD_BYTES
        try:
            with self._lock:
                if (
                    self._is_adding
                ):  # the handler of a signal publishes, and has interrupted this very method
                    return self._apart(topic, value, key, size)
                if self._bytes + size > BUFFER_BYTES_MAX and not self._is_room_made(size):
                    return self._refuse(checked_topic(topic))
                self._is_adding = True
                try:
                    bundle: Bundle | None
                    try:
                        bundle = self._open[topic]
                    except (KeyError, TypeError):
                        bundle = (
                            None  # a refusal from within this block would show the KeyError first
                        )
                    if bundle is None or (key is not None and not bundle.has_keys):
                        bundle = self._bundle(topic, key is not None)
                    rows = bundle.rows
                    number = len(rows)
                    rows.append((value, key) if bundle.has_keys else value)
                    bundle.bytes += size
                    self._bytes += size
                    if bundle.bytes >= self._batch_bytes or number >= RECORDS_MAX:
                        del self._open[topic]
                    handle = self._handle(bundle, number)
                finally:
                    self._is_adding = False
                if self._is_woken:
                    return handle
                self._is_woken = True
            self._wake()
            return handle
        except BaseException:  # Ctrl-C before the loop was woken: the next publish wakes it
            self._is_woken = False
            raise

    def _apart(self, topic: str, value: bytes, key: bytes | None, size: int) -> Handle:
        bundle = Bundle(checked_topic(topic), key is not None, self._failures)
        bundle.rows.append(value if key is None else (value, key))
        bundle.bytes = size
        self._bytes += size
        self._queue.append(bundle)
        return self._handle(bundle, 0)  # the interrupted call, or the one before it, wakes the loop

    def _bundle(self, topic: str, has_keys: bool) -> Bundle:
        name = checked_topic(topic)
        if self.is_closed:
            raise not_sent()
        bundle = self._open[name] = Bundle(name, has_keys, self._failures)
        self._queue.append(bundle)
        return bundle

    def _is_room_made(self, size: int) -> bool:
        """Wait until half of what waits is stored; False where the caller cannot wait."""
        while self._bytes + size > BUFFER_BYTES_MAX and self._bytes and not self.is_closed:
            if not self._may_wait():
                return False
            self._waiting += 1
            try:
                self._room.wait(WAIT_S)
            finally:
                self._waiting -= 1
        return True

    def _refuse(self, topic: str) -> Handle:
        """A message that has failed already; it does not keep the order of the others."""
        bundle = Bundle(topic, False, self._failures)
        error = buffer_full(self._bytes)
        self._queue.append((partial(bundle.settle, range(1), None, error), lambda *_: None))
        self._is_woken = True
        self._wake()
        return self._handle(bundle, 0)

    def put(self, topic: str, publish: Callable[..., None], done: Callable[..., None]) -> None:
        """Another publish, after those before it. ``publish()`` is called on the loop."""
        try:
            with self._lock:
                if self.is_closed:
                    raise not_sent()
                self._open.pop(topic, None)
                self._queue.append((publish, done))
                wakes, self._is_woken = not self._is_woken, True
            if wakes:
                self._wake()
        except BaseException:  # as in ``add``
            self._is_woken = False
            raise

    def hand_over(self, publish: Callable[[str, Columns, Any, Any], None]) -> None:
        """On the loop: give everything to the producer."""
        with self._lock:
            self._is_woken = False
            queue, self._queue = self._queue, deque()
            self._open.clear()
        for each in queue:
            if not isinstance(each, Bundle):
                each[0]()
            elif each.rows:
                part = self._part(each)
                publish(each.topic, each.take(), None, part)

    def left(self, size: int) -> None:
        """So much is stored, or has failed."""
        with self._lock:
            self._bytes -= size
            if self._waiting and self._bytes <= BUFFER_BYTES_MAX // 2:
                self._room.notify_all()

    def close(self) -> None:
        """Nobody hands over what is left: it fails."""
        with self._lock:
            self.is_closed = True
            self._room.notify_all()
            queue, self._queue = self._queue, deque()
            self._open.clear()
        for each in queue:
            done = self._part(each) if isinstance(each, Bundle) else each[1]
            done(None, not_sent())

    def _part(self, bundle: Bundle) -> BundlePart:
        return BundlePart(bundle, range(len(bundle.rows)), self, bundle.bytes)

"""Flow control: requests and answers in order, and a bound on what a connection may cost.

The broker stops reading from a client that *floods* while too many of its requests are unanswered, so
the socket slows it down. A client that *does not read* gets no deliveries once the transport's buffer is
full, and its requests are not read either; it is dropped when that lasts, or when the unsent answers
exceed a hard bound. Requests that came while reading stops are not parsed until it goes on (``connection``).

:class:`Outbox` keeps the answers in the order of the requests. :class:`RequestQueue` keeps the requests
in order: publishes follow each other without waiting, which makes pipelining fast, and any other request
waits until everything before it is answered. A fetch after a publish sees the published message.

What a connection holds counts against the broker's ``memory_limit`` (``headrace/budget.py``), and against
the quotas of its principal and its address: requests that
are incomplete, that wait, or that are not answered, what has come and is not parsed yet, and answers that the client has not
read. Only large
ones are counted one by one; the small ones have the bounds below.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.broker.pace import Pace
from headrace.budget import Budget, BudgetPart, Share
from headrace.limits import (
    COUNTED_BYTES_MIN,
    UNANSWERED_BYTES_HIGH,
    UNANSWERED_BYTES_LOW,
    UNANSWERED_COUNT_HIGH,
    UNANSWERED_COUNT_LOW,
    UNSENT_BYTES_MIN,
    WRITE_BYTES_HARD,
    WRITE_BYTES_HIGH,
    WRITE_BYTES_LOW,
)

PIECE_BYTES_MIN = 16 << 10
"""Pieces of this size on average are written one by one; smaller pieces are joined first."""
RECOUNT_S = 1.0
"""How long a count of unsent answers may be out of date, after the client has read them."""
INDEPENDENT_S = 0.01
"""How much longer a turn may last for requests that do not wait for others. What is cut off waits until all
before it is on disk, so a fast publisher should not reach this."""
HEAVY_S = 0.002
"""A request that takes longer is a long one, and its connection comes after the others ..."""
HEAVY_FOR_S = 1.0
"""... for this long."""
STALLED_S = 30.0
STALLED_BYTES_MIN = 64 << 10
"""A client that has taken this much in the meantime is slow, not gone."""

Item = TypeVar("Item")


class Slot:
    """The place of one answer among the others."""

    __slots__ = ("_outbox", "cost", "data")

    def __init__(self, outbox: Outbox, cost: int):
        self._outbox = outbox
        self.cost = cost
        self.data: bytes | list[bytes] | None = None

    def fill(self, data: bytes | list[bytes]) -> None:
        """With the answer, or with the pieces of a large one."""
        self.data = data
        self._outbox.filled(self)


class Outbox:
    """Sends answers in the order of their requests, whenever they are ready."""

    __slots__ = (
        "_drained", "_ended", "_held", "_late", "_loop", "_recounting", "_sending", "_slots", "_stalled",
        "_stalled_bytes", "_throttles", "_transport", "_unsent", "before_idle", "closed", "incomplete",
        "on_idle", "on_reading", "on_sent", "on_writable", "reading", "requests", "unanswered_bytes", "writable",
    )  # fmt: skip

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        budget: Budget | None = None,
    ):
        self._transport = transport
        self._loop = loop
        budget = budget or Budget()
        self.incomplete = Share(budget)
        """Of a request that has not arrived completely."""
        self.requests = Share(budget)
        """Of large requests that wait, or are not answered."""
        self._unsent = Share(budget)
        self._recounting: asyncio.TimerHandle | None = None
        self._drained: list[asyncio.Future[None]] = []
        self._slots: deque[Slot] = deque()
        self.unanswered_bytes = 0
        self.reading = True
        """Whether requests are read; else they wait in the socket."""
        self._held = False
        self._throttles = 0
        self._sending = False
        """The answers that are ready leave in this turn of the loop."""
        self._late: list[bytes] = []
        """Deliveries that wait for the answers of this turn of the loop."""
        self._stalled: asyncio.TimerHandle | None = None
        self._stalled_bytes = 0
        self.writable = True
        self.closed = False
        self._ended = False
        """Our last word is written."""
        self.on_writable: Callable[[], None] = lambda: None
        self.on_reading: Callable[[], None] = lambda: None
        """Called when requests are read again."""
        self.on_sent: Callable[[int], None] | None = None
        """Called with the size of whatever is sent, where somebody counts it."""
        self.before_idle: Callable[[], None] = lambda: None
        """Called when everything is answered and requests wait; it begins more of them."""
        self.on_idle: Callable[[], None] | None = None
        """Called when everything is answered and nothing waits."""
        transport.set_write_buffer_limits(WRITE_BYTES_HIGH, WRITE_BYTES_LOW)

    @property
    def unanswered(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered, or waits for others."""
        return bool(self._slots) or self._held

    @property
    def is_occupied(self) -> bool:
        """Whether a request is unanswered, or the client does not read its answers."""
        return bool(self._slots) or not self.writable

    @property
    def unsent_bytes(self) -> int:
        """What the client has not read."""
        return self._transport.get_write_buffer_size() + sum(map(len, self._late))

    # --- answers ----------------------------------------------------------------------------
    def reserve(self, cost: int = 64) -> Slot:
        """A place for an answer that is not ready; ``cost`` is the memory its request holds.

        Raises :class:`MemoryFull` if the broker has no room for so much; then nothing was reserved.
        """
        if cost >= COUNTED_BYTES_MIN:
            self.requests.check(cost)
        return self._place(cost)

    def _place(self, cost: int) -> Slot:
        slot = Slot(self, cost)
        self._slots.append(slot)
        self.unanswered_bytes += cost
        if cost >= COUNTED_BYTES_MIN:
            self.requests.add(cost)
        if (
            self.unanswered_bytes > UNANSWERED_BYTES_HIGH
            or len(self._slots) > UNANSWERED_COUNT_HIGH
        ):
            self._regulate()
        return slot

    def hold(self, held: bool) -> None:
        """Whether requests wait for others; while they do, no more are read."""
        self._held = held
        self._regulate()

    def throttle(self, throttled: bool) -> None:
        """Whether nothing more is read and delivered for a while: the client logs in, or has used up a
        quota."""
        self._throttles += 1 if throttled else -1
        self._regulate()
        if self.may_deliver:
            self.on_writable()

    @property
    def may_deliver(self) -> bool:
        """Whether the client takes deliveries now."""
        return self.writable and not self._throttles and not self.closed

    def belong(self, parts: tuple[BudgetPart, ...]) -> None:
        """What the connection holds counts in these quotas."""
        for share in (self.incomplete, self.requests, self._unsent):
            share.belong(parts)

    def _regulate(self) -> None:
        """Pause or resume reading, by the cost of the unanswered requests."""
        if self.closed:
            return
        if self.reading:
            if (
                self._held
                or self._throttles
                or not self.writable
                or self.unanswered_bytes > UNANSWERED_BYTES_HIGH
                or len(self._slots) > UNANSWERED_COUNT_HIGH
            ):
                self.reading = False
                self._transport.pause_reading()
        elif (
            not self._held
            and not self._throttles
            and self.writable
            and self.unanswered_bytes < UNANSWERED_BYTES_LOW
            and len(self._slots) < UNANSWERED_COUNT_LOW
        ):
            self.reading = True
            self._transport.resume_reading()
            self.on_reading()

    def send(self, data: bytes) -> None:
        """Send an answer that is ready: at once, or after those that are not ready yet."""
        if self._slots:
            self._place(len(data)).fill(data)
        else:
            if self._late:
                self._send_late()
            self.write(data)

    def send_pieces(self, pieces: list[bytes]) -> None:
        """Send one large answer in pieces. They are joined only where writing them one by one costs
        more."""
        if self._slots:
            self._place(sum(map(len, pieces))).fill(pieces)
        else:
            if self._late:
                self._send_late()
            self.write_pieces(pieces)

    def write_pieces(self, pieces: list[bytes]) -> None:
        """Like ``send_pieces``, past the order."""
        if sum(map(len, pieces)) < PIECE_BYTES_MIN * len(pieces):
            self.write(b"".join(pieces))
        elif not self.closed and not self._ended:
            if self.on_sent is not None:
                self.on_sent(sum(map(len, pieces)))
            self._transport.writelines(pieces)
            self._count_unsent()

    def filled(self, slot: Slot) -> None:
        if self.closed or self._sending or slot is not self._slots[0]:
            return
        if len(self._slots) == 1:
            self._slots.clear()
            self._answered(slot)
            if isinstance(slot.data, list):
                self.write_pieces(slot.data)
            else:
                self.write(slot.data or b"")
            if self._held or self.on_idle is not None:
                self.rest()
            if not self.reading:
                self._regulate()
        else:  # others are often ready in the same turn of the loop: one system call for all
            self._sending = True
            self._loop.call_soon(self._send_ready)

    def _send_ready(self) -> None:
        self._sending = False
        if self.closed:
            return
        self._write_ready()
        self.rest()
        self._regulate()

    def _write_ready(self) -> None:
        ready: list[bytes] = []
        while self._slots and self._slots[0].data is not None:
            first = self._slots.popleft()
            self._answered(first)
            if isinstance(first.data, list):
                self.write(b"".join(ready))
                ready = []
                self.write_pieces(first.data)
            elif first.data:
                ready.append(first.data)
        self.write(b"".join(ready))

    def _answered(self, slot: Slot) -> None:
        cost = slot.cost
        self.unanswered_bytes -= cost
        if cost >= COUNTED_BYTES_MIN:
            self.requests.add(-cost)

    def rest(self) -> None:
        """Tell those who wait until everything is answered."""
        if not self._slots:
            if self._held:
                self.before_idle()
            if self.on_idle is not None and not self._slots and not self._held:
                self.on_idle()

    def deliver(self, data: bytes) -> None:
        """Send a delivery, after the answers that this turn of the loop brings: a client that
        publishes to a topic it follows hears that its message is stored before it gets it."""
        if self._late:
            self._late.append(data)
        elif self._slots:
            self._late.append(data)
            self._loop.call_soon(self._send_late)
        else:
            self.write(data)

    def _send_late(self) -> None:
        late, self._late = self._late, []
        self.write(b"".join(late))

    def end(self, last: bytes) -> None:
        """Write our last word, after the answers and deliveries that are ready. Whatever comes later is not sent."""
        if not self._ended and not self.closed:
            self._write_ready()
            self._send_late()
            self.write(last)
            self._ended = True

    def write(self, data: bytes) -> None:
        """Write past the order, for data that carries its own number."""
        if self.closed or self._ended or not data:
            return
        if self.on_sent is not None:
            self.on_sent(len(data))
        self._transport.write(data)
        self._count_unsent()

    def _count_unsent(self) -> None:
        size = self._transport.get_write_buffer_size()
        if size > UNSENT_BYTES_MIN or self._unsent.size:
            if size > WRITE_BYTES_HARD:
                self.abort()
            self._unsent.set(size)
            if self._recounting is None:
                self._recounting = self._loop.call_later(RECOUNT_S, self._recount)

    def _recount(self) -> None:
        """Nobody tells how much of a buffer below its limit is left, so look now and then."""
        self._recounting = None
        size = self._transport.get_write_buffer_size()
        self._unsent.set(size if size > UNSENT_BYTES_MIN else 0)
        if self._unsent.size:
            self._recounting = self._loop.call_later(RECOUNT_S, self._recount)

    async def when_writable(self) -> None:
        """Wait until the client has read its earlier answers."""
        while not self.writable and not self.closed:
            future: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(future)
            await future

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for future in drained:
            if not future.done():
                future.set_result(None)

    # --- the transport's word ---------------------------------------------------------------
    def pause_writing(self) -> None:
        self.writable = False
        self._regulate()  # a client that does not read its answers may not send more requests
        if self._stalled is None:
            self._watch()

    def _watch(self) -> None:
        self._stalled_bytes = self._transport.get_write_buffer_size()
        self._stalled = self._loop.call_later(STALLED_S, self._look)

    def _look(self) -> None:
        taken = self._stalled_bytes - self._transport.get_write_buffer_size()
        if taken < STALLED_BYTES_MIN:
            self.abort()
        else:
            self._watch()

    def resume_writing(self) -> None:
        self.writable = True
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._unsent.size:
            self._unsent.set(self._transport.get_write_buffer_size())
        self._regulate()
        self.on_writable()
        self._wake_drained()
        self.rest()

    def abort(self) -> None:
        """Drop a client that does not read, with everything that is buffered for it."""
        self._transport.abort()

    def close(self) -> None:
        self.closed = True
        self._slots.clear()
        for share in (self.incomplete, self.requests, self._unsent):
            share.clear()
        self._wake_drained()
        for timer in (self._stalled, self._recounting):
            if timer is not None:
                timer.cancel()
        self._stalled = self._recounting = None


class RequestQueue(Generic[Item]):
    """Begins the requests of a connection in order.

    A request that ``depends`` must see the effect of those before it. Such a request waits until
    everything is answered and until the client reads, so that no large answer is made for a client that
    does not take it; and all later requests wait with it. While it is under way, nothing passes it. While
    requests wait, the socket is not read, so the queue holds no more than what had already arrived.

    A client may send thousands of such requests at once, so after a few milliseconds the rest waits for
    later turns of the loop (``pace``). All connections share the time of a turn for requests that ``may_be_long``:
    a thousand clients with one each take as long as one client with a thousand. A connection that had a long one
    a moment ago comes after the others. Single publishes and settlements are not measured one by one, because
    a measurement costs as much as one of them: whoever adds them has some of them ``measured``. A batch
    always is: a few hundred bytes may be megabytes when they are unpacked.
    """

    __slots__ = (
        "_barrier", "_deadline", "_handle", "_has_left", "_heavy_until", "_is_my_turn", "_outbox", "_pace",
        "_resuming", "_waiting",
    )  # fmt: skip

    def __init__(self, outbox: Outbox, handle: Callable[[Item], None], pace: Pace):
        self._outbox = outbox
        self._pace = pace
        self._deadline = 0.0
        """When this turn of the loop has done enough for this connection; 0: it has just begun."""
        self._handle = handle
        self._waiting: deque[tuple[Item, bool]] | None = None
        """Made when it is needed: an empty deque has 760 bytes, and idle connections are many."""
        self._barrier = False
        """A request that others may depend on is under way."""
        self._heavy_until = 0.0
        self._resuming = False
        self._is_my_turn = False
        """At least one of the requests that wait begins now, however busy the machine is."""
        self._has_left = False
        outbox.before_idle = self._resume

    def leave(self) -> None:
        """From now on somebody else says whether requests of the connection wait."""
        self._has_left = True
        self._outbox.before_idle = lambda: None
        self._outbox.hold(False)

    def begin_turn(self) -> None:
        """New data has come."""
        self._deadline = 0.0

    def add(
        self, item: Item, depends: bool, measured: bool = False, may_be_long: bool = False
    ) -> None:
        if self._waiting or ((depends or self._barrier) and self._outbox.is_occupied):
            self._wait(item, depends)
        elif (may_be_long and self._pace.is_over(self._is_heavy())) or (
            (depends or measured or may_be_long)
            and self._is_late(0.0 if depends else INDEPENDENT_S)
        ):
            self._wait(item, depends)
            self._go_on_soon()
        elif may_be_long:
            self._begin(item, depends)
        else:
            self._handle(item)
            self._barrier = depends and self._outbox.is_occupied

    def _begin(self, item: Item, depends: bool) -> None:
        began = self._pace.seconds()
        self._handle(item)
        self._barrier = depends and self._outbox.is_occupied
        ended = self._pace.seconds()
        if ended - began > HEAVY_S:
            self._heavy_until = ended + HEAVY_FOR_S

    def _is_heavy(self) -> bool:
        return self._heavy_until > 0.0 and not self._pace.is_past(self._heavy_until)

    def _go_on_soon(self) -> None:
        self._pace.soon(self._go_on, late=self._is_heavy())

    def _wait(self, item: Item, depends: bool) -> None:
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((item, depends))
        self._outbox.hold(True)
        size = _body_bytes(item)
        if size >= COUNTED_BYTES_MIN:
            self._outbox.requests.add(size)

    def _is_late(self, more_s: float = 0.0) -> bool:
        if not self._deadline:
            self._deadline = self._pace.deadline()
            return False
        return self._pace.is_past(self._deadline + more_s)

    def _go_on(self) -> None:
        """It is this connection's turn again."""
        if not self._outbox.unanswered:
            self._is_my_turn = True
            self._outbox.rest()
            self._is_my_turn = False

    def _resume(self) -> None:
        """Everything is answered: begin the next requests, up to one that must wait again."""
        if self._resuming or self._outbox.closed:  # by a request below that is answered at once
            return
        self._resuming = True
        self._deadline = 0.0
        try:
            while self._waiting:
                item, depends = self._waiting[0]
                if (depends or self._barrier) and self._outbox.is_occupied:
                    break
                is_over = not self._is_my_turn and self._pace.is_over(self._is_heavy())
                if is_over or self._is_late():
                    self._go_on_soon()
                    break
                self._is_my_turn = False
                self._waiting.popleft()
                size = _body_bytes(item)
                if size >= COUNTED_BYTES_MIN and not self._outbox.closed:
                    self._outbox.requests.add(-size)
                self._begin(item, depends)
        finally:
            self._resuming = False
        if not self._waiting and not self._has_left:
            self._outbox.hold(False)


def _body_bytes(item: object) -> int:
    body = getattr(item, "body", b"")
    return len(body) if isinstance(body, bytes) else 0

"""Flow control: answers in order, and a bound on what a connection may cost.

Both ways. A client that *floods* is not read from while too much of what it sent is unanswered, so
the socket slows it down. A client that *does not read* is not read from either and gets no deliveries
once the transport's buffer is full, and is dropped when that lasts, or when the answers that were under
way exceed a hard bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

UNANSWERED_BYTES_HIGH = 8 << 20
UNANSWERED_BYTES_LOW = 2 << 20
UNANSWERED_COUNT_HIGH = 10_000
UNANSWERED_COUNT_LOW = 2_500
WRITE_BYTES_HIGH = 1 << 20
WRITE_BYTES_LOW = 256 << 10
WRITE_BYTES_HARD = 192 << 20
"""One answer may be a whole fetch of 128 MiB; more than this is never held for one client."""
PIECE_BYTES_MIN = 16 << 10
"""Pieces of this size on average are handed over one by one, smaller ones are joined before."""
STALLED_S = 30.0
STALLED_BYTES_MIN = 64 << 10
"""Who has taken this much in the meantime is slow, not gone."""


class Slot:
    """The place of one answer among the others."""

    __slots__ = ("_outbox", "cost", "data")

    def __init__(self, outbox: Outbox, cost: int):
        self._outbox = outbox
        self.cost = cost
        self.data: bytes | None = None

    def fill(self, data: bytes) -> None:
        self.data = data
        self._outbox.filled(self)


class Outbox:
    """Answers leave in the order of their commands, whenever they are ready."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._loop = loop
        self._slots: deque[Slot] = deque()
        self._cost = 0
        self._reading = True
        self._held = False
        self._sending = False
        """What is ready goes out in this turn of the loop."""
        self._late: list[bytes] = []
        """Deliveries that wait for the answers of this turn."""
        self._stalled: asyncio.TimerHandle | None = None
        self._stalled_bytes = 0
        self.writable = True
        self.closed = False
        self.on_writable: Callable[[], None] = lambda: None
        self.before_idle: Callable[[], None] = lambda: None
        """Everything is answered; more may be asked before ``on_idle``."""
        self.on_idle: Callable[[], None] = lambda: None
        transport.set_write_buffer_limits(WRITE_BYTES_HIGH, WRITE_BYTES_LOW)

    @property
    def unanswered(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> bool:
        """Whether something is unanswered, or waits for its turn."""
        return bool(self._slots) or self._held

    @property
    def unanswered_bytes(self) -> int:
        return self._cost

    @property
    def reading(self) -> bool:
        """Whether commands are read, or wait in the socket."""
        return self._reading

    # --- answers ----------------------------------------------------------------------------
    def reserve(self, cost: int = 64) -> Slot:
        """A place for an answer that is not ready; ``cost`` is what the command holds meanwhile."""
        slot = Slot(self, cost)
        self._slots.append(slot)
        self._cost += cost
        self._regulate()
        return slot

    def hold(self, held: bool) -> None:
        """Whether commands wait for their turn: none are read meanwhile."""
        self._held = held
        self._regulate()

    def _regulate(self) -> None:
        """Read, or do not, by what is unanswered."""
        if self.closed:
            return
        if self._reading:
            if (
                self._held
                or not self.writable
                or self._cost > UNANSWERED_BYTES_HIGH
                or len(self._slots) > UNANSWERED_COUNT_HIGH
            ):
                self._reading = False
                self._transport.pause_reading()
        elif (
            not self._held
            and self.writable
            and self._cost < UNANSWERED_BYTES_LOW
            and len(self._slots) < UNANSWERED_COUNT_LOW
        ):
            self._reading = True
            self._transport.resume_reading()

    def send(self, data: bytes) -> None:
        """An answer that is ready now: at once, or behind those that are not."""
        if self._slots:
            self.reserve(len(data)).fill(data)
        else:
            if self._late:
                self._send_late()
            self.write(data)

    def send_pieces(self, pieces: list[bytes]) -> None:
        """The same for one large answer in pieces: they are joined only where that costs less than
        handing them over one by one."""
        if self._slots or self._late or sum(map(len, pieces)) < PIECE_BYTES_MIN * len(pieces):
            self.send(b"".join(pieces))
        elif not self.closed:
            self._transport.writelines(pieces)
            self._check_unsent()

    def filled(self, slot: Slot) -> None:
        if self.closed or self._sending or slot is not self._slots[0]:
            return
        if len(self._slots) == 1:
            self._slots.clear()
            self._cost -= slot.cost
            self.write(slot.data or b"")
            self._rest()
            if not self._reading:
                self._regulate()
        else:  # the others are often ready in the same turn of the loop: one system call for all
            self._sending = True
            self._loop.call_soon(self._send_ready)

    def _send_ready(self) -> None:
        self._sending = False
        if self.closed:
            return
        ready = []
        while self._slots and self._slots[0].data is not None:
            first = self._slots.popleft()
            self._cost -= first.cost
            ready.append(first.data)
        self.write(b"".join([data for data in ready if data]))
        self._rest()
        self._regulate()

    def _rest(self) -> None:
        """If everything is answered, and nothing waits for its turn, there is nothing to do."""
        if not self._slots:
            self.before_idle()
            if not self._slots and not self._held:
                self.on_idle()

    def deliver(self, data: bytes) -> None:
        """A delivery. Who awaits an answer gets that first, if this turn of the loop brings it:
        a message that a client published and follows comes behind the word that it is stored."""
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

    def write(self, data: bytes) -> None:
        """Past the order: what carries its own number."""
        if self.closed or not data:
            return
        self._transport.write(data)
        self._check_unsent()

    def _check_unsent(self) -> None:
        if self._transport.get_write_buffer_size() > WRITE_BYTES_HARD:
            self.abort()

    # --- the transport's word ---------------------------------------------------------------
    def pause_writing(self) -> None:
        self.writable = False
        self._regulate()  # who does not read its answers is not asked for more commands
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
        self._regulate()
        self.on_writable()
        self._rest()

    def abort(self) -> None:
        """It does not read: drop it, with what was buffered for it."""
        self._transport.abort()

    def close(self) -> None:
        self.closed = True
        self._slots.clear()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

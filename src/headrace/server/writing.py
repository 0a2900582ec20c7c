"""Deliveries become bytes in pieces, so that one subscriber does not hold up all others.

A JSON message takes ten microseconds to encode, and a delivery has up to a thousand. The first piece of a
delivery is encoded at once; the rest follows in later turns of the loop (``broker/pace.py``). While a
connection has pieces left, its sinks have no room, so at most a delivery or two wait here. They never wait
for the client: how much is encoded ahead of a slow client is bounded by the size of one delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.broker.delivery import Delivery
from headrace.broker.pace import Pace
from headrace.server.flow import Outbox

PIECE_MESSAGES = 100
"""One piece: a millisecond or two, if the messages are small."""


class DeliveryWriter:
    """The deliveries of one connection, in order. ``on_idle`` is called when all are written."""

    __slots__ = ("_on_idle", "_outbox", "_pace", "_pieces")

    def __init__(self, outbox: Outbox, pace: Pace, on_idle: Callable[[], None]):
        self._outbox = outbox
        self._pace = pace
        self._on_idle = on_idle
        self._pieces: list[Iterator[bytes]] = []
        """Few; an empty deque would take 760 bytes of every connection."""

    @property
    def is_busy(self) -> bool:
        return bool(self._pieces)

    def write(self, delivery: Delivery, encode: Callable[[Delivery], bytes]) -> None:
        """A large delivery, or one after it; small ones need no writer."""
        self._pieces.append(map(encode, delivery.parts(PIECE_MESSAGES)))
        if len(self._pieces) == 1:
            self._step()
            self._pace.soon(self._go_on)

    def _step(self) -> None:
        """Write the next piece."""
        pieces = self._pieces[0]
        piece = next(pieces, None)
        if piece is None:
            del self._pieces[0]
        else:
            self._outbox.deliver(piece)

    def _go_on(self) -> None:
        if self._outbox.closed:
            self._pieces.clear()
        deadline = self._pace.deadline()
        while self._pieces:
            self._step()
            if self._pieces and self._pace.is_past(deadline):
                self._pace.soon(self._go_on)
                return
        self._on_idle()

    def flush(self) -> None:
        """Write all that is left, now: before the client is told that no more comes."""
        while self._pieces:
            self._step()

"""Acks that may be lost with a slot: the next flush says so.

An ack is answered from memory and stored a moment later, by the owner of its partition. If another node takes the slot in between, or the
owner dies, the message is delivered again, which is fine; but a flush that comes after that must not say that all acks are
stored. So a node remembers when acks may have been lost, and a flush fails with ``acks_unknown`` if that was after the last flush of
its connection. It goes from node to node: the flush of a client asks every node, and each knows its own losses.

Acks may be lost when a slot is lost before its journal is written, when an owner refuses acks that were passed on to it
because it has lost the slot, and when the connection to an owner breaks after acks were sent and before a flush.
It is not known whose acks they were, so every connection hears of it, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.broker.engine import Engine
from headrace.errors import OutcomeUnknown

CONNECTIONS_MAX = 1000
"""Above this, those that are closed are forgotten."""


class AckLosses:
    def __init__(self, engine: Engine, now: Callable[[], float]):
        self._engine, self._now = engine, now
        self._at = -math.inf
        self._flushed: dict[int | None, float] = {}
        """When the last flush of a connection began."""

    def lost(self) -> None:
        self._at = self._now()

    def check(self, connection: int | None, began: float) -> None:
        """A flush has ended well: :class:`OutcomeUnknown` if acks may have been lost since the one before."""
        since = self._flushed.get(connection)
        if len(self._flushed) >= CONNECTIONS_MAX:
            open_now = {each.number for each in self._engine.connections()}
            self._flushed = {n: at for n, at in self._flushed.items() if n in open_now}
        self._flushed[connection] = began
        if self._at == -math.inf:
            return
        if since is None:
            since = next(
                (each.since for each in self._engine.connections() if each.number == connection),
                -math.inf,
            )
        if self._at >= since:
            raise OutcomeUnknown(
                "partitions moved to other nodes before all acknowledgements were stored: some of them may be lost, "
                "and their messages are then delivered again",
                code="acks_unknown",
            )

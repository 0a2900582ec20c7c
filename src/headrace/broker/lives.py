"""What became of messages lately: deliveries that have ended, and redrives. For eyes only, and only in memory.

::

    Subscription ──▶ delivered(), once for each lease that has ended      email  orders/0  100 … 1099  mail-worker
    Redrive ───────▶ redriven(), once for each letter that was published  orders/0/17 of email ──▶ orders/0/2040

Rules:
- A lease holds up to a thousand messages, so noting it costs little for each. Why a message failed is in ``history.py``.
- Both are bounded for the whole broker, and the oldest make room. Leases with a list of offsets count for each of these.

Rejected: keeping the leases themselves, which hold on to members and so to connections that have ended.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.broker.delivery import Lease
    from headrace.model import DeadLetter

DELIVERIES_MAX = 10_000
LISTED_MAX = 100_000
"""Offsets that stand in lists."""
REDRIVES_MAX = 20_000
Origin = tuple[str, int, int, str]
"""Topic, partition, offset, subscription."""


class PastDelivery(NamedTuple):
    subscription: int
    """Its number."""
    cursor: int
    offsets: Sequence[int]
    attempts: int | list[int]
    back: int
    """A bit for each that came back without an ack."""
    member: str
    since: float
    until: float
    """When the last of its messages was settled; both by the loop's clock."""


class Redrove(NamedTuple):
    """A dead letter that was published again."""

    time_ms: int
    dead_lettered_ms: int
    topic: str
    partition: int
    offset: int


class Lives:
    def __init__(self) -> None:
        self._deliveries: deque[tuple[Any, ...]] = deque()
        """As in :class:`PastDelivery`. A plain tuple is made in a fraction of the time."""
        self._listed = 0
        self._redrives: OrderedDict[Origin, Redrove] = OrderedDict()

    # --- noting -----------------------------------------------------------------------------------
    def delivered(self, lease: Lease, until: float) -> None:
        """A lease has ended."""
        self.note(
            (
                lease.subscription.number, lease.cursor.number, lease.offsets, lease.attempts, lease.back,
                lease.member.name, lease.since, until,
            )
        )  # fmt: skip

    def note(
        self, delivery: tuple[int, int, Sequence[int], int | list[int], int, str, float, float]
    ) -> None:
        kept = self._deliveries
        kept.append(delivery)
        if type(delivery[2]) is not range or type(delivery[3]) is not int:
            self._listed += len(delivery[2])
        elif len(kept) <= DELIVERIES_MAX:
            return
        while len(kept) > DELIVERIES_MAX or self._listed > LISTED_MAX:
            _, _, offsets, attempts, *_ = kept.popleft()
            if type(offsets) is not range or type(attempts) is not int:
                self._listed -= len(offsets)

    def redriven(self, letter: DeadLetter, time_ms: int, place: tuple[str, int, int]) -> None:
        message, redrives = letter.message, self._redrives
        origin = (message.topic, message.partition, message.offset, letter.subscription)
        redrives[origin] = Redrove(time_ms, letter.timestamp, *place)
        redrives.move_to_end(origin)
        if len(redrives) > REDRIVES_MAX:
            redrives.popitem(last=False)

    # --- asking -----------------------------------------------------------------------------------
    def deliveries_of(
        self, subscription: int, cursor: int, offset: int
    ) -> list[tuple[PastDelivery, int]]:
        """Those of a message that are still known, and which of the messages of each it was."""
        found = []
        for each in self._deliveries:
            if each[1] == cursor and each[0] == subscription and offset in each[2]:
                found.append((PastDelivery(*each), each[2].index(offset)))
        return found

    def redrive_of(self, origin: Origin) -> Redrove | None:
        return self._redrives.get(origin)

"""A message on its way to a member: leases, members, deliveries.

A :class:`Lease` covers all records that one member got of one batch at one time: offsets as a range
(strided when several members share a batch round-robin) or a list, and one bit for each that is
still out. So handing out a thousand messages costs one object, and settling one costs a bit.

A :class:`Delivery` is what the member's :class:`Sink` gets: the lease, and where the records are.
The sink takes from the batch what its protocol needs; a batch that goes to many sinks is decoded
once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

from headrace import limits
from headrace.broker.pace import Pace
from headrace.budget import Budget
from headrace.errors import HeadraceError, StaleDelivery
from headrace.log.batch import Batch
from headrace.model import Message, Settling, check_reason
from headrace.times import check_seconds

if TYPE_CHECKING:
    from headrace.broker.cursor import Cursor
    from headrace.broker.history import Recording
    from headrace.broker.subscription import Subscription


@dataclass(slots=True, eq=False)
class Lease:
    """Messages out with one member until they are settled or the deadline passes."""

    id: int
    subscription: Subscription
    member: Member
    cursor: Cursor
    offsets: Sequence[int]
    attempts: int | list[int]
    deadline: float
    bytes: int
    count: int
    mask: int
    """A bit for each offset that is still out."""
    since: float = 0.0
    """When it was handed out."""
    back: int = 0
    """A bit for each that came back without an ack."""

    def index(self, offset: int) -> int:
        """Which bit is the offset's; -1 when the lease never had it."""
        offsets = self.offsets
        if type(offsets) is range:
            return offsets.index(offset) if offset in offsets else -1
        at = bisect_left(offsets, offset)
        return at if at < len(offsets) and offsets[at] == offset else -1

    def is_out(self, offset: int) -> bool:
        at = self.index(offset)
        return at >= 0 and bool(self.mask >> at & 1)

    def attempt_at(self, index: int) -> int:
        return self.attempts if isinstance(self.attempts, int) else self.attempts[index]

    def out(self) -> list[int]:
        """The indexes still out."""
        mask = self.mask
        if mask == (1 << self.count) - 1:
            return list(range(self.count))
        return [index for index in range(self.count) if mask >> index & 1]


@dataclass(slots=True, eq=False)
class Delivery:
    """Records of one batch for one sink. ``lease`` is None where nothing is to be acknowledged."""

    topic: str
    partition: int
    batch: Batch
    indexes: Sequence[int]
    lease: Lease | None = None
    attempts: int | list[int] = 1

    def __len__(self) -> int:
        return len(self.indexes)

    def parts(self, count: int) -> Iterator[Delivery]:
        """The same records, ``count`` at a time."""
        if len(self.indexes) <= count:
            yield self
            return
        for start in range(0, len(self.indexes), count):
            attempts = self.attempts
            if not isinstance(attempts, int):
                attempts = attempts[start : start + count]
            some = self.indexes[start : start + count]
            yield Delivery(self.topic, self.partition, self.batch, some, self.lease, attempts)

    def messages(self, settling: Settling | None = None) -> list[Message]:
        batch, indexes, lease = self.batch, self.indexes, self.lease
        if isinstance(indexes, range) and isinstance(self.attempts, int):
            return batch.messages(
                self.topic,
                self.partition,
                indexes.start,
                indexes.stop,
                indexes.step,
                attempt=self.attempts,
                settling=settling,
                lease=lease,
            )
        attempts = repeat(self.attempts) if isinstance(self.attempts, int) else self.attempts
        return batch.pick(self.topic, self.partition, indexes, attempts, settling, lease)


class Sink(Protocol):
    """The receiving end of a member: a channel, a connection, a waiting request."""

    def room(self) -> int:
        """How many messages it can take now."""

    def deliver(self, delivery: Delivery) -> None: ...

    def closed(self, error: HeadraceError | None) -> None:
        """No more messages come: the subscription, its topic or the broker is gone."""


@dataclass(slots=True, eq=False)
class Member:
    """One consumer of a subscription."""

    name: str
    sink: Sink
    prefetch: int = limits.PREFETCH_DEFAULT
    auto_ack: bool = False
    by_id: dict[int, Lease] | None = None
    """The register of a connection with several members. Each of them keeps its leases there too,
    so that an ack finds its lease with one lookup."""
    in_flight: int = 0
    in_flight_bytes: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    stalled: bool = False
    """It let a deadline pass and has settled nothing since. It gets one message at a time, and only if no
    other member has room."""
    joined: float = 0.0
    """When, in the time of the loop."""
    elsewhere: bool = False
    """It joined at another node, which has a share here on its behalf."""

    def room(self) -> int:
        free = self.prefetch - self.in_flight
        if free <= 0 or (self.in_flight and self.in_flight_bytes >= limits.PREFETCH_BYTES_MAX):
            return 0
        return min(free, self.sink.room())

    def room_for(self, bytes_each: int) -> int:
        """Like ``room``, for messages of about this size; one is always allowed."""
        free = self.room()
        if free <= 1:
            return free
        fits = (limits.PREFETCH_BYTES_MAX - self.in_flight_bytes) // (bytes_each or 1)
        return min(free, max(int(fits), 1))

    def took(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        if self.by_id is not None:
            self.by_id[lease.id] = lease
        self.in_flight += lease.count
        self.in_flight_bytes += lease.bytes

    def settled(self, lease: Lease, count: int) -> None:
        self.stalled = False
        self.in_flight -= count
        self.in_flight_bytes -= lease.bytes // lease.count * count
        if not lease.mask:
            self.leases.pop(lease.id, None)
            if self.by_id is not None:
                self.by_id.pop(lease.id, None)


@dataclass(slots=True)
class Tally:
    """Plain counters of a subscription; metrics read them on request."""

    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    nacked: int = 0
    timeouts: int = 0
    dead_lettered: int = 0
    expired: int = 0
    """Passed over because their time to live had ended."""
    skipped: int = 0
    """Passed over because they were meant for another subscription."""
    lost: int = 0
    """Given up by a repair of the log."""

    as_dict = asdict


class Context(Protocol):
    """The part of the engine that a subscription uses."""

    pace: Pace
    budget: Budget
    failed: HeadraceError | None
    """Why the broker has stopped itself."""

    history: Recording

    def time(self) -> float: ...

    def now_ms(self) -> int: ...

    def call_later(self, delay: float, callback: Any, *args: Any) -> Any: ...

    def next_lease_id(self) -> int: ...

    @property
    def keeps_positions(self) -> bool:
        """Whether there is a journal."""

    def changed(self, cursor: Cursor) -> None:
        """The cursor has something new for the journal."""

    def reserve(self, cursor: Cursor, done: Callable[[HeadraceError | None], None]) -> None:
        """Write how far first deliveries at the cursor may go (``Cursor.reserved``); ``done`` as with ``flush``."""

    def flush(self, done: Callable[[HeadraceError | None], None]) -> None:
        """Write everything that has changed; ``done`` is called when it is durable, or the disk is full."""

    def joined(self, subscription: Subscription, member: Member) -> None:
        """With several nodes: it gets messages of partitions that others own, too."""

    def left(self, subscription: Subscription, member: Member, *, gives_back: bool) -> None:
        """It gets no more; ``gives_back``: and what it holds goes to others."""

    def is_sharing(self, subscription: Subscription) -> bool:
        """Whether another node has not said yet that it has nothing."""

    def dead_letter(
        self, subscription: Subscription, cursor: Cursor, offset: int, attempt: int, reason: str
    ) -> None:
        """Store it as a dead letter, then call ``subscription.buried(cursor, offset, error)``."""


class Leases:
    """What is out, and what may be said of it: of a subscription, or of the part of one at another node."""

    __slots__ = ()
    leases: dict[int, Lease]

    def lease(self, lease_id: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise StaleDelivery(
                "this delivery has ended: it was settled, timed out, or the subscription was moved"
            )
        return lease

    def ack_lease(self, lease_id: int) -> int:
        """All that is still out of one lease is done; returns how many that were."""
        lease = self.lease(lease_id)
        return self._ack_bits(lease, lease.mask)

    def ack_run(self, lease_id: int, first: int, last: int) -> int:
        """All of a lease between two offsets is done; returns how many were not out any more."""
        lease = self.lease(lease_id)
        low, high = bisect_left(lease.offsets, first), bisect_right(lease.offsets, last)
        return high - low - self._ack_bits(lease, lease.mask & (1 << high) - (1 << low))

    def ack_up_to(self, lease_id: int, offset: int) -> int:
        """The message, and everything its member holds of the partition before it, is done."""
        last = self.lease(lease_id)
        if not last.is_out(offset):
            raise _not_out(offset)
        count = 0
        for lease in list(last.member.leases.values()):
            if lease.cursor.partition is last.cursor.partition and lease.id in self.leases:
                held = (1 << bisect_right(lease.offsets, offset)) - 1
                count += self._ack_bits(lease, lease.mask & held)
        return count

    def nack(
        self, lease_id: int, offset: int, delay: float | None = None, reason: str = "nack"
    ) -> None:
        """One message failed: again after ``delay`` seconds, or after the backoff."""
        check_reason(reason)
        if delay is not None:
            delay = check_seconds("delay", delay, limits.DELAY_S_MAX)
        self._nack(self.lease(lease_id), offset, delay, reason)

    def _nack(self, lease: Lease, offset: int, delay: float | None, reason: str) -> None:
        raise NotImplementedError

    def extend(self, lease_id: int, seconds: float | None = None) -> float:
        """The lease's deadline becomes ``seconds`` from now; returns the seconds granted."""
        lease = self.lease(lease_id)
        if seconds is not None:
            seconds = check_seconds("seconds", seconds, limits.ACK_TIMEOUT_S_MAX)
        return self._extend(lease, seconds)

    def _extend(self, lease: Lease, seconds: float | None) -> float:
        raise NotImplementedError

    def _settle(self, lease: Lease, offset: int) -> int:
        """One is not out any more; returns which of the lease it was."""
        index = lease.index(offset)
        if index < 0 or not lease.mask >> index & 1:
            raise _not_out(offset)
        lease.mask ^= 1 << index
        return index

    def _ack_bits(self, lease: Lease, bits: int) -> int:
        """These, which are all out, are done; returns how many they are."""
        raise NotImplementedError


def _not_out(offset: int) -> StaleDelivery:
    return StaleDelivery(f"offset {offset} is not out with this delivery any more")

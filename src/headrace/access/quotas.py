"""Quotas: what a principal or an address uses, and what happens when it is too much.

Rates (bytes and requests per second) *slow*: a full bucket tells for how long the connection is not
read, and gets no deliveries. Counts (connections, topics, …) and memory *refuse*: ``quota_exceeded``. Only principals and addresses that have
a quota have a :class:`Meter`; all others cost one test for None.

A bucket holds one second's worth. What is over is a debt that the next reads wait for, so one large
message passes and is paid for afterwards. A debt is at most ``DEBT_S_MAX`` seconds' worth: a client that
got one large delivery must be heard again before the delivery times out, or it would get it for ever.

Bytes count in both directions. Requests count once each, however many messages they have. Memory is a part of
the broker's budget (``headrace/budget.py``).
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.access.rules import QUOTAS, Quotas
from headrace.budget import BudgetPart
from headrace.clock import Loop
from headrace.errors import QueueFull

PAUSE_S_MAX = 5.0
"""The longest time for which a connection is not read; then it is looked at again."""
DEBT_S_MAX = 20.0
"""Less than the time in which a delivery must be acknowledged, by default."""
ADDRESSES_MAX = 100_000
"""Addresses without a connection that are remembered."""


def exceeded(what: str, bound: float) -> QueueFull:
    return QueueFull(
        f"the quota of {bound:g} {what} is used up; use less, or ask an administrator for more",
        code="quota_exceeded",
    )


class RateBucket:
    """A rate, and how much of it is left."""

    __slots__ = ("_at", "_left", "rate")

    def __init__(self, rate: float, now: float):
        self.rate = rate
        self._left, self._at = rate, now

    def take(self, amount: float, now: float) -> float:
        """Use some; returns the seconds until the debt is paid."""
        self._left = min(self.rate, self._left + (now - self._at) * self.rate) - amount
        self._left = max(self._left, -DEBT_S_MAX * self.rate)
        self._at = now
        return max(0.0, -self._left / self.rate)


class Meter:
    """What one principal, or one address, uses at present."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self.quotas = Quotas()
        self.memory = BudgetPart()
        self._holders: set[object] = set()
        self._bytes: RateBucket | None = None
        self._requests: RateBucket | None = None

    def change(self, quotas: Quotas) -> Meter:
        if quotas != self.quotas:
            now = self._loop.time()
            self._bytes = _bucket(quotas.bytes_per_second, now)
            self._requests = _bucket(quotas.requests_per_second, now)
            self.memory.limit = quotas.memory
            self.quotas = quotas
        return self

    @property
    def connections(self) -> int:
        return len(self._holders)

    def connect(self, holder: object, *, is_new: bool = True) -> None:
        """One more connection, or :class:`QueueFull`; one that is there already is not refused."""
        bound = self.quotas.connections
        if is_new and bound is not None and self.connections >= bound:
            raise exceeded("connections", bound)
        self._holders.add(holder)

    def disconnect(self, holder: object) -> None:
        self._holders.discard(holder)

    def moved(self, size: int) -> float:
        """Bytes came or went; returns for how many seconds nothing more should be read and delivered."""
        return self._pause(self._bytes, size)

    def requested(self, count: int = 1) -> float:
        return self._pause(self._requests, count)

    def _pause(self, bucket: RateBucket | None, amount: int) -> float:
        if bucket is None:
            return 0.0
        return min(bucket.take(amount, self._loop.time()), PAUSE_S_MAX)

    def check(self, what: str, used: int) -> None:
        """:class:`QueueFull` if one more than ``used`` is too many."""
        bound = getattr(self.quotas, what)
        if bound is not None and used >= bound:
            raise exceeded(what, bound)


class Meters:
    """Meters by principal and by address."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._principals: dict[str, Meter] = {}
        self._addresses: OrderedDict[str, Meter] = OrderedDict()
        self._address_quotas = Quotas()

    @property
    def address_quotas(self) -> Quotas:
        return self._address_quotas

    @address_quotas.setter
    def address_quotas(self, quotas: Quotas) -> None:
        self._address_quotas = quotas
        for meter in self._addresses.values():
            meter.change(quotas)

    def of(self, name: str, quotas: Quotas) -> Meter | None:
        """The meter of a principal; None if it has no quotas and never had."""
        meter = self._principals.get(name)
        if meter is None and not has_bounds(quotas):
            return None
        if meter is None:
            meter = self._principals[name] = Meter(self._loop)
        return meter.change(quotas)

    def of_address(self, address: str) -> Meter | None:
        meter = self._addresses.get(address)
        if meter is None:
            if not has_bounds(self._address_quotas):
                return None
            if len(self._addresses) >= ADDRESSES_MAX:
                self._drop_idle()
            meter = self._addresses[address] = Meter(self._loop).change(self._address_quotas)
        return meter

    def _drop_idle(self) -> None:
        for address, meter in list(self._addresses.items()):
            if not meter.connections:
                del self._addresses[address]


def has_bounds(quotas: Quotas) -> bool:
    return any(getattr(quotas, name) is not None for name in QUOTAS)


def _bucket(rate: float | None, now: float) -> RateBucket | None:
    return None if rate is None else RateBucket(rate, now)

"""When the leases of a subscription end.

A heap of (time, lease id). Settling or extending a lease leaves its old entry in the heap. Such
entries are passed over when they come up, and removed when they are most of the heap, so that it stays
in proportion to the leases, however long the deadlines are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.broker.delivery import Lease

_SLACK = 1024


@dataclass(slots=True, eq=False)
class Deadlines:
    _leases: dict[int, Lease]
    """The leases that are out, by id; the subscription changes it."""
    _heap: list[tuple[float, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, lease: Lease) -> None:
        """The lease has a deadline, or a new one."""
        heapq.heappush(self._heap, (lease.deadline, lease.id))
        if len(self._heap) > 2 * len(self._leases) + _SLACK:
            self._heap = [(lease.deadline, lease.id) for lease in self._leases.values()]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> Iterator[Lease]:
        """The leases whose time has come, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, lease_id = heapq.heappop(self._heap)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline <= now:
                yield lease

    def next(self) -> float | None:
        """No lease ends before this."""
        while self._heap and self._heap[0][1] not in self._leases:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

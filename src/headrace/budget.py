"""One budget for the memory of a broker (the setting ``memory_limit``).

Everything that a client can make a broker hold counts here with its real size: requests that are not
complete or not answered, records on their way to the disk, topics in memory, delayed messages that wait,
answers that a client does not read, and the caches. Past the limit the newest request is refused with
``memory_full``, which a client may try again; nothing that was accepted before is dropped.

Rules:
- Whoever takes gives back, on every path: answered, refused, connection lost, closed. A :class:`Share` is
  the memory of one owner that can end at any time; ``Share.clear`` gives back all of it.
- What a principal or an address may hold (a quota) is a :class:`BudgetPart`: the shares of its connections count
  in it as well, and the newest request past it is refused with ``quota_exceeded``.
- Caches count but are never refused. They are small, and drop what is oldest by themselves.
- Small things that have their own bound do not count one by one: a check for each of a million messages
  would cost more than it protects.

Rejected: the process's resident memory as the measure. It includes freed memory that the allocator keeps, so a
broker that was once full would refuse for ever.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from headrace.errors import HeadraceError, MemoryFull, QueueFull

LIMIT_BYTES_MIN = 256 << 20
_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Budget:
    """``used`` may be added to directly by a cache; everybody else takes and gives back."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int | None = None):
        self.limit = limit or default_limit()
        self.used = 0
        self.refused = 0

    def check(self, size: int) -> None:
        """Raise :class:`MemoryFull` if there is no room for so many bytes."""
        if self.used + size > self.limit:
            raise self.refusal(size)

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise self.refusal(size)
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size

    def refusal(self, size: int) -> MemoryFull:
        self.refused += 1
        return MemoryFull(
            f"the broker holds {self.used >> 20} MiB and may hold {self.limit >> 20} (memory_limit); "
            f"there is no room for {max(size >> 10, 1)} KiB more. Try again in a moment"
        )


class BudgetPart:
    """What the connections of one principal, or of one address, hold of the budget together."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int | None = None):
        self.limit = limit
        """None: no bound of its own."""
        self.used = 0

    def has_room(self, size: int = 1) -> bool:
        return self.limit is None or self.used + size <= self.limit

    def refusal(self, size: int) -> QueueFull:
        return QueueFull(
            f"your connections hold {max(self.used >> 10, 0)} KiB and may hold "
            f"{(self.limit or 0) >> 10} (the quota of memory); there is no room for "
            f"{max(size >> 10, 1)} KiB more. Read your answers, or send less at the same time",
            code="quota_exceeded",
        )


class Share:
    """What one owner, such as a connection, holds of the budget."""

    __slots__ = ("_budget", "_parts", "size")

    def __init__(self, budget: Budget):
        self._budget = budget
        self._parts: tuple[BudgetPart, ...] = ()
        self.size = 0

    def belong(self, parts: tuple[BudgetPart, ...]) -> None:
        """Count in these quotas from now on, with what is held already."""
        for part in self._parts:
            part.used -= self.size
        for part in parts:
            part.used += self.size
        self._parts = parts

    def check(self, size: int) -> None:
        """Raise :class:`MemoryFull` or ``quota_exceeded`` if there is no room for so many bytes."""
        error = self.refusal(size)
        if error is not None:
            raise error

    def refusal(self, size: int) -> HeadraceError | None:
        """Why there is no room for so many bytes; None if there is."""
        if self._budget.used + size > self._budget.limit:
            return self._budget.refusal(size)
        for part in self._parts:
            if not part.has_room(size):
                return part.refusal(size)
        return None

    def fitting(self, size: int) -> int:
        """As much of ``size`` as the quotas have room for; an error if that is nothing."""
        room = [part.limit - part.used for part in self._parts if part.limit is not None]
        fitting = max(min([size, *room]), 1)
        self.check(fitting)
        return fitting

    def has_room(self) -> bool:
        """Whether there is room for anything at all."""
        if self._budget.used >= self._budget.limit:
            return False
        return not self._parts or all(part.has_room() for part in self._parts)

    def take(self, size: int) -> None:
        self.check(size)
        self.add(size)

    def add(self, size: int) -> None:
        """Hold so much more, or less: it exists already and so cannot be refused."""
        self.size += size
        self._budget.used += size
        for part in self._parts:
            part.used += size

    def set(self, size: int) -> None:
        """Hold exactly so much."""
        self.add(size - self.size)

    def clear(self) -> None:
        self.add(-self.size)


def default_limit() -> int:
    """A quarter of the memory that this machine, or this container, has."""
    return max(memory_bytes() // 4, LIMIT_BYTES_MIN)


def memory_bytes() -> int:
    """The memory of the machine, or less if the process is in a container with a limit."""
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            sizes.append(int(Path(name).read_text()))
    return min((size for size in sizes if size > 0), default=4 * LIMIT_BYTES_MIN)

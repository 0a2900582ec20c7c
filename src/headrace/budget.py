"""One budget for the memory of a broker (the setting ``memory_limit``).

Everything that a client can make a broker hold counts here with its real size: requests that are not
complete or not answered, records on their way to the disk, topics in memory, delayed messages that wait,
answers that a client does not read, and the caches. Past the limit the newest request is refused with
``memory_full``, which a client may try again; nothing that was accepted before is dropped.

Rules:
- Whoever takes gives back, on every path: answered, refused, connection lost, closed. A :class:`Share` is
  the memory of one owner that can end at any time; ``Share.clear`` gives back all of it.
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

from headrace.errors import MemoryFull

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


class Share:
    """What one owner, such as a connection, holds of the budget."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: Budget):
        self._budget = budget
        self.size = 0

    def check(self, size: int) -> None:
        """Raise :class:`MemoryFull` if there is no room for so many bytes."""
        self._budget.check(size)

    def take(self, size: int) -> None:
        self._budget.take(size)
        self.size += size

    def add(self, size: int) -> None:
        """Hold so much more, or less: it exists already and so cannot be refused."""
        self.size += size
        self._budget.used += size

    def set(self, size: int) -> None:
        """Hold exactly so much."""
        self._budget.used += size - self.size
        self.size = size

    def clear(self) -> None:
        self._budget.used -= self.size
        self.size = 0


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

"""Guessing is slowed down: after some failures, logins of an address or a user take turns.

The first failures are free, because people mistype. Then each further failure doubles the pause between two
logins of the same address, and of the same user whatever the address: so many connections guess no faster
than one. A login waits for its turn; one that would wait too long is refused (``too_many_attempts``).
Nobody is locked out: whoever knows the secret gets in after waiting for a turn, and connections that are
open, and tokens that the broker made (256 random bits: nobody guesses one), never wait.

Failures fade: half of them are forgotten each minute. The tables are bounded; the entry that was used
longest ago goes first.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable

from headrace.errors import QueueFull

FREE = 10
"""Failures without a pause."""
FIRST_S = 0.05
ADDRESS_S_MAX = 5.0
USER_S_MAX = 1.0
"""Shorter: others can cause it, and the user has to wait for it, too."""
WAIT_S_MAX = 10.0
HALF_LIFE_S = 60.0
ENTRIES_MAX = 10_000


class _Entry:
    __slots__ = ("at", "failures", "free_at")

    def __init__(self, now: float):
        self.failures, self.at, self.free_at = 0.0, now, now


class _Table:
    def __init__(self, pause_s_max: float):
        self._pause_s_max = pause_s_max
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def wait(self, key: str, now: float) -> float:
        """How long a login of this key would wait for its turn."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else max(0.0, entry.free_at - now)

    def take_turn(self, key: str, now: float) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.free_at = max(now, entry.free_at) + self._pause(entry, now)

    def _pause(self, entry: _Entry, now: float) -> float:
        self._fade(entry, now)
        beyond = entry.failures - FREE
        if beyond < 0:
            return 0.0
        return min(self._pause_s_max, FIRST_S * float(2.0 ** min(beyond, 30.0)))

    @staticmethod
    def _fade(entry: _Entry, now: float) -> None:
        entry.failures *= 0.5 ** (max(0.0, now - entry.at) / HALF_LIFE_S)
        entry.at = now

    def failed(self, key: str, now: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= ENTRIES_MAX:
                self._entries.popitem(last=False)
            entry = self._entries[key] = _Entry(now)
        self._entries.move_to_end(key)
        self._fade(entry, now)
        entry.failures += 1.0
        entry.free_at = max(entry.free_at, now + self._pause(entry, now))


class Guesses:
    def __init__(self, time: Callable[[], float]):
        self._time = time
        self._addresses = _Table(ADDRESS_S_MAX)
        self._users = _Table(USER_S_MAX)

    def __len__(self) -> int:
        return len(self._addresses) + len(self._users)

    def is_free(self, address: str, user: str | None = None) -> bool:
        """Whether a login would not have to wait."""
        now = self._time()
        if self._addresses.wait(network(address), now) > 0:
            return False
        return user is None or self._users.wait(user, now) <= 0

    def turn(self, address: str, user: str | None = None) -> float:
        """Take a turn: the seconds to wait for it. :class:`QueueFull` if that is too long."""
        now = self._time()
        place = network(address)
        wait = self._addresses.wait(place, now)
        if user is not None:
            wait = max(wait, self._users.wait(user, now))
        if wait > WAIT_S_MAX:
            raise QueueFull(
                "there were too many failed logins; wait a little, then try again",
                code="too_many_attempts",
            )
        self._addresses.take_turn(place, now)
        if user is not None:
            self._users.take_turn(user, now)
        return wait

    def failed(self, address: str, user: str | None = None) -> None:
        now = self._time()
        self._addresses.failed(network(address), now)
        if user is not None:
            self._users.failed(user[:200], now)


def network(address: str) -> str:
    """An IPv6 client has 2**64 addresses: all of them count as one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)

"""What all connections of a server share: the engine, the tables, the numbers, and who is connected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.delivery import Lease
from headrace.broker.engine import Engine
from headrace.broker.subscription import Subscription
from headrace.console.sessions import ConsoleSessions
from headrace.server.logins import Logins
from headrace.server.members import WireSink
from headrace.server.operations import ServedOperations
from headrace.server.origins import Origins
from headrace.server.refusals import Refusals
from headrace.wire.http import KnownHeads

if TYPE_CHECKING:
    from headrace.server.connection import Connection
    from headrace.server.routing import RouteTable
    from headrace.server.starting import StartingConnection
    from headrace.server.watchdog import Watchdog

REVIEW_S = 0.005
"""How long the loop looks at connections after a change of rights, before it does something else."""


@dataclass(eq=False, repr=False)
class Hub:
    """What all connections of a server share."""

    engine: Engine
    operations: ServedOperations
    logins: Logins
    routes: RouteTable
    origins: Origins
    sessions: ConsoleSessions
    known_heads: KnownHeads = field(default_factory=KnownHeads)
    connections: dict[Connection, None] = field(default_factory=dict)
    """In the order in which they came."""
    opening: set[Connection | StartingConnection] = field(default_factory=set)
    """Accepted, but not made yet: their TLS handshakes are under way."""
    early: set[StartingConnection] = field(default_factory=set)
    """Those that came while the node started."""
    watched: set[Connection] = field(default_factory=set)
    """Those of ``connections`` that have deadlines (``deadlines``)."""
    pulled: dict[int, Lease] = field(default_factory=dict)
    """By id, what HTTP clients hold: a delivery alone says which group it is of."""
    max_connections: int = 15_000
    open_files: int = limits.OPEN_FILES_MAX
    """That the process may have; ``files_kept`` of them are for neither connections nor partitions."""
    files_kept: int = 0
    heartbeat_s: float = 30.0
    head_s: float = 20.0
    idle_s: float = 75.0
    body_bytes_per_s: int = 1024
    numbered: int = 0
    """The number of the last connection."""
    accepted: int = 0
    refused: int = 0
    failed_handshakes: int = 0
    overdue: int = 0
    """Connections that were closed because they were too slow, or idle."""
    draining: bool = False
    metrics: Callable[[], Awaitable[tuple[bytes, str]]] = None  # type: ignore[assignment]
    watchdog: Watchdog | None = None
    _empty: asyncio.Event | None = None
    _reviewing: bool = False
    """A review of all connections is about to begin."""

    @property
    def refusals(self) -> Refusals:
        return self.logins.refusals

    def admits(self) -> bool:
        """Whether another connection may come; it is counted either way."""
        open_now = len(self.connections) + len(self.opening) + len(self.early)
        admitted = not self.draining and open_now < self.max_connections and self.file_room() > 0
        self.accepted += admitted
        self.refused += not admitted
        return admitted

    def file_room(self) -> int:
        """How many more connections or partitions may have an open file."""
        taken = len(self.connections) + len(self.opening) + len(self.early) + self.files_kept
        if self.engine.directory is not None:
            taken += self.engine.topics.partition_count
        return self.open_files - taken

    def left(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self.watched.discard(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    async def wait_until_empty(self) -> None:
        if self.connections:
            self._empty = asyncio.Event()
            await self._empty.wait()

    # --- changed rights ---------------------------------------------------------------------
    def access_changed(self) -> None:
        """Rights have changed: look at every connection soon."""
        if self.engine.access.is_on and not self._reviewing:
            self._reviewing = True
            self.engine.call_soon(self._review, list(self.connections))

    @staticmethod
    def attached(subscription: Subscription) -> None:
        """A subscription has got another topic, which its members need the right for."""
        for member in tuple(subscription.members):
            if isinstance(member.sink, WireSink):
                member.sink.review()

    def _review(self, connections: list[Connection]) -> None:
        """Some of them; the rest in the next turns of the loop."""
        self._reviewing = False
        until = time.monotonic() + REVIEW_S
        while connections:
            connection = connections.pop()
            if connection in self.connections and not connection.closing:
                connection.access_changed()
            if time.monotonic() > until:
                self.engine.call_soon(self._review, connections)
                return

"""ConnectionDeadlines of peers that are too slow: one look a second at all of them.

A peer that costs the broker a connection and says nothing, or says it one byte at a time, must not keep
it. These have a deadline:

- a connection that has sent nothing: ``head_timeout`` on the HTTP port, ``idle_timeout`` on the TCP port;
- the TCP port before the first valid command: ``idle_timeout`` (10 seconds where a token is needed);
- the head of an HTTP request, from its first byte: ``head_timeout``; a body: at least ``body_rate`` bytes
  a second on top of that;
- an HTTP connection between two requests: ``idle_timeout``.

Time that the broker itself takes does not count: a request that waits for its answer, or a socket that we do
not read. WebSockets and event streams have pings of their own, and a peer that authenticated on the TCP port
may be silent for as long as it wants.

Rejected: a timer for each connection or request. Moving a timer with each request costs more than the
request's head; a look at ten thousand connections costs a few milliseconds. A deadline may be a second late.
"""

from __future__ import annotations

import asyncio
import logging

from headrace.server.hub import Hub

logger = logging.getLogger("headrace.server")
LOOK_S = 1.0


class ConnectionDeadlines:
    """Looks at ``Hub.watched`` until it is closed."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self.check(self._loop.time())

    def check(self, now: float) -> None:
        for connection in tuple(self._hub.watched):
            try:
                connection.check_deadline(now)
            except Exception:  # a bug of ours must not keep the others from being looked at
                logger.exception(
                    "the deadline of %s could not be checked",
                    connection.peer,
                    extra=connection.fields(),
                )
                connection.abort()

    def close(self) -> None:
        self._timer.cancel()

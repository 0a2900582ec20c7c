"""The service manager, such as systemd: it is told when the broker is ready and when it stops.

The protocol (``sd_notify``) is one datagram of ``NAME=value`` lines to the Unix socket that ``NOTIFY_SOCKET``
names. With ``WatchdogSec=`` in the unit, the manager also wants a sign of life in each interval, and restarts
a broker whose loop hangs::

    READY=1 ── WATCHDOG=1 ── WATCHDOG=1 ── … ── STOPPING=1

Without ``NOTIFY_SOCKET`` nothing is sent. Trouble with the socket is logged and stops nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger("headrace.server")
SEND_S = 1.0
"""How long a datagram may wait for the manager to read earlier ones."""
BEATS = 2
"""Signs of life in each interval of the watchdog: one may be late."""


class ServiceManager:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, environment: Mapping[str, str] | None = None
    ):
        given = os.environ if environment is None else environment
        path = given.get("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._loop = loop
        self._beat_s = _watchdog_s(given) / BEATS if path else 0.0
        self._beating: asyncio.TimerHandle | None = None
        self._has_failed = False

    def ready(self, status: str) -> None:
        """The broker listens. ``systemctl status`` shows the sentence."""
        self._tell("READY=1", f"STATUS={status}")
        if self._beat_s:
            self._beat()

    def stopping(self) -> None:
        self._tell("STOPPING=1", "STATUS=Stopping")

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    def _beat(self) -> None:
        self._tell("WATCHDOG=1")
        self._beating = self._loop.call_later(self._beat_s, self._beat)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the service manager cannot be told %s: %s", lines[0], error)
            self._has_failed = True


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """The interval in which the manager wants a sign of life; 0: never."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0  # it is meant for a process that started this one
    given = environment.get("WATCHDOG_USEC", "")
    return int(given) / 1e6 if given.isascii() and given.isdigit() else 0.0

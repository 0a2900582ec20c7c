"""SIGHUP: read the settings and the files again, without losing a connection.

Taken over: the certificate with its key, ``tls_client_ca``, ``token``, ``allowed_origins``, ``log_level``,
``log_format``, and the access file (which is looked at twice a second anyway). Other settings need a restart,
and the log names those that have changed.

Everything is read and checked before anything is taken over. If the config file, a certificate or a key
cannot be used, the log says why, and the broker goes on as before. Connections that exist keep the
certificate that they began with; a login that is not valid any more ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, InvalidArgument
from headrace.server import logs
from headrace.settings import Settings

if TYPE_CHECKING:
    from headrace.server.server import Server

logger = logging.getLogger("headrace.server")
RELOADED = (
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "token",
    "allowed_origins",
    "log_level",
    "log_format",
)


class Reloading:
    def __init__(self, server: Server, load: Callable[[], Settings]):
        self._server = server
        self._load = load
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def request(self) -> None:
        """Reload soon. Requests that come meanwhile are one more reload."""
        if self._task is not None and not self._task.done():
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        self._again = True
        while self._again:
            self._again = False
            try:
                await self.reload()
            except (HeadraceError, OSError) as error:
                logger.error("nothing was reloaded, and the broker goes on as before: %s", error)
            except Exception:
                logger.exception("nothing was reloaded, and the broker goes on as before")

    async def reload(self) -> None:
        """Read everything, then take it over; or raise why not, and change nothing."""
        server, loop = self._server, asyncio.get_running_loop()
        new = await loop.run_in_executor(None, self._load)  # a file may be on a slow disk
        if bool(new.tls_cert) != server.is_tls:
            raise InvalidArgument("TLS is turned on and off by a restart only")
        tls = await loop.run_in_executor(None, server.check, new, server.has_users)
        old = server.settings
        changed = [n for n, value in new.as_dict().items() if value != old.as_dict()[n]]
        waiting = [name for name in changed if name not in RELOADED]
        if waiting:
            logger.warning("changed, but needs a restart: %s", ", ".join(waiting))
        server.take_over(new.but({name: old.as_dict()[name] for name in waiting}), tls)
        logs.set_up(new.log_level, new.log_format)
        server.engine.access.look()
        shown = [name for name in changed if name in RELOADED]
        files = ", the certificate" if server.is_tls else ""
        logger.info(
            "reloaded: the settings (changed: %s)%s and the access rules",
            ", ".join(shown) or "none",
            files,
        )

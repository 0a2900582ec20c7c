"""A running broker: the engine, its listeners, and how it starts and stops.

Starting: the directory is locked and read before any port is bound, and the line that says "ready"
names every address. A node of a cluster has to read Kafka first, which may take a while: it listens before that, and says that
it is not ready (``starting.py``). Stopping (SIGTERM, SIGINT): the server takes no more connections and commands,
answers the unanswered ones, gives deliveries back to their subscriptions, syncs everything and exits
with 0. A failed sync stops the server with exit code 70 and a message that says why. The service manager
is told when the server is ready and when it stops (``service_manager.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.access.file import NAME as ACCESS_FILE
from headrace.broker.aio import ENGINE_OPTIONS, AsyncBroker
from headrace.broker.engine import Engine
from headrace.console.sessions import ConsoleSessions
from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.interface import Storage
from headrace.server import (
    console_routes,
    health_routes,
    operation_routes,
    routes,
    stream,
    websocket,
)
from headrace.server.binary import BinarySession
from headrace.server.connection import Connection
from headrace.server.deadlines import ConnectionDeadlines
from headrace.server.http import HttpSession
from headrace.server.hub import Hub
from headrace.server.listening import Listener
from headrace.server.logins import Logins
from headrace.server.metrics import Metrics
from headrace.server.operations import ServedOperations
from headrace.server.origins import Origins
from headrace.server.reloading import Reloading
from headrace.server.routing import Route, RouteTable
from headrace.server.service_manager import ServiceManager
from headrace.server.session import Session
from headrace.server.starting import StartingConnection, is_text
from headrace.server.text import TextSession
from headrace.server.watchdog import Watchdog
from headrace.settings import Settings

if TYPE_CHECKING:
    from headrace.cluster.node import Node

logger = logging.getLogger("headrace.server")
DRAIN_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""The loop must not wait 5 ms for the interpreter while a disk thread computes."""
COLLECT_AFTER = (20_000, 20, 20)
EXIT_FAILED = 70
TOKEN_CHARS_MIN = 16
"""Of a token that other machines may try. A random one of 16 characters has at least 64 bits."""


_WHAT_TO_DO = {
    errno.EADDRINUSE: "is another broker running? Choose another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose one of its own, or 0.0.0.0 for all",
    errno.EACCES: "only root may use this port; choose one above 1023",
}
ALL_ROUTES: list[Route] = [
    *routes.ROUTES,
    *stream.ROUTES,
    *websocket.ROUTES,
    *operation_routes.ROUTES,
    *health_routes.ROUTES,
    *console_routes.ROUTES,
]
"""Of the HTTP port."""


def text_or_binary(connection: Connection, data: bytes) -> Session:
    """The TCP port."""
    return TextSession(connection) if is_text(data[0]) else BinarySession(connection)


class Server:
    def __init__(self, settings: Settings):
        # A node of a cluster knows whether there are users when it has read what all agree on.
        is_node = settings.engine == "kafka" and settings.slots > 0
        self._tls = self.check(settings, has_users=True if is_node else None)
        self.settings = settings
        self._listeners: list[Listener] = []
        self.deadlines: ConnectionDeadlines | None = None
        self._starting = False
        """A node reads Kafka: the ports are open, and nobody is let in."""
        self._stopping = asyncio.Event()
        self.failed: HeadraceError | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        loop = asyncio.get_running_loop()
        data_dir = Path(settings.data_dir) if settings.persistence_enabled else None
        self.engine = Engine(
            data_dir,
            loop,
            topic_defaults=settings.topic_defaults(),
            storage=storage_of(settings),
            on_failed=self._on_failed,
            **{name: getattr(settings, name) for name in ENGINE_OPTIONS},
        )
        self.broker = AsyncBroker.around(self.engine)
        self.node = node_of(self.engine, settings)
        self.engine.access.setting = settings.token
        self.hub = Hub(
            self.engine,
            ServedOperations(self.engine),
            Logins(self.engine),
            RouteTable(ALL_ROUTES),
            origins_of(settings),
            ConsoleSessions(self.engine.access, self.engine.time, self.engine.call_later),
        )
        self.hub.max_connections = settings.max_connections
        self.hub.heartbeat_s = settings.heartbeat_interval
        self.hub.head_s = settings.head_timeout
        self.hub.idle_s = settings.idle_timeout
        self.hub.body_bytes_per_s = settings.body_rate
        self.hub.metrics = Metrics(self.hub).render

    @staticmethod
    def check(settings: Settings, has_users: bool | None = None) -> ssl.SSLContext | None:
        """Raise if a broker must not or cannot run with these settings; returns what TLS needs.

        ``has_users``: None: if there is an access file.
        """
        storage_of(settings)
        check_exposure(settings, has_users)
        return make_tls(settings)

    def take_over(self, settings: Settings, tls: ssl.SSLContext | None) -> None:
        """Change what can change while it runs (``reloading.py``). ``tls`` is for new connections."""
        hub, access, old = self.hub, self.engine.access, self.settings
        self.settings, self._tls = settings, tls
        for listener in self._listeners:
            listener.tls = tls
        if settings.allowed_origins != old.allowed_origins or settings.token != old.token:
            hub.origins = origins_of(settings, self.has_users)
            hub.known_heads.clear()  # they remember that they were admitted, and so do connections
            for connection in hub.connections:
                if isinstance(connection.session, HttpSession):
                    connection.session.forget_heads()
        if settings.token != old.token:
            access.setting = settings.token

    @property
    def has_users(self) -> bool | None:
        """None: if there is an access file."""
        return None if self.node is None else self.engine.access.rules is not None

    @property
    def is_tls(self) -> bool:
        return self._tls is not None

    # --- starting ---------------------------------------------------------------------------
    async def start(self) -> None:
        if self.node is not None:
            self._starting = True
            try:
                await self._listen_all()
                await self.node.prepare()
            except BaseException:
                self._stop_listening()
                self.engine.topics.storage.close()
                raise
        try:
            self.engine.open()
            if self.node is not None:
                check_exposure(self.settings, self.has_users)
                self.hub.origins = origins_of(self.settings, self.has_users)
        except BaseException:
            self._stop_listening()
            raise
        self.engine.access.listeners.append(self.hub.access_changed)
        self.engine.access.watch()
        self.engine.on_attached = self.hub.attached
        self.engine.connections = lambda: self.hub.connections
        self.engine.history.start()
        self.deadlines = ConnectionDeadlines(self.hub)
        watchdog = self.hub.watchdog = Watchdog(asyncio.get_running_loop())
        watchdog.start()
        try:
            if self.node is None:
                await self._listen_all()
            else:
                await self.node.start()
                self._starting = False
            self.hub.sessions.served(self.addresses["http"][1], tls=self.is_tls)
        except BaseException:
            self._stop_listening()
            watchdog.stop()
            await self.broker.close()
            raise

    async def _listen_all(self) -> None:
        await self._listen("tcp", self.settings.port, text_or_binary)
        await self._listen("http", self.settings.http_port, lambda c, _: HttpSession(c))

    async def _listen(
        self, name: str, port: int, open_session: Callable[[Connection, bytes], Session]
    ) -> None:
        def factory() -> Connection | StartingConnection:
            if self._starting and self.node is not None:
                return StartingConnection(self.hub, name, self.node.progress)
            return Connection(self.hub, name, open_session)

        host = self.settings.host
        listener = Listener(self.hub, factory, self._tls, self.settings.handshake_timeout)
        try:
            await listener.listen(host, port)
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen on {host}:{port} ({name}): {error.strerror or error}; "
                + _WHAT_TO_DO.get(error.errno or 0, "choose another host or port"),
                code="cannot_listen",
            ) from None
        self._listeners.append(listener)
        address = listener.sockets[0].getsockname()
        self.addresses[name] = (address[0], address[1])

    # --- stopping ---------------------------------------------------------------------------
    def _on_failed(self, error: HeadraceError) -> None:
        self.failed = error
        self.stop()

    def stop(self) -> None:
        self._stopping.set()

    async def wait(self) -> None:
        """Wait until ``stop`` is called."""
        await self._stopping.wait()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self.hub.early):
            connection.abort()
        if self.deadlines is not None:
            self.deadlines.close()
        self.hub.sessions.close()
        self.engine.history.close()

    async def close(self) -> None:
        """Drain, then close. This takes seconds at most, whatever the clients do."""
        self._stop_listening()
        self.hub.draining = self.engine.stopping = True
        connections = list(self.hub.connections)
        for connection in connections:
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.hub.wait_until_empty()
        for connection in list(self.hub.connections):
            connection.abort()
        await asyncio.sleep(0)
        if self.node is not None:
            await self.node.close()
        if self.failed is None:
            await self.broker.close()
        else:
            self.engine.topics.storage.close()
        if self.hub.watchdog is not None:
            self.hub.watchdog.stop()


def storage_of(settings: Settings) -> Callable[[Engine], Storage] | None:
    """What makes the storage, if it is not the disk of this machine."""
    if settings.engine != "kafka":
        return None
    from headrace.engine.kafka import make_storage

    return make_storage(settings)


def node_of(engine: Engine, settings: Settings) -> Node | None:
    """This node of a cluster, if partitions are divided between several."""
    if engine.topics.storage.slot_of is None:
        return None
    from headrace.cluster.node import Node

    tls = None
    if (
        settings.tls_cert
    ):  # the others have TLS, too; they show this certificate, or one that the system trusts
        tls = ssl.create_default_context()
        tls.check_hostname = False
        tls.load_verify_locations(settings.tls_client_ca or settings.tls_cert)
    storage: Any = engine.topics.storage
    return Node(engine, storage, session_s=settings.kafka_session, tls=tls)


def origins_of(settings: Settings, has_users: bool | None = None) -> Origins:
    local_only = not is_guarded(settings, has_users) and not settings.insecure
    return Origins(settings.allowed_origins, local_only=local_only)


def is_guarded(settings: Settings, has_users: bool | None = None) -> bool:
    """Whether clients have to log in: there is a token, or there are users."""
    if has_users is None:
        path = Path(settings.data_dir) / ACCESS_FILE
        has_users = settings.persistence_enabled and path.exists()
    return bool(settings.token) or has_users


def check_exposure(settings: Settings, has_users: bool | None = None) -> None:
    """Refuse to listen beyond this machine without users or a token that is hard to guess, unless told to."""
    is_weak = settings.token and len(settings.token) < TOKEN_CHARS_MIN
    if (settings.insecure or is_guarded(settings, has_users)) and not is_weak:
        return
    try:
        infos = socket.getaddrinfo(settings.host, None)
        loopback = all(ipaddress.ip_address(info[4][0]).is_loopback for info in infos)
    except OSError as error:
        raise InvalidArgument(
            f"host {settings.host!r} cannot be resolved: {error}", code="cannot_listen"
        ) from None
    if not loopback and is_weak:
        raise InvalidArgument(
            f"{settings.host} can be reached from other machines, and a token of fewer than "
            f"{TOKEN_CHARS_MIN} characters can be guessed; this makes a good one: openssl rand -hex 32",
            code="weak_token",
        )
    if not loopback:
        raise InvalidArgument(
            f"{settings.host} can be reached from other machines: set a token "
            "(HEADRACE_TOKEN or --token), add a user (headrace users add --data), or use --insecure",
            code="authentication_required",
        )


def make_tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.tls_cert:
        if settings.tls_client_ca:
            raise InvalidArgument(
                "tls_client_ca needs TLS: set tls_cert and tls_key, too", code="invalid_setting"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"the certificate {settings.tls_cert} or its key cannot be used: {error}",
            code="invalid_setting",
        ) from None
    if settings.tls_client_ca:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"the certificate authority {settings.tls_client_ca} cannot be used: {error}",
                code="invalid_setting",
            ) from None
        context.verify_mode = ssl.CERT_OPTIONAL  # a client without a certificate logs in otherwise
    return context


def reserve_files(server: Server) -> None:
    """Share the open files of the process between connections, partitions and the rest.

    A connection too many is refused before the log lacks a file, and a partition too many before a
    segment cannot roll.
    """
    files = limits.allow_open_files(limits.OPEN_FILES_MAX)
    hub, topics = server.hub, server.engine.topics
    hub.open_files, hub.files_kept = files, min(limits.OPEN_FILES_BASE, files // 4)
    hub.max_connections = allow_connections(hub.max_connections, files)
    if server.engine.directory is not None:
        topics.file_room = hub.file_room
    logger.info(
        "the process may open %d files: at most %d are for connections, at least %d for the log",
        files,
        hub.max_connections,
        files - hub.max_connections,
    )


def allow_connections(wanted: int, files: int) -> int:
    """How many connections are allowed. Each is an open file, and the log needs some, too."""
    allowed = min(wanted, files - min(limits.OPEN_FILES_SPARE, files // 2))
    if allowed < wanted:
        logger.warning(
            "only %d connections are allowed instead of %d (max_connections), because this process may "
            "open only %d files; raise its limit (ulimit -n)",
            allowed,
            wanted,
            files,
        )
    return allowed


def collect_seldom() -> None:
    """Collect garbage rarely: a message is a few objects without cycles, and looking for cycles took a
    quarter of the time. Objects that were loaded at the start are never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def serve(
    settings: Settings, ready: Any = None, reload: Callable[[], Settings] | None = None
) -> int:
    """Run until a signal; returns the exit code. ``reload`` reads the settings again, on SIGHUP."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limits.keep_freed_memory()
    server = Server(settings)
    reserve_files(server)
    loop = asyncio.get_running_loop()
    if reload is not None:  # before it starts, which may take a while: until then, SIGHUP kills
        loop.add_signal_handler(signal.SIGHUP, Reloading(server, reload).request)
    await server.start()
    collect_seldom()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if ready is not None:
        ready(server)
    manager = ServiceManager(loop)
    manager.ready("Listening on " + ", ".join(f"{h}:{p}" for h, p in server.addresses.values()))
    await server.wait()
    logger.info("stopping")
    manager.stopping()
    await server.close()
    manager.close()
    if server.failed is not None:
        logger.critical("%s", server.failed)
        return EXIT_FAILED
    return 0

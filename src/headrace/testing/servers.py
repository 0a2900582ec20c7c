"""Real servers for tests: one in a thread of this process, and one as a process of its own.

``running_server()`` is fast, and a test can look into it; ``server_process()`` can be killed for real.
Both listen on free ports of this machine, remove their data directory at the end, and ignore the
environment and the config file of the user who runs the tests::

    with running_server(max_message_size="64KB") as server, server.client() as client:
        client.publish("orders", b"one")
        server.restart()
        assert client.fetch("orders")[0].value == b"one"

Keyword arguments are the settings of ``headrace.settings``. ``stop`` and ``terminate`` shut the server
down cleanly, ``kill`` does not; ``restart`` keeps the port and the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

from headrace.broker.engine import Engine
from headrace.client.aio import ClientOptions
from headrace.client.threads import BrokerClient
from headrace.errors import Closed
from headrace.server.server import Server
from headrace.settings import SETTINGS, load
from headrace.shell import Shell

Result = TypeVar("Result")
AnyServer = TypeVar("AnyServer", bound="_TestServer")
START_S = 30.0
STOP_S = 30.0
_PLACE = re.compile(r"(\w+)://([^:,\s]+):(\d+)")
_LOOK_AGAIN_S = 0.005


class Address(NamedTuple):
    host: str
    port: int


class DidNotStart(Exception):
    """A server process ended before it was ready. ``code`` is its exit code."""

    def __init__(self, code: int | None, errors: str):
        super().__init__(f"the server ended with code {code} before it was ready:\n{errors}")
        self.code = code
        self.errors = errors


def wait_until(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
    """Wait until the condition holds; :class:`AssertionError` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} seconds: {what or condition}")
        time.sleep(_LOOK_AGAIN_S)


class _TestServer:
    """A server's directories, addresses and settings, which outlive a restart."""

    def __init__(self, data_dir: str | Path | None, memory: bool, settings: dict[str, Any]):
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.data_dir = Path(data_dir) if data_dir is not None else self._directory / "data"
        self._settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "http_port": 0,
            **settings,
            "data_dir": str(self.data_dir),
        }
        if memory:
            self._settings["persistence_enabled"] = False

    @property
    def address(self) -> Address:
        """The address of the text and binary protocols; it stays the same while the server is stopped."""
        return Address(self._settings["host"], self._settings["port"])

    @property
    def http_address(self) -> Address:
        """The address of HTTP and WebSockets; it stays the same while the server is stopped."""
        return Address(self._settings["host"], self._settings["http_port"])

    @property
    def host(self) -> str:
        return self.address.host

    @property
    def port(self) -> int:
        return self.address.port

    def client(self, **options: Unpack[ClientOptions]) -> BrokerClient:
        """A client of this server; use it in a ``with`` statement or call ``connect``."""
        options.setdefault("token", self._settings.get("token"))
        return BrokerClient(*self.address, **options)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def restart(self, **changes: Any) -> None:
        """Stop cleanly and start again, on the same port and directory; ``changes`` are settings."""
        self.stop()
        self._settings.update(changes)
        self.start()


@contextlib.contextmanager
def _started(server: AnyServer, end: Callable[[AnyServer], None]) -> Iterator[AnyServer]:
    try:
        server.start()
        try:
            yield server
        finally:
            end(server)
    finally:
        shutil.rmtree(server._directory, ignore_errors=True)


# --- in a thread ----------------------------------------------------------------------------------
class RunningServer(_TestServer, Shell):
    """A real server in a thread of this process."""

    _core: Server
    _kind = "server"

    def start(self) -> None:
        self._start(self._open)

    async def _open(self) -> None:
        config = self._directory / "config.json"
        config.write_text("{}")
        self._core = Server(load(self._settings, {}, config))
        await self._core.start()
        self._settings["port"] = self._core.addresses["tcp"][1]
        self._settings["http_port"] = self._core.addresses["http"][1]
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        await self._core.wait()  # a failed sync stops a server too
        await self._core.close()

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    @property
    def server(self) -> Server:
        assert self.is_running, "the server is stopped"
        return self._core

    @property
    def engine(self) -> Engine:
        """Its broker. It belongs to the server's loop: ask through ``call``."""
        return self.server.engine

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on the server's loop, where everything of the broker may be touched."""

        async def run() -> Result:
            return function(*arguments)

        return self._begin(run()).result(STOP_S)

    def wait_until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        """Wait until a condition holds that is evaluated on the server's loop."""
        wait_until(lambda: self.call(condition), timeout, str(condition))

    def stop(self) -> None:
        """As SIGTERM does it: answer the requests under way, give deliveries back, sync."""
        if self.is_running:
            try:
                self._begin(self._drain()).result(STOP_S)
            finally:
                self._stop()

    close = stop

    async def _drain(self) -> None:
        self._core.stop()
        await self._serving

    def kill(self) -> None:
        """Nearly as SIGKILL does it: connections break, and nothing more is said or written."""
        if not self.is_running:
            return
        try:
            self._begin(self._drop_everybody()).result(STOP_S)
        finally:
            self._stop()
        # The disk threads finish their jobs; then the lock is released.
        engine = self._core.engine
        threads = list(engine.workers._threads)
        engine.workers.close()
        for thread in threads:
            thread.join(STOP_S)
        if engine.directory is not None and engine.directory._lock is not None:
            engine.directory._lock.close()

    async def _drop_everybody(self) -> None:
        """As a kill does it: no client is told, nothing is given back or stored."""
        self._serving.cancel()
        self._core.hub.draining = True  # a client may just be connecting
        for listener in self._core._listeners:
            listener.close()
        await _let_connections_come()
        for connection in list(self._core.hub.connections):
            connection.session = None
            connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._core.hub.wait_until_empty()
        await _let_connections_come()

    def _not_open(self) -> Closed:
        return Closed("the server is stopped")


async def _let_connections_come() -> None:
    """Wait the turns of the loop that an accepted connection needs to be made, refused and closed."""
    for _ in range(5):
        await asyncio.sleep(0)


def running_server(
    data_dir: str | Path | None = None, *, memory: bool = False, **settings: Any
) -> AbstractContextManager[RunningServer]:
    """A real server in a thread of this process; without a directory it gets a temporary one."""
    return _started(RunningServer(data_dir, memory, settings), RunningServer.stop)


# --- as a process -----------------------------------------------------------------------------------
class ServerProcess(_TestServer):
    """A real ``headrace serve``."""

    arguments: tuple[str, ...] = ()
    main = "from headrace.cli import main; main()"
    """The program that the process runs."""
    addresses: dict[str, Address]
    ready_line: str
    _process: subprocess.Popen[bytes] | None = None

    # --- starting ---------------------------------------------------------------------------
    def start(self) -> None:
        """Start it and wait until it says that it is ready; :class:`DidNotStart` if it does not."""
        assert self._process is None, "it runs already"
        stdout, stderr = self._directory / "stdout", self._directory / "stderr"
        with stdout.open("wb") as output, stderr.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.main, "serve", *self.arguments],
                cwd=self._directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the program that started it, which then stops it
            )
        try:
            self._wait_for_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _environment(self) -> dict[str, str]:
        ours = {name for setting in SETTINGS for name in setting.environment}
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in ours and not name.startswith("HEADRACE_")
        }
        told = {n: str(v) for n, v in self._settings.items() if v is not None}
        return clean | {f"HEADRACE_{name.upper()}": value for name, value in told.items()}

    def _wait_for_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            has_ended = process.poll() is not None
            for line in (self._directory / "stdout").read_text().splitlines(keepends=True):
                found = {scheme: Address(h, int(p)) for scheme, h, p in _PLACE.findall(line)}
                if found and line.endswith("\n"):
                    self.ready_line, self.addresses = line.strip(), found
                    self._settings["port"] = (found.get("tcp") or found["tls"]).port
                    self._settings["http_port"] = (found.get("http") or found["https"]).port
                    return
            if has_ended or time.monotonic() > deadline:
                raise DidNotStart(self.wait() if has_ended else None, self.errors)
            time.sleep(_LOOK_AGAIN_S)

    # --- asking -----------------------------------------------------------------------------
    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is stopped"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def errors(self) -> str:
        """Everything that it has written to standard error, over all restarts."""
        return (self._directory / "stderr").read_text(errors="replace")

    def rss_bytes(self) -> int:
        """The memory that it uses (Linux)."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # --- ending -----------------------------------------------------------------------------
    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def suspend(self) -> None:
        """It keeps its connections and answers nothing, like a machine that hangs."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float = STOP_S) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(timeout)
        self._process = None
        return code

    def terminate(self) -> int:
        """SIGTERM: it drains and ends. Its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def stop(self) -> None:
        """SIGTERM, unless it has ended by itself."""
        if self.is_running:
            self.terminate()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self.wait()


def server_process(
    data_dir: str | Path | None = None,
    *,
    memory: bool = False,
    arguments: tuple[str, ...] = (),
    **settings: Any,
) -> AbstractContextManager[ServerProcess]:
    """A real server in a process of its own, ready; killed at the end if it still runs."""
    server = ServerProcess(data_dir, memory, settings)
    server.arguments = arguments
    return _started(server, ServerProcess.kill)

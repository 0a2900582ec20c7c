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
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.broker.engine import Engine
from headrace.client.threads import BrokerClient
from headrace.clock import new_loop
from headrace.server.server import Server
from headrace.settings import SETTINGS, Settings, load

Result = TypeVar("Result")
START_S = 30.0
TURNS_TO_COME = 5
"""Turns of the loop until an accepted connection is made, refused and closed."""
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
    """Until the condition holds, or :class:`AssertionError` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} seconds: {what or condition}")
        time.sleep(_LOOK_AGAIN_S)


class _Home:
    """A server's directories and settings, which outlive a restart."""

    def __init__(self, data_dir: str | Path | None, memory: bool, settings: dict[str, Any]):
        self._temporary = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.data_dir = Path(data_dir) if data_dir is not None else self._temporary / "data"
        self.config = self._temporary / "config.json"
        self.config.write_text("{}")
        self.settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "http_port": 0, **settings}
        self.settings["data_dir"] = str(self.data_dir)
        if memory:
            self.settings["persistence_enabled"] = False

    @property
    def directory(self) -> Path:
        return self._temporary

    def load(self) -> Settings:
        return load(self.settings, {}, self.config)

    def remove(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


class _TestServer:
    """A server's addresses and data directory, which outlive a restart, and clients for it."""

    def __init__(self, home: _Home):
        self._home = home

    @property
    def data_dir(self) -> Path:
        return self._home.data_dir

    @property
    def address(self) -> Address:
        """The address of the text and binary protocols; it stays the same while the server is stopped."""
        return Address(self._home.settings["host"], self._home.settings["port"])

    @property
    def http_address(self) -> Address:
        """The address of HTTP and WebSockets; it stays the same while the server is stopped."""
        return Address(self._home.settings["host"], self._home.settings["http_port"])

    @property
    def host(self) -> str:
        return self.address.host

    @property
    def port(self) -> int:
        return self.address.port

    def client(self, **options: Any) -> BrokerClient:
        """A client of this server; use it in a ``with`` statement or call ``connect``."""
        options.setdefault("token", self._home.settings.get("token"))
        return BrokerClient(*self.address, **options)


# --- in a thread ----------------------------------------------------------------------------------
class _Life:
    """One server from its start to its end, on a loop in a thread."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._killed = False
        self._over: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self.server: Server
        self._thread = threading.Thread(target=self._run, name="headrace-server", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise AssertionError(f"the server did not start within {START_S} seconds")
        self._complain()

    def _complain(self) -> None:
        if self._error is not None:
            self._thread.join()
            raise self._error

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        if self._killed:
            self._let_go()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.server = Server(self._settings)
        await self.server.start()
        self._started.set()
        watch = self.loop.create_task(self._until_stopped())
        await self._over.wait()
        watch.cancel()
        if self._killed:
            await self._drop_everybody()
        else:
            await self.server.close()

    async def _until_stopped(self) -> None:
        await self.server.wait()  # a failed sync stops a server too
        self._over.set()

    async def _drop_everybody(self) -> None:
        """As a kill does it: nobody is told, nothing is given back or written down."""
        self.server.hub.draining = True  # somebody may just be coming
        for listener in self.server._listeners:
            listener.close()
        for _ in range(TURNS_TO_COME):
            await asyncio.sleep(0)
        for connection in list(self.server.hub.connections):
            connection.session = None
            connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.server.hub.wait_until_empty()
        for _ in range(TURNS_TO_COME):
            await asyncio.sleep(0)

    def _let_go(self) -> None:
        """The loop is gone; what its disk threads were at comes to an end, and so does the lock."""
        engine = self.server.engine
        threads = list(engine.workers._threads)
        engine.workers.close()
        for thread in threads:
            thread.join(STOP_S)
        if engine.directory is not None and engine.directory._lock is not None:
            engine.directory._lock.close()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        async def run() -> Result:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(STOP_S)

    def end(self, *, killed: bool) -> None:
        self._killed = killed
        with contextlib.suppress(RuntimeError):  # it has stopped by itself
            self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise AssertionError(f"the server did not stop within {STOP_S} seconds")
        self._complain()


class RunningServer(_TestServer):
    """A real server in a thread of this process."""

    def __init__(self, home: _Home):
        super().__init__(home)
        self._life: _Life | None = None
        self.start()

    def start(self) -> None:
        if self._life is None:
            self._life = _Life(self._home.load())
            self._home.settings["port"] = self.server.addresses["tcp"][1]
            self._home.settings["http_port"] = self.server.addresses["http"][1]

    @property
    def _alive(self) -> _Life:
        assert self._life is not None, "the server is stopped"
        return self._life

    @property
    def is_running(self) -> bool:
        return self._life is not None

    @property
    def server(self) -> Server:
        return self._alive.server

    @property
    def engine(self) -> Engine:
        """Its broker. It belongs to the server's loop: ask through ``call``."""
        return self.server.engine

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on the server's loop, where everything of the broker may be touched."""
        return self._alive.call(function, *arguments)

    def wait_until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        """Until something holds that is looked at on the server's loop."""
        wait_until(lambda: self.call(condition), timeout, str(condition))

    def stop(self) -> None:
        """As SIGTERM does it: answer what is under way, give deliveries back, sync."""
        life, self._life = self._life, None
        if life is not None:
            life.end(killed=False)

    def kill(self) -> None:
        """Nearly as SIGKILL does it: connections break, and nothing more is said or written."""
        life, self._life = self._life, None
        if life is not None:
            life.end(killed=True)

    def restart(self, **changes: Any) -> None:
        """Start again, on the same port and directory; ``changes`` are settings."""
        self.stop()
        self._home.settings.update(changes)
        self.start()


@contextlib.contextmanager
def running_server(
    data_dir: str | Path | None = None, *, memory: bool = False, **settings: Any
) -> Iterator[RunningServer]:
    """A real server in a thread of this process; without a directory it has one of its own."""
    home = _Home(data_dir, memory, settings)
    try:
        server = RunningServer(home)
        try:
            yield server
        finally:
            server.stop()
    finally:
        home.remove()


# --- as a process -----------------------------------------------------------------------------------
class ServerProcess(_TestServer):
    """A real ``headrace serve``."""

    def __init__(self, home: _Home, arguments: tuple[str, ...]):
        super().__init__(home)
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self.addresses: dict[str, Address] = {}
        self.ready_line = ""
        self.start()

    # --- starting ---------------------------------------------------------------------------
    def start(self) -> None:
        """Start it and wait until it says that it is ready; :class:`DidNotStart` if it does not."""
        assert self._process is None, "it runs already"
        with self._errors_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, "serve", *self._arguments],
                cwd=self._home.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()
        try:
            self._wait_for_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def _errors_path(self) -> Path:
        return self._home.directory / "stderr"

    def _environment(self) -> dict[str, str]:
        ours = {name for setting in SETTINGS for name in setting.environment}
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in ours and not name.startswith("HEADRACE_")
        }
        told = {n: str(v) for n, v in self._home.settings.items() if v is not None}
        return clean | {f"HEADRACE_{name.upper()}": value for name, value in told.items()}

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _wait_for_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise DidNotStart(None, self.errors) from None
            if line is None:
                raise DidNotStart(self.wait(), self.errors)
            found = {scheme: Address(h, int(p)) for scheme, h, p in _PLACE.findall(line)}
            if found:
                self.ready_line = line.strip()
                self.addresses = found
                tcp = found.get("tcp") or found["tls"]
                self._home.settings["port"] = tcp.port
                self._home.settings["http_port"] = (found.get("http") or found["https"]).port
                return

    # --- asking -----------------------------------------------------------------------------
    @property
    def process(self) -> subprocess.Popen[str]:
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
        """What it has written to standard error, over all its lives."""
        return self._errors_path.read_text(errors="replace")

    def rss_bytes(self) -> int:
        """How much memory it has in use (Linux)."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # --- ending -----------------------------------------------------------------------------
    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def suspend(self) -> None:
        """It stays there and says nothing more, like a machine that hangs."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float = STOP_S) -> int:
        """Its exit code, once it has ended."""
        process = self.process
        code = process.wait(timeout)
        if self._reader is not None:
            self._reader.join(timeout)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        self._lines = queue.SimpleQueue()
        return code

    def terminate(self) -> int:
        """SIGTERM: it drains and ends. Its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self.wait()

    def restart(self, **changes: Any) -> None:
        """Start again, on the same port and directory; gently, unless it is dead already."""
        if self.is_running:
            self.terminate()
        self._home.settings.update(changes)
        self.start()


_MAIN = "from headrace.cli import main; main()"


@contextlib.contextmanager
def server_process(
    data_dir: str | Path | None = None,
    *,
    memory: bool = False,
    arguments: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[ServerProcess]:
    """A real server in a process of its own, ready; killed at the end if it still runs."""
    home = _Home(data_dir, memory, settings)
    try:
        server = ServerProcess(home, arguments)
        try:
            yield server
        finally:
            server.kill()
    finally:
        home.remove()

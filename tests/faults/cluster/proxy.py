"""A small TCP proxy with many links, each of which can be cut, silenced or slowed.

A process of its own. The first line of stdin is ``{"links": {name: port}}``; it answers with ``{name: port}``, where it listens.
Each further line is ``{"links": [name, …], "state": "open"|"cut"|"silent"|"slow", "delay": seconds}``, and is answered with ``ok``.

``cut``: connections are reset, and new ones too. ``silent``: nothing gets through, and nobody is told; what was sent arrives when the
link is open again. ``slow``: everything takes ``delay`` seconds longer, one piece after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

PIECE_BYTES = 256 << 10
ROOT = Path(__file__).resolve().parents[3]


class ProxyLink:
    def __init__(self, port: int):
        self._port = port
        self._state, self._delay = "open", 0.0
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def set(self, state: str, delay: float) -> None:
        self._state, self._delay = state, delay
        self._changed.set()
        self._changed = asyncio.Event()
        if state == "cut":
            for writer in self._writers:
                writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = {writer}
        try:
            await self._pass()
            there, other = await asyncio.open_connection("127.0.0.1", self._port)
            mine.add(other)
            self._writers |= mine
            await asyncio.gather(self._pump(reader, other), self._pump(there, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= mine
            for each in mine:
                each.transport.abort()

    async def _pass(self) -> None:
        """Wait as long as the link wants it."""
        while self._state == "silent":
            await self._changed.wait()
        if self._state == "cut":
            raise ConnectionResetError
        if self._state == "slow":
            await asyncio.sleep(self._delay)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            await self._pass()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # one side has ended: so does the other


async def main() -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    targets = json.loads(await stdin.readline())["links"]
    links = {name: ProxyLink(port) for name, port in targets.items()}
    ports = {}
    for name, link in links.items():
        server = await asyncio.start_server(link.accept, "127.0.0.1", 0, limit=PIECE_BYTES)
        ports[name] = server.sockets[0].getsockname()[1]
    print(json.dumps(ports), flush=True)
    while line := await stdin.readline():
        order = json.loads(line)
        for name in order["links"]:
            links[name].set(order["state"], order.get("delay", 0.0))
        print("ok", flush=True)


class Proxy:
    """The process, as its parent sees it."""

    def __init__(self, targets: dict[str, int]):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.cluster.proxy"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: dict[str, int] = json.loads(self._ask({"links": targets}))

    def _ask(self, order: dict[str, object]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()

    def set(self, links: list[str], state: str, delay: float = 0.0) -> None:
        answer = self._ask({"links": links, "state": state, "delay": delay})
        assert answer == "ok\n", "the proxy has ended"

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    asyncio.run(main())

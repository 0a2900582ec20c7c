"""A peer's server: started as a process group of its own, measured, stopped by its pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import ClassVar

START_S = 90.0
STOP_S = 30.0


class Server:
    """One peer with one kind of durability. A subclass says how to start it and what it promises."""

    name: ClassVar[str]
    modes: ClassVar[dict[str, str]]
    """Mode -> how it is configured, in words. "default", and "fsync": synced before each answer."""

    def __init__(self, mode: str, directory: Path):
        self.mode = mode
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def fetch(cls) -> None:
        """Have everything here that it needs, or raise ``Missing``."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start it; returns the seconds until it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self.serves():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = (self.directory / "log").read_text(errors="replace")[-600:]
                raise RuntimeError(f"{self.name} ({self.mode}) did not start: {tail}")
            time.sleep(0.005)
        return time.perf_counter() - began

    def serves(self) -> bool:
        """Whether clients are served: by default, whether the port is open."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def memory_mb(self) -> float:
        """Resident memory of all its processes."""
        assert self.process is not None
        pages = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getpgid(int(entry.name)) == self.process.pid:
                        pages += int((entry / "statm").read_text().split()[1])
                except (OSError, ProcessLookupError):
                    continue
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

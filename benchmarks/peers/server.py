"""A peer's server: started as a process group of its own, measured, stopped by its pid.

Nothing outlives the run: each child asks the kernel for a SIGTERM when the run dies, and is ended by process group
and by pid when the run ends in any other way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

START_S = 180.0
STOP_S = 30.0
_PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """The peer, its client or its load tool cannot be had here."""


class Server:
    """One peer with one kind of durability. A subclass says how to start it and what it promises."""

    name: ClassVar[str]
    modes: ClassVar[dict[str, str]]
    """Mode -> how it is configured, in words. "default", and "fsync": synced before each answer."""
    clients: ClassVar[tuple[str, ...]] = ()
    """The Python packages that drive it."""
    is_one_store: ClassVar[bool] = True
    """Whether both modes store the same bytes, so that memory and restarts need to be measured in one only."""
    http_port: int

    def __init__(self, mode: str, directory: Path):
        self.mode = mode
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    @classmethod
    def fetch(cls) -> None:
        """Have everything here that it needs, or raise ``Missing``."""

    @classmethod
    def version(cls) -> str:
        raise NotImplementedError

    def prepare(self) -> None:
        """What is done once, before its first start."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- life -------------------------------------------------------------------------------
    def launch(self) -> None:
        """Start it without waiting."""
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            self.prepare()
        self._began = time.perf_counter()
        with (self.directory / "log").open("ab") as log:
            self.process = child(self.command(), self.environment(), self.directory, log)

    def wait(self) -> float:
        """Wait until it serves; returns the seconds since its launch."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while not self.serves():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = (self.directory / "log").read_text(errors="replace")[-600:]
                raise RuntimeError(f"{self.name} ({self.mode}) did not start: {tail}")
            time.sleep(0.005)
        return time.perf_counter() - self._began

    def start(self) -> float:
        self.launch()
        return self.wait()

    def serves(self) -> bool:
        """Whether clients are served: by default, whether the port is open."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """As an administrator would: it may finish its work."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            end(process)

    def memory_mb(self) -> float:
        """Resident memory of all its processes."""
        assert self.process is not None
        pages = 0
        for pid in family(self.process.pid):
            with suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# --- processes --------------------------------------------------------------------------------------
def child(
    command: list[str], environment: Mapping[str, str], cwd: Path | None, output: Any
) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which gets a SIGTERM when this thread dies."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a child and everything that descends from it."""
    for pid in family(process.pid) if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def output_of(command: list[str], timeout: float, **environment: str) -> str:
    """What a command prints; RuntimeError if it fails or takes too long. Its whole process group is ended."""
    process = child(command, environment, None, subprocess.PIPE)
    try:
        text = process.communicate(timeout=timeout)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {timeout:.0f} s") from None
    finally:
        end(process)
        assert process.stdout is not None
        process.stdout.close()
    if process.returncode:
        lines = text.strip().splitlines()
        raise RuntimeError(
            f"{Path(command[0]).name}: {lines[-1] if lines else process.returncode}"[:400]
        )
    return text


def versions(packages: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {version(name)}" for name in packages)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""What a service manager hears of a broker: a real datagram socket, and a real ``headrace serve``."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.server.service_manager import ServiceManager
from headrace.testing import server_process

PATIENCE_S = 30.0


class Manager:
    """The manager's end of ``NOTIFY_SOCKET``."""

    def __init__(self, name: str):
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)

    def heard(self) -> dict[str, str]:
        """The lines of the next datagram."""
        lines = self._socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    abstract = f"@headrace-test-{os.getpid()}"
    manager = Manager(abstract if request.param == "abstract" else str(tmp_path / "notify"))
    yield manager
    manager.close()


def test_a_broker_says_that_it_is_ready_and_that_it_stops(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready comes when the ports are open, with their addresses; stopping comes after the signal."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.name)
    with server_process(memory=True) as server:
        heard = manager.heard()
        assert heard["READY"] == "1"
        assert f"127.0.0.1:{server.port}" in heard["STATUS"]
        assert server.terminate() == 0
        assert manager.heard()["STOPPING"] == "1"


def test_the_watchdog_hears_signs_of_life(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it is ready, a broker reports as often as the manager wants."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.name)
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    with server_process(memory=True):
        assert manager.heard()["READY"] == "1"
        for _ in range(3):
            assert manager.heard() == {"WATCHDOG": "1"}


async def _one_life(environment: dict[str, str]) -> None:
    told = ServiceManager(asyncio.get_running_loop(), environment)
    told.ready("Listening")
    told.stopping()
    told.close()


def test_the_watchdog_of_another_process_is_not_ours(manager: Manager) -> None:
    """A shell that starts a broker may have a watchdog of its own."""
    environment = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    asyncio.run(_one_life(environment))
    assert [len(manager.heard()) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("name", ["", "/nowhere/notify"])
def test_without_a_manager_it_runs_all_the_same(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that cannot be reached is one line in the log."""
    asyncio.run(_one_life({"NOTIFY_SOCKET": name}))
    assert [record.levelname for record in caplog.records] == (["WARNING"] if name else [])

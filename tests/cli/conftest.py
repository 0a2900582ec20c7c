"""One real server for each file of tests, and the commands run against it."""

import os
import sys
from collections.abc import Iterator

import pytest

from headrace.cli import main
from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, running_server
from tests.cli.rig import Command, Ran, clean_environment, stdin_of


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A broker on a free port; tests tell their topics apart by name."""
    with running_server() as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def command(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Run a command as the shell would, but in this process; nothing tells it of a broker."""
    clean = clean_environment()
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))

    def run(*arguments: object, input: str | bytes = "", terminal: bool = False) -> Ran:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin_of(input, terminal=terminal))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def headrace(server: RunningServer, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same, with the server's address in the environment."""
    monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
    return command

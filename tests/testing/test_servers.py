"""The servers that tests start."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import DirectoryLocked, InvalidArgument
from headrace.testing import DidNotStart, running_server, server_process, wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_in_a_thread_answers_and_keeps_its_place_over_a_restart() -> None:
    """A restart goes on with the same port and the same data."""
    with running_server() as server, server.client() as client:
        address = server.address
        assert client.publish("orders", b"one").offset == 0
        server.restart()
        assert server.address == address
        assert client.publish("orders", b"two").offset == 1


def test_a_killed_server_has_what_it_acknowledged_and_lets_its_directory_go() -> None:
    """After kill, a start finds what was acknowledged; while it runs, the directory is taken."""
    with running_server() as server:
        with server.client() as client:
            client.publish("orders", b"one")
            with pytest.raises(DirectoryLocked), running_server(server.data_dir):
                pass
            server.kill()
            assert not server.is_running
        server.start()
        with server.client() as client:
            assert [message.value for message in client.fetch("orders")] == [b"one"]


def test_in_memory_nothing_is_written() -> None:
    """With memory=True there is no directory."""
    with running_server(memory=True) as server, server.client() as client:
        client.publish("orders", b"one")
        assert not server.data_dir.exists()


def test_settings_are_those_of_the_server_and_a_misspelt_one_is_refused() -> None:
    """Keyword arguments are settings, with the same complaints."""
    with running_server(memory=True, max_message_size="1KB") as server:
        assert server.call(lambda: server.engine.max_message_size) == 1024
    with pytest.raises(InvalidArgument, match="max_message_siz"), running_server(max_message_siz=1):
        pass


def test_the_environment_of_whoever_runs_the_tests_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither variables nor a config.json in the working directory reach the server."""
    monkeypatch.setenv("QB_SERVER_PORT", "1")
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    (tmp_path / "config.json").write_text('{"server": {"port": 1}}')
    monkeypatch.chdir(tmp_path)
    with running_server(memory=True) as server, server.client() as client:
        assert client.topics() == []
    with server_process(memory=True) as process, process.client() as client:
        assert client.topics() == []


def test_a_server_process_is_killed_started_again_and_drained() -> None:
    """SIGKILL, a start with the same address and data, SIGTERM with exit code 0."""
    with server_process() as server:
        address, first = server.address, server.pid
        with server.client() as client:
            client.publish("orders", b"one")
        server.kill()
        assert not server.is_running
        server.start()
        assert server.address == address
        assert server.pid != first
        with server.client() as client:
            assert [message.value for message in client.fetch("orders")] == [b"one"]
        assert server.rss_bytes() > 1 << 20
        assert server.terminate() == 0


def test_a_process_that_cannot_start_says_why() -> None:
    """The exit code and standard error come with the exception."""
    with pytest.raises(DidNotStart) as caught, server_process(port=0, durability="sometimes"):
        pass
    assert caught.value.code == 2
    assert "durability" in caught.value.errors


def test_a_process_is_gone_after_its_context() -> None:
    """At the end of the context the process is killed by its pid, even if it is suspended."""
    with server_process(memory=True) as server:
        process = server.process
        server.signal(signal.SIGSTOP)
    assert process.poll() == -signal.SIGKILL


def test_waiting_ends_with_the_condition_or_with_an_error() -> None:
    """wait_until returns when the condition holds and says so when it never does."""
    answers = iter([False, False, True])
    wait_until(lambda: next(answers))
    with pytest.raises(AssertionError, match="the moon"):
        wait_until(lambda: False, timeout=0.01, what="the moon")


def test_the_fixtures_work_in_somebody_elses_tests(tmp_path: Path) -> None:
    """A test file that names the plugin gets a broker and a server."""
    (tmp_path / "test_shop.py").write_text(
        """
def test_in_process(headrace_broker):
    headrace_broker.publish("orders", b"one")
    assert headrace_broker.fetch("orders")[0].value == b"one"

def test_over_the_network(headrace_server):
    with headrace_server.client() as client:
        client.publish("orders", b"one")
        headrace_server.restart()
        assert client.fetch("orders")[0].value == b"one"
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "headrace.testing.fixtures", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout

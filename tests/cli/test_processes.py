"""The commands as processes: interrupted, cut off, completed by the shell."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, wait_until
from tests.cli.rig import (
    SCRIPT,
    Command,
    Stdin,
    clean_environment,
    is_followed,
    run_script,
    start_script,
)


@contextmanager
def started(server: RunningServer, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = start_script(*arguments, HEADRACE_SERVER=f"{server.host}:{server.port}")
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("tail", "-f", "events"),
        ("subscribe", "events", "--offset", "0"),
        ("join-subscription", "reader"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_ends_it_without_a_word(
    server: RunningServer, client: BrokerClient, arguments: tuple[str, ...]
) -> None:
    """Exit code 130, as for any command that was interrupted."""
    client.create_subscription("reader", "events")
    client.publish_text("events", "one")
    with started(server, *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("  one\n")  # so it is under way
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, "")


def test_ctrl_c_while_the_commands_are_imported() -> None:
    """Exit code 130 and no traceback, also before the command itself runs."""
    program = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from headrace.__main__ import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_ctrl_c_at_a_question(
    headrace: Command, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an interrupt, not the answer no: exit code 130, and nothing is deleted."""

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    client.create_topic("asked")
    monkeypatch.setattr(Stdin, "readline", interrupted)
    ran = headrace("delete-topic", "asked", terminal=True)
    assert ran.code == 130
    assert "Aborted" not in ran.err
    assert "asked" in client.topics()


def test_a_follower_goes_on_after_the_broker_came_back(
    server: RunningServer, client: BrokerClient
) -> None:
    """tail -f survives a restart of the broker."""
    client.create_topic("restarted")
    client.publish_text("restarted", "before")
    with started(server, "tail", "-f", "restarted") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("  before\n")
        server.restart()
        wait_until(lambda: is_followed(server, "restarted"))
        client.publish_text("restarted", "after")
        assert process.stdout.readline().endswith("  after\n")


def test_a_follower_of_a_topic_that_does_not_exist_is_told(server: RunningServer) -> None:
    """A misspelt topic does not look like one without messages."""
    with started(server, "tail", "-f", "mispelt") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Topic mispelt did not exist: it was created")


def test_a_reader_that_has_seen_enough(server: RunningServer, client: BrokerClient) -> None:
    """``headrace fetch … | head -1`` ends without a word."""
    client.publish_many("long", [b"x" * 100] * 5_000)
    with started(server, "fetch", "long", "-n", "5000") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("long/0@0  xxx")
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (1, "")


def test_the_shell_can_complete_commands() -> None:
    """The completion script is printed, and it knows the commands."""
    script = run_script(_HEADRACE_COMPLETE="source_bash")
    assert "complete -o default -F _headrace_completion headrace" in script.out
    words = run_script(
        _HEADRACE_COMPLETE="complete_bash", COMP_WORDS="headrace create-", COMP_CWORD="1"
    )
    assert words.out.split() == ["create-topic", "create-subscription"]


def test_show_completion_prints_the_script() -> None:
    """--show-completion, in a shell that it knows."""
    ended = subprocess.run(
        ["bash", "-c", '"$0" --show-completion; exit $?', SCRIPT],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=30,
    )
    assert ended.returncode == 0
    assert "_HEADRACE_COMPLETE=complete_bash" in ended.stdout

"""Ctrl-C while Spark starts."""

import subprocess

import pytest

from headrace.cli.spark_work import no_orphans


def start() -> "subprocess.Popen[bytes]":
    """A shell that stays, with a child of its own; both ignore Ctrl-C."""
    started = subprocess.Popen(
        ["sh", "-c", "trap '' INT; sleep 600 & echo started; wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"started\n"
    return started


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_an_interrupted_start_has_started_is_ended(error: type[BaseException]) -> None:
    """The script and the Java that it started, but nothing that ran before."""
    started = []

    def interrupted() -> None:
        with no_orphans():
            started.append(start())
            raise error

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        with pytest.raises(error):
            interrupted()
        with started[0] as shell:
            assert shell.wait(10) < 0
            assert shell.stdout is not None
            assert shell.stdout.read() == b"", "its child is gone, too"
        assert before.poll() is None


def test_what_was_started_in_good_order_stays() -> None:
    """Only an interruption ends it."""
    with no_orphans():
        started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with started:
        assert started.poll() is None
        assert started.stdin is not None
        started.stdin.close()

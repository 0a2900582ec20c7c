"""``headrace bench`` against real servers."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app, main
from headrace.cli.bench import draw_histogram
from headrace.errors import HeadraceError
from headrace.testing import RunningServer, running_server


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def places(server: RunningServer) -> list[str]:
    return ["--server", f"{server.host}:{server.port}"]


def run(server: RunningServer, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *places(server), *map(str, arguments)])


def run_json(server: RunningServer, *arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(server, "--json", *arguments)
    assert result.exit_code == code, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def topics(server: RunningServer) -> list[str]:
    with server.client() as client:
        return client.topics()


@contextmanager
def under_way(server: RunningServer, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A test in a process of its own that has stored its first messages."""
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "bench", "--json"]
    process = subprocess.Popen(
        [*command, *places(server), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def has_stored() -> bool:
        return any(topic.published_total() > 20 for topic in server.engine.topics)

    try:
        server.wait_until(has_stored, timeout=30)
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def test_every_message_is_published_and_measured(server: RunningServer) -> None:
    """Counts, latencies and the rate; the topic is deleted afterwards."""
    found = run_json(server, "-c", 5, "-n", 200)
    assert found["published"] == found["sent"] == 200
    assert found["connections"] == 5
    assert found["errors"] == {}
    assert found["delivered"] is None
    assert found["durability"] == "always"
    assert found["messages_per_second"] > 0
    latency = found["latency_ms"]
    assert 0 < latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    assert sum(step["count"] for step in latency["histogram"]) == 200
    assert topics(server) == []


def test_consuming_measures_the_time_to_delivery(server: RunningServer) -> None:
    """Each message is delivered once, not earlier than it was sent."""
    found = run_json(server, "-c", 3, "-n", 100, "--consume")
    assert found["delivered"] == 100
    assert sum(step["count"] for step in found["delivery_ms"]["histogram"]) == 100
    assert found["delivery_ms"]["min"] > 0


def test_a_topic_of_many_partitions_is_consumed_whole(server: RunningServer) -> None:
    """Connections spread over the partitions, and the subscriber receives from all of them."""
    with server.client() as client:
        client.create_topic("orders", partitions=4)
    found = run_json(server, "-c", 5, "-n", 100, "--topic", "orders", "--consume")
    assert found["delivered"] == 100
    with server.client() as client:
        counts = [len(client.fetch("orders", partition=number)) for number in range(4)]
    assert sum(counts) == 100
    assert all(counts)


def test_a_token_is_presented() -> None:
    """With the broker's token it works; without it, the error names the reason."""
    with running_server(token="secret") as server:
        arguments = ["-c", 2, "-n", 10]
        assert run_json(server, *arguments, "--token", "secret")["published"] == 10
        result = run(server, *arguments, "--token", "wrong")
        assert isinstance(result.exception, HeadraceError)
        assert result.exception.code == "unauthenticated"


def test_messages_have_the_size_asked_for_and_the_topic_can_be_kept(server: RunningServer) -> None:
    """--size is the size of the payload, --keep keeps the topic."""
    found = run_json(server, "-c", 2, "-n", 10, "--size", 333, "--keep")
    assert topics(server) == [found["topic"]]
    with server.client() as client:
        messages = client.fetch(found["topic"])
    assert [len(message.value) for message in messages] == [333] * 10
    numbers = {json.loads(message.value)["bench"] for message in messages}
    assert numbers == {f"{number:010d}" for number in range(10)}


def test_a_topic_that_existed_is_not_deleted(server: RunningServer) -> None:
    """--topic may name a topic in use: the test publishes to it and keeps it."""
    with server.client() as client:
        client.publish("orders", b"precious")
    result = run(server, "-c", 2, "-n", 10, "--topic", "orders")
    assert result.exit_code == 0
    assert "The messages are in topic orders." in result.stdout
    with server.client() as client:
        assert len(client.fetch("orders")) == 11


def test_a_named_topic_that_the_test_created_is_deleted(server: RunningServer) -> None:
    """--topic with a new name changes only the name."""
    assert run(server, "-c", 2, "-n", 10, "--topic", "mine").exit_code == 0
    assert topics(server) == []


def test_the_summary_is_for_people(server: RunningServer) -> None:
    """The rate, the percentiles and a bar for each step."""
    out = run(server, "-c", 4, "-n", 100).stdout
    assert "4 connections, messages of 100 bytes, durability always" in out
    assert "published  100 of 100" in out
    assert "time to the receipt: p50 " in out
    assert "█ " in out
    assert "error" not in out


def test_a_rate_is_kept(server: RunningServer) -> None:
    """50 messages at 500 a second take a tenth of a second, give or take a timer's rounding."""
    found = run_json(server, "-c", 5, "-n", 50, "--rate", 500)
    assert found["published"] == 50
    assert found["seconds"] >= 48 / 500


def test_errors_are_counted_by_code() -> None:
    """Refused messages are counted by their error, and the exit code is 1."""
    with running_server(max_message_size="1KB") as server:
        found = run_json(server, "-c", 2, "-n", 10, "--size", 2000, code=1)
    assert found["published"] == 0
    assert found["errors"] == {"message_too_large": 10}
    assert found["latency_ms"] is None


def test_the_time_is_bounded(server: RunningServer) -> None:
    """--seconds ends the test, and the summary says so."""
    arguments = ("-c", 1, "-n", 100, "--rate", 1, "--seconds", 0.05)
    found = run_json(server, *arguments, code=1)
    assert found["time_was_up"]
    assert found["published"] == found["sent"] == 1
    assert "The time was up" in run(server, *arguments).stdout


def test_an_interrupted_test_prints_its_results(server: RunningServer) -> None:
    """After Ctrl-C: exit code 130, the results so far, and the topic is deleted."""
    with under_way(server, "-c", 3, "-n", 10_000_000) as process:
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
    found = json.loads(out)
    assert found["interrupted"]
    assert found["published"] == found["sent"] > 0
    assert topics(server) == []


def test_a_broker_that_dies_ends_the_test(server: RunningServer) -> None:
    """Messages in flight are counted as errors, and the test does not wait for a dead broker."""
    with under_way(server, "-c", 3, "-n", 10_000_000) as process:
        server.kill()
        out, errors = process.communicate(timeout=30)
        assert process.returncode == 1, errors
    found = json.loads(out)
    assert found["published"] > 0
    assert 0 < sum(found["errors"].values()) <= 3
    assert "could not be deleted" in errors


def test_no_broker_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the address and says what to do; exit code 2."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["headrace", "bench", "--server", place])
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert f"no broker answers at {place}" in errors
    assert "--start" in errors
    assert errors.count("\n") == 1


def test_a_broker_of_its_own() -> None:
    """--start starts a broker and stops it afterwards."""
    arguments = ["bench", "--start", "-c", "2", "-n", "20", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["published"] == 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--start", "--server", "127.0.0.1:1"], "--start starts a broker of its own"),
        (["--server", "ftp://127.0.0.1:1"], "write host:port"),
        (["--server", "127.0.0.1:none"], "is not a port"),
        (["--ca", "/nowhere/ca.pem"], "cannot be used"),
    ],
)
def test_invalid_arguments(arguments: list[str], complaint: str) -> None:
    """A mistake in the arguments is an error before the test starts."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, HeadraceError)
    assert complaint in result.exception.message


@pytest.mark.parametrize(
    "arguments", [["--size", "10"], ["--concurrent", "0"], ["--messages", "999999999"]]
)
def test_everything_has_a_bound(arguments: list[str]) -> None:
    """Sizes and counts that make no sense are refused by the command line."""
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2


def test_a_bar_for_each_step() -> None:
    """The largest count has the longest bar, and a small count is still visible."""
    steps = [
        {"from_ms": 0.5, "to_ms": 1.0, "count": 1_000_000},
        {"from_ms": 1.0, "to_ms": 2.0, "count": 1},
        {"from_ms": 2.0, "to_ms": 5.0, "count": 0},
    ]
    assert draw_histogram(steps) == [
        f"  500 µs – 1 ms  {'█' * 50} 1,000,000",
        "    1 ms – 2 ms  ▏ 1",
        "    2 ms – 5 ms   0",
    ]

"""``headrace bridge`` on the command line: what it prints, how it ends, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headrace.testing import RunningServer, wait_until
from tests.bridge.rig import WAIT_S, PlainKafka, new_name
from tests.cli.rig import Command, start_script

pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture
def plain(kafka: str) -> PlainKafka:
    return PlainKafka(kafka)


def test_both_ways(headrace: Command, plain: PlainKafka) -> None:
    """A topic goes to Headrace and back, and both commands say what they did."""
    topic, target, name = plain.create(2), plain.create(2), new_name("cli")
    plain.fill(topic, 100, 2)
    common = ("--kafka-servers", plain.servers, "--name", name, "--until-caught-up")
    into = headrace("bridge", "from-kafka", topic, *common)
    assert (into.code, into.out) == (0, f"bridge {name} copied: 100 messages copied, lag 0\n")
    back = headrace("bridge", "to-kafka", f"{topic}={target}", *common, "--json")
    assert back.code == 0
    assert back.json == {
        "copied": 100,
        "skipped": 0,
        "routes": [
            {"from": topic, "to": target, "partitions": 2, "copied": 100, "skipped": 0, "lag": 0}
        ],
    }
    assert [seen[:4] for seen in plain.read(target)] == [seen[:4] for seen in plain.read(topic)]


def test_skipped_messages_are_told(headrace: Command, plain: PlainKafka) -> None:
    """With --skip the command ends with 1, and says what is missing."""
    topic = plain.create(1)
    plain.put(topic, b"", b"k" * (1 << 17))
    plain.flush()
    common = ("--kafka-servers", plain.servers, "--name", new_name("cli"), "--until-caught-up")
    refused = headrace("bridge", "from-kafka", topic, *common)
    assert refused.code == 2
    assert f"{topic}/0@0" in refused.err
    skipped = headrace("bridge", "from-kafka", topic, *common, "--skip", "too-large")
    assert skipped.code == 1
    assert "1 message skipped" in skipped.out


def test_ctrl_c_ends_it_cleanly(server: RunningServer, plain: PlainKafka) -> None:
    """An interrupted bridge has stored what it says, and ends with 0."""
    topic, name = plain.create(1), new_name("cli")
    plain.fill(topic, 100, 1)
    process = start_script(
        *("bridge", "from-kafka", topic, "--kafka-servers", plain.servers, "--name", name),
        HEADRACE_SERVER=f"{server.host}:{server.port}",
    )
    try:
        with server.client() as client:
            client.create_topic(topic)
            wait_until(lambda: client.positions(topic)[topic][0]["end"] == 100, WAIT_S)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == f"bridge {name} stopped: 100 messages copied, lag 0\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("orders", "--name", "x"), "--kafka-servers"),
        (("orders", "--kafka-servers", "k1:9092"), "--name"),
        (("orders", "--kafka-servers", "k1:9092", "--name", "x y"), "'x y'"),
        (("a", "a", "--kafka-servers", "k1:9092", "--name", "x"), "named twice"),
        (("=a", "--kafka-servers", "k1:9092", "--name", "x"), "FROM=TO"),
        (
            ("a", "--kafka-servers", "k1:9092", "--name", "x", "--skip", "all"),
            "too-large or deleted",
        ),
        (("a", "--kafka-servers", "k1:9092", "--name", "x", "--from", "1"), "earliest or latest"),
        (("a", "--kafka-servers", "k1:9092", "--name", "x", "--kafka-config", "/no"), "/no"),
    ],
)
@pytest.mark.parametrize("direction", ["from-kafka", "to-kafka"])
def test_mistakes(
    headrace: Command, direction: str, arguments: tuple[str, ...], sentence: str
) -> None:
    """A mistake is one line that says what to do."""
    ran = headrace("bridge", direction, *arguments)
    assert ran.code == 2
    assert sentence in ran.err


def test_a_property_that_librdkafka_does_not_know(headrace: Command, tmp_path: Path) -> None:
    """It is named, without its value."""
    file = tmp_path / "kafka.properties"
    file.write_text("sasl.passwort=hunter2\n")
    arguments = ("a", "--kafka-servers", "127.0.0.1:1", "--name", "x", "--kafka-config", file)
    ran = headrace("bridge", "to-kafka", *arguments)
    assert ran.code == 2
    assert "sasl.passwort" in ran.err
    assert "hunter2" not in ran.err


def test_a_kafka_that_is_away(headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is named."""
    monkeypatch.setattr("headrace.bridge.kafka.ASK_S", 0.5)
    ran = headrace("bridge", "to-kafka", "a", "--kafka-servers", "127.0.0.1:1", "--name", "x")
    assert ran.code == 2
    assert "127.0.0.1:1" in ran.err
    assert "kafka_unavailable" in ran.err

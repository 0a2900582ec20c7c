"""The bridge is killed at random moments while it copies, and the output equals the input."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from headrace import BrokerClient
from headrace.testing import running_server
from tests.bridge.rig import WAIT_S, PlainKafka, new_name
from tests.cli.rig import run_script, start_script

pytestmark = [pytest.mark.xdist_group("kafka"), pytest.mark.slow, pytest.mark.timeout(600)]
KILLS = 8
MESSAGES = 15_000
"""Between two kills."""
PARTITIONS = 3
ALL = KILLS * MESSAGES


def killed_often(
    arguments: tuple[str, ...],
    feed: Callable[[int], None],
    copied: Callable[[], int],
    server: str,
) -> None:
    """Run the command again and again; each time it gets more to copy, and is killed in the middle of it."""
    random = Random()
    for number in range(KILLS):
        feeding = threading.Thread(target=feed, args=(number * MESSAGES,))
        feeding.start()
        until = number * MESSAGES + random.randrange(1, MESSAGES)
        process = start_script(*arguments, HEADRACE_SERVER=server)
        try:
            deadline = time.monotonic() + WAIT_S
            while copied() < until and process.poll() is None:
                assert time.monotonic() < deadline
            threading.Event().wait(random.random() * 0.05)
        finally:
            process.kill()
            out, err = process.communicate()
            feeding.join()
        assert process.returncode == -9, (out, err)
    ended = run_script(*arguments, "--until-caught-up", HEADRACE_SERVER=server)
    assert ended.code == 0, ended


def everything(client: BrokerClient, topic: str) -> list[list[bytes]]:
    found = []
    for place in client.positions(topic)[topic]:
        at, some = place["start"], []
        while at < place["end"]:
            for batch in client.fetch_batches(topic, at, partition=place["partition"]):
                some += batch.values()
                at = batch.end_offset
        found.append(some)
    return found


def test_into_headrace(kafka: str) -> None:
    """Kafka's records are in Headrace exactly once, in order, whenever the bridge was killed."""
    plain = PlainKafka(kafka)
    topic = plain.create(PARTITIONS)
    with running_server() as server, server.client() as client:
        client.create_topic(topic, PARTITIONS)
        killed_often(
            (
                *("bridge", "from-kafka", topic),
                *("--kafka-servers", kafka, "--name", new_name("kill")),
            ),
            lambda first: plain.fill(topic, MESSAGES, PARTITIONS, first),
            lambda: sum(place["end"] for place in client.positions(topic)[topic]),
            f"{server.host}:{server.port}",
        )
        wanted = [[b"%d" % n for n in range(side, ALL, PARTITIONS)] for side in range(PARTITIONS)]
        assert everything(client, topic) == wanted


def test_into_kafka(kafka: str) -> None:
    """Headrace's messages are in Kafka exactly once, in order, whenever the bridge was killed."""
    plain = PlainKafka(kafka)
    with running_server() as server, server.client() as client:
        topic, target, name = new_name("out"), plain.create(PARTITIONS), new_name("kill")
        client.create_topic(topic, PARTITIONS)

        def feed(first: int) -> None:
            for low in range(first, first + MESSAGES, 1000):
                for side in range(PARTITIONS):
                    numbers = [n for n in range(low, low + 1000) if n % PARTITIONS == side]
                    client.publish_many(topic, [b"%d" % n for n in numbers], partition=side)

        def copied() -> int:
            stats = [s for s in client.subscriptions(topic) if s["name"] == f"bridge.{name}"]
            return sum(p["position"] for s in stats for p in s["partitions"])

        killed_often(
            (
                *("bridge", "to-kafka", f"{topic}={target}"),
                *("--kafka-servers", kafka, "--name", name),
            ),
            feed,
            copied,
            f"{server.host}:{server.port}",
        )
        found: list[list[bytes | None]] = [[] for _ in range(PARTITIONS)]
        for seen in plain.read(target):
            found[seen.partition].append(seen.value)
        assert found == everything(client, topic)
        assert sum(map(len, found)) == ALL

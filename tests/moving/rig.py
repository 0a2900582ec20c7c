"""A broker that has a bit of everything, and everything that a client can see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace import BrokerClient
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import running_server, wait_until

ID = "0f9d1a6e-5b1c-4c1e-9d57-0a7c2a5d3b11"
LATER_S = 10_000


def fill(directory: Path) -> dict[str, Any]:
    """Make the broker, stop it, and say what it had."""
    with running_server(directory) as server, server.client() as client:
        client.create_topic("orders", 3, retention_hours=None)
        keys = [b"k%d" % (n % 10) for n in range(3000)]
        client.publish_many("orders", [b"%d" % n for n in range(3000)], keys=keys)
        client.publish("orders", b"own", {"a": "1", "b": "ü"}, id=ID, timestamp=1, partition=1)
        client.publish("orders", b"short", ttl=LATER_S, to="email", partition=2)
        client.create_topic("packed", compression="zstd", retention_hours=None)
        client.publish_many("packed", [b"x" * 1000] * 100)
        client.create_topic("memory", durable=False)
        client.create_topic("empty", 2)
        # A partition whose first messages are gone.
        client.create_topic("old", segment_bytes=4096, retention_bytes=4096, retain_unread=False)
        identity = client.producer("importer")
        for n in range(20):
            client.publish("old", b"%d" % n * 500, producer=(*identity, n))
        server.call(server.engine.retention.run)
        assert client.positions("old")["old"][0]["start"] > 0
        # Positions, failures, dead letters, a pause.
        client.create_subscription("email", "orders", backoff=3600, max_deliveries=2)
        with client.subscription("email", "orders", prefetch=50) as consumer:
            for number, message in zip(range(40), consumer, strict=False):
                if number % 10 == 9:
                    message.nack(delay=0 if number == 9 else 3600, reason="no")
                else:
                    message.ack()
                if number == 9:
                    again = next(m for m in consumer if m.attempt == 2)
                    again.nack(reason="never")
            client.flush()
        wait_until(lambda: client.dead_letters("email"))
        client.create_subscription("all", ">", start="latest")
        client.pause_subscription("all")
        client.publish("orders", b"later", delay=LATER_S, id="1f9d1a6e-5b1c-4c1e-9d57-0a7c2a5d3b11")
        piece = client.stage(
            "orders", encode(Columns([b"staged"])), partition=0, name="job", number=5
        )
        client.commit_staged("job", 5, [piece])
        client.flush()
        return {**seen(client), "producer": identity}


def seen(client: BrokerClient) -> dict[str, Any]:
    topics = {}
    for stats in sorted(client.list_topics(), key=lambda each: each["topic"]):
        name = stats["topic"]
        topics[name] = {
            "settings": stats["settings"],
            "created": stats["created"],
            "places": [(p["start_offset"], p["end_offset"]) for p in stats["partitions"]],
            "messages": [messages(client, name, p) for p in range(len(stats["partitions"]))],
            "incarnations": [p["incarnation"] for p in client.positions(name)[name]],
        }
    subscriptions = {
        (each["name"], each["topic"]): (
            each["settings"],
            each["paused"],
            each["lag"],
            sorted(
                (p["topic"], p["partition"], p["position"], p["lag"]) for p in each["partitions"]
            ),
        )
        for each in client.subscriptions()
    }
    return {
        "topics": topics,
        "subscriptions": subscriptions,
        "dead letters": [
            (d.offset, d.message.value, d.reason, d.attempts) for d in client.dead_letters("email")
        ],
        "scheduled": client.scheduled(),
        "commit": client.last_commit("job"),
    }


def messages(client: BrokerClient, topic: str, partition: int) -> list[Any]:
    place = client.positions(topic)[topic][partition]
    at, found = place["start"], []
    while at < place["end"]:
        for batch in client.fetch_batches(topic, at, partition=partition):
            low = max(at - batch.base_offset, 0)
            columns = batch.targets(low), batch.expiry(low)
            for index, m in enumerate(batch.messages(topic, partition, low)):
                more = [None if column is None else column[index] for column in columns]
                found.append(
                    (
                        m.offset,
                        m.id,
                        m.timestamp,
                        m.key,
                        dict(m.headers),
                        m.value,
                        *[x or None for x in more],
                    )
                )
            at = batch.end_offset
    return found

"""The process that is killed: a broker on a data directory, and its load.

Started by ``runner.py`` with its orders as JSON on the first line of stdin; stdout is the oracle's
pipe. Phases:

- ``load``: open, show what is there, then publish and consume until killed, or until stdin ends,
  which asks for a close in good order.
- ``drain``: open, send again what had no answer, and consume until nothing is left. Then close.
- ``final``: open and show everything there is. Then close.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import orjson

from headrace import Broker, BrokerClient, HeadraceError
from headrace.errors import StaleDelivery
from tests.crash.consumers import is_idle, members
from tests.crash.history import Oracle, identify
from tests.crash.load import GROUPS, TOPICS, Client, Idempotent, Keyed, publishers

READ_CHUNK = 500
EXIT_FAILED = 3
"""The broker stopped itself."""


def define(broker: Broker, changes: dict[str, Any]) -> None:
    """The topics and groups of the load, whichever are not there yet."""
    there = set(broker.topics())
    for name, settings in TOPICS.items():
        if name not in there:
            broker.create_topic(name, **settings | changes)
    for group, (topic, settings) in GROUPS.items():
        broker.create_subscription(group, topic, **settings)


def show(broker: Broker | BrokerClient, oracle: Oracle, begin: dict[str, int]) -> None:
    """Tell the bounds of every partition, and what stands in it from ``begin`` on."""
    since = time.monotonic_ns()
    there = set(broker.topics())
    names = sorted(there) + [f"{s['topic']}:{s['name']}" for s in broker.subscriptions()]
    oracle.tell("defined", names=names, since=since)
    for topic in TOPICS:
        if topic not in there:
            continue
        since = time.monotonic_ns()
        for bounds in broker.topic_stats(topic)["partitions"]:
            partition = bounds["partition"]
            start, end = bounds["start_offset"], bounds["end_offset"]
            place = {"topic": topic, "partition": partition}
            oracle.tell("bounds", **place, start=start, end=end, since=since)
            if bounds["read_only"]:
                oracle.tell("problem", what=f"{topic}/{partition}: {bounds['read_only']}")
            offset = max(start, begin.get(f"{topic}/{partition}", 0))
            while offset < end:
                offset = show_some(broker, oracle, topic, partition, offset)


def show_some(
    broker: Broker | BrokerClient, oracle: Oracle, topic: str, partition: int, offset: int
) -> int:
    try:
        messages = broker.fetch(topic, offset, READ_CHUNK, partition=partition)
    except HeadraceError as error:
        what = f"{topic}/{partition} offset {offset} cannot be read: {error.code}: {error}"
        oracle.tell("problem", what=what)
        return sys.maxsize
    if [m.offset for m in messages] != list(range(offset, offset + len(messages))) or not messages:
        offsets = [m.offset for m in messages]
        oracle.tell("problem", what=f"{topic}/{partition}: asked for {offset}, got {offsets}")
        return sys.maxsize
    oracle.tell(
        "read",
        topic=topic,
        partition=partition,
        offset=offset,
        values=[identify(message) for message in messages],
    )
    return offset + len(messages)


def show_dead(broker: Broker | BrokerClient, oracle: Oracle) -> None:
    for group in GROUPS:
        after = -1
        while True:
            try:
                letters = broker.dead_letters(group, after=after, limit=READ_CHUNK)
            except HeadraceError:
                break  # none so far
            for letter in letters:
                message = letter.message
                oracle.tell(
                    "dead",
                    group=group,
                    topic=message.topic,
                    partition=message.partition,
                    offset=message.offset,
                    value=identify(message),
                    stored_ms=letter.timestamp,
                )
            if not letters:
                break
            after = letters[-1].offset


def load(broker: Broker, oracle: Oracle, orders: dict[str, Any]) -> None:
    life, seed = orders["life"], orders["seed"]
    clients: list[Client] = publishers(
        orders["publishers"], broker, oracle, life, seed, orders["memory"]
    )
    if orders["consume"]:
        clients += members(broker, oracle, life, seed)
    for client in clients:
        client.start()
    asked = threading.Event()

    def wait_for_the_end() -> None:
        while os.read(0, 1):  # not through sys.stdin: its lock would be held at the exit
            pass
        asked.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    while not asked.wait(0.05):
        if broker.engine.failed is not None:
            raise broker.engine.failed
    stop(clients)


def stop(clients: list[Client]) -> None:
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join()


def drain(broker: Broker, oracle: Oracle, orders: dict[str, Any]) -> None:
    """Everything that was sent arrives, and everything that was asked for is answered."""
    life, seed = orders["life"], orders["seed"]
    for client in publishers(list(orders["memory"]), broker, oracle, life, seed, orders["memory"]):
        pending = orders["memory"][client.name]["pending"]
        if pending and isinstance(client, Idempotent):
            client.publish(*pending)
        elif pending and isinstance(client, Keyed):
            client.publish(pending[0])
    clients = members(broker, oracle, life, seed, tidy=True)
    for client in clients:
        client.start()
    deadline = time.monotonic() + orders["window"]
    while (missing := is_idle(broker)) is not None:
        if time.monotonic() > deadline:
            oracle.tell("stuck", what=f"after {orders['window']} seconds, {missing}")
            break
        time.sleep(0.05)
    stop(clients)
    show_dead(broker, oracle)
    oracle.tell("rest", left=left_over(broker))


def left_over(broker: Broker | BrokerClient) -> dict[str, int]:
    """What should be nothing when everything is done: liveness, and not only safety."""
    groups = [broker.subscription_stats(group, topic) for group, (topic, _) in GROUPS.items()]
    left = {
        f"{what} of {group['name']}": int(group[what])  # type: ignore[literal-required]
        for group in groups
        for what in ("lag", "in_flight", "waiting_for_retry")
    }
    if not isinstance(broker, Broker):
        return left
    found: list[int] = []
    done = threading.Event()

    def retain() -> None:
        engine = broker.engine
        engine.retention.run()
        found.append(
            sum(
                len(partition.log.closed_segments())
                for topic in engine.topics
                if topic.settings.retention_bytes == 0
                for partition in topic.partitions
            )
        )
        done.set()

    broker._call(retain)
    done.wait(10)
    return left | {"finished segments kept": sum(found)}


def open_files(directory: str) -> int:
    """How many files of the directory this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(directory)
    return found


def close(broker: Broker) -> None:
    """Acks that came too late are raised here, if no flush has raised them; they are no finding."""
    with contextlib.suppress(StaleDelivery):
        broker.close()


def main() -> int:
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    orders = orjson.loads(sys.stdin.buffer.readline())
    oracle = Oracle(sys.stdout.fileno())
    life, phase = orders["life"], orders["phase"]
    oracle.tell("start", life=life)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        broker = Broker.open(orders["data"], **orders["options"])
        stack.callback(close, broker)
        oracle.tell("opened", life=life, seconds=time.monotonic() - began)
        try:
            if phase == "final":
                oracle.tell("final")
                show(broker, oracle, {})
            else:
                show(broker, oracle, orders["begin"])
                define(broker, orders["topic_changes"])
                (load if phase == "load" else drain)(broker, oracle, orders)
        except HeadraceError as error:
            if broker.engine.failed is None:
                raise
            at_ms = time.time_ns() // 1_000_000
            oracle.tell("failed", life=life, what=str(error), at_ms=at_ms)
            return EXIT_FAILED
    oracle.tell("closed", life=life, files_open=open_files(orders["data"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

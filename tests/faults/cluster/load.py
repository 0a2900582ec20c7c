"""The clients of a cluster: those of ``tests/crash``, over the network, each through any node; and their history."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import orjson

from headrace import BrokerClient, HeadraceError, Message
from tests.crash.checker import Checker
from tests.crash.consumers import MEMBERS, Member, is_idle
from tests.crash.history import Event, Oracle, identify
from tests.crash.load import GROUPS, TOPICS, Client, Idempotent, Keyed, Pinned, publishers
from tests.crash.victim import left_over, show, show_dead

PUBLISHERS = (
    *("s1", "s2", "k1", "k2", "b1", "kb1", "e1", "ke1", "eb1", "n1", "nb1"),
    *("i1", "i2", "i3", "x1", "d1", "d2", "a1"),
)
PROBES = tuple(f"p{partition}" for partition in range(TOPICS["orders"]["partitions"]))
"""One for each partition of ``orders``: by them we know whether a partition is served."""
OPTIONS: dict[str, Any] = {
    "request_timeout": 15,
    "delivery_timeout": 40,
    "heartbeat_interval": 2,
}
PACE = 12.0
"""Two cores carry three Kafkas, three nodes and the clients."""
ACK_TIMEOUT_S = 8.0
READ = 300


def settings_of(topic: str) -> dict[str, Any]:
    """Nothing is dropped: retention is another test's."""
    return {k: v for k, v in TOPICS[topic].items() if not k.startswith("retention")}


class NetworkMember(Member):
    """Joins through another node each time."""

    is_patient = True
    servers: list[str]

    def __init__(self, *rest: Any):
        super().__init__(*rest)
        if "ack_timeout" in self.settings:
            self.settings = self.settings | {"ack_timeout": ACK_TIMEOUT_S}

    def join_group(self) -> None:
        with client_of(self.servers, self.random) as self.broker:
            try:
                super().join_group()
            finally:
                self.oracle.tell("left", member=self.member, life=self.life)

    def deadline(self, message: Message) -> int:
        return time.monotonic_ns() + int(self.settings.get("ack_timeout", 30.0) * 1e9)

    def flush(self) -> None:
        since = time.monotonic_ns()
        try:
            self.broker.flush()
        except HeadraceError:
            self.oracle.tell("unflushed", member=self.member, life=self.life)
        else:
            self.oracle.tell("flushed", member=self.member, life=self.life, since=since)


class Reader(Client):
    """Reads topics as logs, and looks which there are, each time through another node."""

    is_patient = True
    servers: list[str]

    def step(self) -> None:
        with client_of(self.servers, self.random) as client:
            for _ in range(5):
                self.look(client)
                self.pause(0.2)

    def look(self, client: BrokerClient) -> None:
        since = time.monotonic_ns()
        names = list(client.topics())
        names += [f"{each['topic']}:{each['name']}" for each in client.subscriptions()]
        self.oracle.tell("defined", names=names, since=since)
        topic = self.random.choice(list(TOPICS))
        since = time.monotonic_ns()
        for bounds in client.topic_stats(topic)["partitions"]:
            place = {"topic": topic, "partition": bounds["partition"]}
            start, end = bounds["start_offset"], bounds["end_offset"]
            self.oracle.tell("bounds", **place, start=start, end=end, since=since)
            first = max(start, end - READ)
            found = client.fetch(topic, first, READ, partition=bounds["partition"])
            if [each.offset for each in found] != list(range(first, first + len(found))):
                offsets = [each.offset for each in found]
                self.oracle.tell("problem", what=f"{place}: asked for {first}, got {offsets}")
            if found:
                values = [identify(each) for each in found]
                self.oracle.tell("read", **place, offset=first, values=values)


def client_of(servers: list[str], random: Random) -> BrokerClient:
    """A client that tries the nodes in any order."""
    return BrokerClient(servers=random.sample(servers, len(servers)), **OPTIONS)


class ClusterLoad:
    """All clients of one run. ``pace``: how many times as long they pause."""

    def __init__(self, servers: list[str], directory: Path, seed: int, *, pace: float = PACE):
        self.servers, self.path, self.seed, self.pace = (
            servers,
            directory / "history.jsonl",
            seed,
            pace,
        )
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.oracle = Oracle(self._fd)
        self._random = Random(f"{seed}/load")
        self._shared: list[BrokerClient] = []
        self.publishers: list[Client] = []
        self.probes: list[Pinned] = []
        self.members: list[Client] = []
        self.readers: list[Client] = []

    # --- the stage ----------------------------------------------------------------------------
    def define(self) -> None:
        with client_of(self.servers, self._random) as client:
            for name in TOPICS:
                settings = settings_of(name)
                client.create_topic(name, **settings)
                partitions = settings.get("partitions", 1)
                self.oracle.tell("topic", name=name, partitions=partitions, retention=False)
            for group, (topic, settings) in GROUPS.items():
                if "ack_timeout" in settings:
                    settings = settings | {"ack_timeout": ACK_TIMEOUT_S}
                client.create_subscription(group, topic, **settings)
                self.oracle.tell(
                    "group",
                    name=group,
                    topic=topic,
                    ordering=settings.get("ordering", "none"),
                    max_deliveries=settings["max_deliveries"],
                )

    def _common(self, name: str) -> tuple[Oracle, int, Random]:
        return self.oracle, 1, Random(f"{self.seed}/{name}")

    def start(self) -> None:
        for _ in self.servers:
            self._shared.append(client_of(self.servers, self._random))
            self._shared[-1].connect()
        for number, name in enumerate((*PUBLISHERS, *PROBES)):
            client = self._shared[number % len(self._shared)]
            self.publishers += publishers([name], client, self.oracle, 1, self.seed, {})
        self.probes = [each for each in self.publishers if isinstance(each, Pinned)]
        self.readers = [Reader(name, self._shared[0], *self._common(name)) for name in ("r1", "r2")]
        self._join(tidy=False)
        self._start([*self.publishers, *self.readers, *self.members])

    def _join(self, *, tidy: bool) -> None:
        self.members = [
            NetworkMember(name, group, tidy, self._shared[0], *self._common(name))
            for group, count in MEMBERS.items()
            for name in (f"{group}-{tidy:d}{number}" for number in range(count))
        ]

    def _start(self, clients: list[Client]) -> None:
        for client in clients:
            client.is_patient, client.pace = True, self.pace
            client.servers = self.servers  # type: ignore[attr-defined]
            client.start()

    # --- liveness -----------------------------------------------------------------------------
    def wait_until_served(self, seconds: float) -> float | None:
        """How long it takes until every partition answers a publish that begins from now on; None: too long."""
        began = time.monotonic_ns()
        deadline = time.monotonic() + seconds
        while any(probe.answered < began for probe in self.probes):
            if time.monotonic() > deadline:
                late = [probe.name for probe in self.probes if probe.answered < began]
                self.stuck(f"{seconds:g} seconds after the faults, {late} have no answer")
                return None
            time.sleep(0.02)
        return (time.monotonic_ns() - began) / 1e9

    def stuck(self, what: str) -> None:
        self.oracle.tell("stuck", what=what)

    # --- the end ------------------------------------------------------------------------------
    def stop(self, clients: list[Client]) -> None:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join()

    def drain(self, seconds: float) -> float:
        """Everything that was asked for is answered, and everything that was sent arrives; how long that took."""
        self.stop([*self.readers, *self.publishers])
        began = time.monotonic()
        deadline = began + seconds
        for client in self.publishers:
            self._answer(client, deadline)
        self.stop(self.members)
        self._join(tidy=True)
        self._start(self.members)
        with client_of(self.servers, self._random) as client:
            while (missing := _missing(client)) is not None:
                if time.monotonic() > deadline:
                    self.stuck(f"after {seconds:g} seconds, {missing}")
                    break
                time.sleep(0.1)
            took = time.monotonic() - began
            self.stop(self.members)
            show_dead(client, self.oracle)
            self.oracle.tell("rest", left=left_over(client))
        return took

    def _answer(self, client: Client, deadline: float) -> None:
        """Repeat the call that had no answer."""
        while time.monotonic() < deadline:
            if isinstance(client, Idempotent) and client.memory.get("pending"):
                client.publish(*client.memory["pending"])
            elif isinstance(client, Keyed) and client.pending:
                client.publish(client.pending[0])
                client.pending = client.pending if client.is_unknown else None
            else:
                return
        self.stuck(f"{client.name} has no answer")

    def read_all(self) -> None:
        """Everything there is, as each of the nodes shows it."""
        self.oracle.tell("final")
        for server in self.servers:
            with BrokerClient(server, **OPTIONS) as client:
                show(client, self.oracle, {})

    def close(self) -> None:
        self.stop([*self.readers, *self.publishers, *self.members])
        for client in self._shared:
            with contextlib.suppress(HeadraceError):
                client.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def verdict(self) -> Checker:
        checker = Checker()
        for event in history(self.path):
            checker.add(event)
        checker.finish()
        return checker


def _missing(client: BrokerClient) -> str | None:
    try:
        return is_idle(client)
    except HeadraceError as error:
        return str(error)


def history(path: Path) -> list[Event]:
    with path.open("rb") as file:
        return [orjson.loads(line) for line in file]

"""Several nodes of one cluster: who owns what, and what the others do about it."""

import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace import BrokerClient
from headrace.errors import Conflict, HeadraceError, InvalidArgument, QueueFull
from headrace.server import members
from headrace.testing import RunningServer, running_server, server_process, wait_until
from tests.fixtures.three_nodes import ThreeNodes, free_port

pytestmark = pytest.mark.xdist_group("kafka")


def test_every_slot_has_one_owner_and_all_nodes_know_it(three_nodes: ThreeNodes) -> None:
    """Each node answers with the same map, whichever is asked."""
    with three_nodes.nodes[0].client() as client:
        client.create_topic("orders", partitions=6)

    def maps() -> list[Any]:
        found = []
        for node in three_nodes.nodes:
            with node.client() as client:
                found.append(client.topic_map("orders")["owners"])
        return found

    wait_until(lambda: None not in maps()[0] and maps()[0] == maps()[1] == maps()[2], 20.0)
    addresses = {f"127.0.0.1:{node.port}" for node in three_nodes.nodes}
    assert set(maps()[0]) == addresses
    with three_nodes.client() as client:
        status = client.cluster_status()
    assert {node["node"] for node in status["nodes"]} == addresses
    assert sorted(slot for node in status["nodes"] for slot in node["slots"]) == list(range(6))
    assert status["missing"] == []


def test_one_of_several_nodes_creates_a_topic(three_nodes: ThreeNodes) -> None:
    """The others find it, or are refused because they wanted another one."""

    def create(number: int) -> str:
        with three_nodes.nodes[number].client() as client:
            try:
                return client.create_topic("orders", partitions=number + 1)["outcome"]
            except Conflict as error:
                return error.code

    with ThreadPoolExecutor(3) as pool:
        outcomes = sorted(pool.map(create, range(3)))
    assert outcomes == ["created", "topic_exists", "topic_exists"]
    counts = set()
    for node in three_nodes.nodes:
        with node.client() as client:
            counts.add(len(client.topic_stats("orders")["partitions"]))
    assert len(counts) == 1


def test_what_is_published_through_a_node_is_read_through_another(three_nodes: ThreeNodes) -> None:
    """At once, in all partitions, each message once."""
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in three_nodes.nodes]
        clients[0].create_topic("orders", partitions=6)
        for number in range(36):
            at = clients[number % 3].publish("orders", b"%d" % number, partition=number % 6)
            found = clients[(number + 1) % 3].fetch("orders", at.offset, partition=number % 6)
            assert [message.value for message in found] == [b"%d" % number]


def test_a_request_is_replied_to_through_another_node(three_nodes: ThreeNodes) -> None:
    """The requester waits at one node, and the worker answers at another one."""
    asking, working = three_nodes.nodes[:2]
    with working.client() as worker, asking.client() as client:
        worker.create_subscription("workers", "jobs")
        worker.subscribe_to_subscription(
            "workers", lambda message: worker.reply(message, b"done " + message.value), "jobs"
        )
        assert client.request("jobs", b"1", timeout=15).value == b"done 1"


def test_a_drained_node_goes_on_to_answer(three_nodes: ThreeNodes) -> None:
    """Its slots are with others, nothing is refused meanwhile, and a wrong name is named."""
    drained = three_nodes.nodes[1]
    address = f"127.0.0.1:{drained.port}"
    with drained.client() as client, three_nodes.nodes[0].client() as other:
        client.create_topic("orders", partitions=6)
        for partition in range(6):
            client.publish("orders", b"before", partition=partition)
        with pytest.raises(InvalidArgument, match="there is no node 'nobody:1'"):
            other.drain_node("nobody:1")
        other.drain_node(address)
        for partition in range(6):
            assert client.publish("orders", b"after", partition=partition).offset == 1
        wait_until(lambda: client.cluster_status()["missing"] == [], 20.0)
        (mine,) = [each for each in client.cluster_status()["nodes"] if each["node"] == address]
        assert mine["drained"]
        assert mine["slots"] == []
        assert address not in client.topic_map("orders")["owners"]
    drained.restart()
    three_nodes.wait_until_ready()


def test_a_drain_is_a_pause_of_a_second_at_most(three_nodes: ThreeNodes) -> None:
    """Between two answers of a publisher to the partitions that move. A busy machine has two more attempts."""
    drained, other = three_nodes.nodes[1:]
    pauses: list[float] = []
    with other.client() as client, three_nodes.nodes[0].client() as operator:
        client.create_topic("orders", partitions=6)
        while len(pauses) < 3 and min(pauses, default=9.0) > 1.0:
            owners = client.topic_map("orders")["owners"]
            moving = owners.index(f"127.0.0.1:{drained.port}")
            client.publish("orders", b"before", partition=moving)
            draining = threading.Thread(
                target=operator.drain_node, args=(f"127.0.0.1:{drained.port}",)
            )
            draining.start()
            longest, last = 0.0, time.monotonic()
            while draining.is_alive() or client.topic_map("orders")["owners"][moving] in (
                None,
                f"127.0.0.1:{drained.port}",
            ):
                client.publish("orders", b"meanwhile", partition=moving)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            draining.join()
            pauses.append(longest)
            drained.restart()
            three_nodes.wait_until_ready()
    assert min(pauses) <= 1.0, pauses


def test_each_node_says_how_it_is(three_nodes: ThreeNodes) -> None:
    """Metrics of slots, forwarding and reading back; and the owner and the lag of each slot."""
    with three_nodes.nodes[0].client() as client:
        client.create_topic("orders", partitions=6)
        client.create_subscription("email", "orders")
        for partition in range(6):
            client.publish("orders", b"x", partition=partition)
        status = client.cluster_status()
    assert [each["slot"] for each in status["owners"]] == list(range(6))
    assert sum(each["lag"] for each in status["owners"]) == 6
    for node in status["nodes"]:
        mine = [each for each in status["owners"] if each["node"] == node["node"]]
        assert [each["slot"] for each in mine] == node["slots"]
        assert sum(each["lag"] for each in mine) == node["lag"] == len(node["slots"])
        assert sum(each["partitions"] for each in mine) == node["partitions"]
        assert (node["reachable"], node["kafka_away"]) == (True, False)
    found = [metrics_of(node) for node in three_nodes.nodes]
    assert sum(each["headrace_cluster_slots"] for each in found) == 6
    assert found[0]["headrace_cluster_forwarded_batches_total"] >= 4
    assert found[0]["headrace_cluster_forwarded_bytes_total"] > 0
    for each in found:
        taken = each["headrace_cluster_slots_taken_total"]
        assert taken == each["headrace_cluster_take_seconds_count"] > 0
        gone = (
            each["headrace_cluster_slots_handed_back_total"]
            + each["headrace_cluster_slots_lost_total"]
        )
        assert taken - gone == each["headrace_cluster_slots"]
        assert each["headrace_cluster_read_back_seconds_count"] > 0
        assert each["headrace_cluster_slots_waiting"] == each["headrace_cluster_kafka_away"] == 0


def metrics_of(node: RunningServer) -> dict[str, float]:
    """Those without labels."""
    host, port = node.http_address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "{" not in name}


def test_the_only_node_is_not_drained(kafka: str, tmp_path: Path) -> None:
    """Nobody could take its slots."""
    port = free_port()
    settings = {
        "engine": "kafka",
        "kafka_servers": kafka,
        "cluster": f"alone-{port}",
        "slots": 2,
        "kafka_session": 6,
        "port": port,
        "advertise": f"127.0.0.1:{port}",
    }
    with running_server(tmp_path, **settings) as node, node.client() as client:
        wait_until(lambda: client.cluster_status()["missing"] == [], 30.0)
        with pytest.raises(Conflict, match="no other node"):
            client.drain_node(f"127.0.0.1:{port}")
        assert client.publish("orders", b"x").offset == 0


class Publishing:
    """Publishes numbers to all partitions until it is told to stop; knows what was answered."""

    def __init__(self, client: BrokerClient, name: str):
        self.client, self.name = client, name
        self.answered: dict[tuple[int, int], bytes] = {}
        self.unsure: set[bytes] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            value = f"{self.name} {number}".encode()
            try:
                receipt = self.client.publish("orders", value, partition=number % 6)
                self.answered[receipt.partition, receipt.offset] = value
            except HeadraceError:
                self.unsure.add(value)
            number += 1
            time.sleep(0.002)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_others_serve_the_slots_of_a_node_that_is_gone(
    kafka: str, tmp_path: Path, fault: str
) -> None:
    """What was answered is there once, at its offset; a node that wakes up again harms nobody."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            port = free_port()
            settings = {
                "engine": "kafka",
                "kafka_servers": kafka,
                "cluster": f"{tmp_path.name[-20:]}-{port}" if not nodes else nodes[0][1],
                "slots": 6,
                "kafka_session": 6,
                "kafka_timeout": 30,
                "port": port,
                "advertise": f"127.0.0.1:{port}",
            }
            node = server_process(tmp_path / f"node{number}", **settings)
            nodes.append((stack.enter_context(node), settings["cluster"]))
        victim, first, second = [node for node, _ in nodes]
        clients = [stack.enter_context(node.client(request_timeout=60)) for node in (first, second)]
        clients[0].create_topic("orders", partitions=6)
        clients[0].create_subscription("email", "orders")

        def serving() -> int:
            status = clients[0].cluster_status()
            return len([each for each in status["nodes"] if each["slots"]]) * (
                not status["missing"]
            )

        wait_until(lambda: serving() == 3, 60.0)
        publishing = [Publishing(client, str(n)) for n, client in enumerate(clients)]
        wait_until(lambda: all(len(each.answered) > 50 for each in publishing), 60.0)
        victim.kill() if fault == "SIGKILL" else victim.suspend()
        before = [len(each.answered) for each in publishing]
        wait_until(lambda: serving() == 2, 60.0)
        wait_until(
            lambda: all(
                len(each.answered) > count + 50
                for each, count in zip(publishing, before, strict=True)
            ),
            60.0,
        )
        if fault == "SIGSTOP":
            victim.resume()
            wait_until(lambda: serving() == 3, 60.0)
        for each in publishing:
            each.stop()
        values: list[bytes] = []
        for partition in range(6):
            stored = []
            while batch := clients[1].fetch("orders", len(stored), partition=partition):
                stored += batch
            assert [message.offset for message in stored] == list(range(len(stored)))
            for publisher in publishing:
                for (number, offset), value in publisher.answered.items():
                    if number == partition:
                        assert stored[offset].value == value
            values += [message.value for message in stored]
        assert len(values) == len(set(values))
        sent = {value for each in publishing for value in each.answered.values()}
        assert set(values) - sent <= publishing[0].unsure | publishing[1].unsure
        got = set()
        with clients[0].subscription("email", "orders") as messages:
            while got < set(values):
                message = messages.get(30)
                message.ack()
                got.add(message.value)


def test_a_node_with_too_many_members_says_so(
    three_nodes: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that the owners do not take hears it, instead of getting a part of the messages."""
    monkeypatch.setattr(members, "SUBSCRIPTIONS_PER_CONNECTION_MAX", 2)
    node, other = three_nodes.nodes[:2]
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for _ in range(3)]
        clients[0].create_topic("crowded", partitions=6)
        clients[0].create_subscription("crowd", "crowded")
        inboxes = [stack.enter_context(client.subscription("crowd")) for client in clients]
        with pytest.raises(QueueFull) as caught:
            inboxes[2].get(timeout=20)
        assert caught.value.code == "too_many_members"
        elsewhere = stack.enter_context(other.client())
        inbox = stack.enter_context(elsewhere.subscription("crowd"))
        for each in inboxes[:2]:
            each.close()
        for number in range(6):
            elsewhere.publish("crowded", b"%d" % number, partition=number)
        assert sorted(inbox.get(timeout=20).value for _ in range(6)) == [
            b"%d" % number for number in range(6)
        ]

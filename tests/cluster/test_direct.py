"""Clients that go to the owners of partitions, and what happens when partitions move."""

import asyncio
import subprocess
import threading
from collections import defaultdict
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Self

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.client.reader import BatchReader
from headrace.errors import StorageFailed
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, wait_until
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")
PARTITIONS = 6


def forwarded(nodes: ThreeNodes, topic: str = "orders") -> int:
    """Batches of a topic that went from a node to another one."""
    return sum(
        queue.batches
        for node in nodes.running
        for log, queue in node.engine.cluster._queues.items()  # type: ignore[union-attr]
        if log.about[0] == topic
    )


def owners_of(client: BrokerClient, topic: str = "orders") -> list[str | None]:
    return client.topic_map(topic)["owners"]


def create(client: BrokerClient, topic: str = "orders") -> None:
    client.create_topic(topic, partitions=PARTITIONS)

    def are_served() -> bool:
        try:
            return None not in owners_of(client, topic)
        except (
            StorageFailed
        ):  # on a busy machine Kafka may answer too late after a test that moved slots
            return False

    wait_until(are_served, 40.0)


def address(node: RunningServer) -> str:
    return f"127.0.0.1:{node.port}"


def stored(client: BrokerClient, topic: str = "orders") -> list[list[bytes]]:
    """The values of each partition, in order."""
    found: list[list[bytes]] = []
    for partition in range(PARTITIONS):
        values: list[bytes] = []
        while page := client.fetch(topic, len(values), partition=partition):
            values += [message.value for message in page]
        found.append(values)
    return found


def test_publishes_do_not_pass_through_another_node(three_nodes: ThreeNodes) -> None:
    """Of any kind, from the first one on; and nothing is lost or doubled on the way."""
    with three_nodes.nodes[0].client() as client:
        create(client)
        sent = [b"%d" % number for number in range(400)]
        for number in range(100):
            client.publish_nowait("orders", sent[number], key=str(number))
        client.flush()
        client.publish_many("orders", sent[100:200], keys=[str(n) for n in range(100, 200)])
        for number in range(200, 300):  # the later ones from the caller's own thread
            client.publish("orders", sent[number], key=str(number))
        for number in range(300, 350):
            client.publish("orders", sent[number], partition=number % PARTITIONS)
        waiting = [
            client.publish_batch_nowait(
                "orders", encode(Columns([sent[number]])), partition=number % PARTITIONS
            )
            for number in range(350, 400)
        ]
        for each in waiting:
            each.result()
        assert forwarded(three_nodes) == 0
        assert sorted(chain(*stored(client))) == sorted(sent)
        links = client._core.owners._links
        assert set(links) == {address(node) for node in three_nodes.nodes[1:]}


def test_an_answer_names_the_owner(three_nodes: ThreeNodes) -> None:
    """Publishes to a partition that the caller names, and fetches, ask for no map: only the first one goes another way."""
    with three_nodes.nodes[0].client() as client:
        create(client)
        place = owners_of(client).index(address(three_nodes.nodes[1]))
        owners = client._core.owners
        assert owners.is_main("orders", place)
        client.publish("orders", b"1", partition=place)
        wait_until(lambda: owners._links, 10.0)
        before = forwarded(three_nodes)
        for _ in range(30):
            client.publish("orders", b"2", partition=place)
        assert forwarded(three_nodes) == before == 1
    with three_nodes.nodes[0].client() as client:
        owners = client._core.owners
        assert len(client.fetch("orders", partition=place)) == 31
        assert not owners.is_main("orders", place)


def test_whole_batches_are_read_from_the_owner(three_nodes: ThreeNodes) -> None:
    """As a Spark task does; where the owner cannot be reached, any node has them."""
    with three_nodes.nodes[0].client() as client:
        create(client)
        owners = owners_of(client)
        for partition in range(PARTITIONS):
            client.publish("orders", b"%d" % partition, partition=partition)
        with BatchReader([three_nodes.nodes[0].address], timeout=10) as reader:
            for partition, owner in enumerate(owners):
                batches = [
                    each for found in reader.read("orders", partition, 0, 1) for each in found
                ]
                assert [each.values() for each in batches] == [[b"%d" % partition]]
                assert reader._socket is not None
                host, port = reader._socket.getpeername()
                assert f"{host}:{port}" == owner
        with BatchReader([three_nodes.nodes[0].address], timeout=10) as reader:
            go_to = reader._go_to
            reader._go_to = lambda owner, deadline: go_to("127.0.0.1:1", deadline)  # type: ignore[method-assign]
            for partition in range(PARTITIONS):
                (found,) = reader.read("orders", partition, 0, 1)
                assert [each.values() for each in found] == [[b"%d" % partition]]


class Ordered:
    """Publishes numbers with keys to all partitions, in a thread, until it is told to stop."""

    def __init__(self, node: RunningServer):
        self._node = node
        self._stop = threading.Event()
        self.count = self.stored = 0
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        try:
            async with AsyncClient(*self._node.address) as client:
                while not self._stop.is_set():
                    for _ in range(50):
                        number = self.count
                        self.count += 1
                        key = str(number % 60)
                        client.publish_nowait("orders", b"%d" % number, key=key)
                    await asyncio.sleep(0.002)
                    if not self.count % 200:
                        await client.flush()
                        self.stored = self.count
                await client.flush()
        except BaseException as error:
            self.errors.append(error)

    def go_on(self, count: int) -> None:
        """Until so many more are stored."""
        until = self.stored + count
        wait_until(lambda: self.stored > until or self.errors, 40.0, f"{count} more are stored")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


def check(client: BrokerClient, publishing: Ordered) -> None:
    """Everything is stored once, and the messages of each key in order."""
    assert publishing.errors == []
    values = stored(client)
    numbers = [list(map(int, each)) for each in values]
    assert sorted(chain(*numbers)) == list(range(publishing.count))
    for each in numbers:
        by_key: dict[int, list[int]] = defaultdict(list)
        for number in each:
            by_key[number % 60].append(number)
        assert all(found == sorted(found) for found in by_key.values())


def test_a_drain_under_load_loses_and_doubles_nothing(three_nodes: ThreeNodes) -> None:
    """The client follows the partitions to their next owners, and its order stays."""
    first, drained = three_nodes.nodes[:2]
    with first.client() as client:
        create(client)
        try:
            with Ordered(first) as publishing:
                publishing.go_on(500)
                client.drain_node(address(drained))
                wait_until(
                    lambda: not {None, address(drained)} & set(owners_of(client)), 20.0, "all moved"
                )
                publishing.go_on(1_000)
                before = forwarded(three_nodes)
                publishing.go_on(1_000)
                assert forwarded(three_nodes) == before
            check(client, publishing)
        finally:
            drained.restart()
            three_nodes.wait_until_ready()


def test_a_node_that_stops_under_load_is_no_error(three_nodes: ThreeNodes) -> None:
    """Nothing is lost, doubled or out of order."""
    first, stopped = three_nodes.nodes[1:]
    with first.client() as client:
        create(client)
        try:
            with Ordered(first) as publishing:
                publishing.go_on(500)
                stopped.stop()
                publishing.go_on(1_000)
            check(client, publishing)
        finally:
            stopped.start()
            three_nodes.wait_until_ready()


def test_owners_are_reached_with_the_login_and_tls_of_the_first_connection(
    kafka: str, tmp_path: Path
) -> None:
    """A token, and a certificate that the client was told to trust."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    settings = {"tls_cert": str(cert), "tls_key": str(key), "token": "root-token-of-16"}
    with ExitStack() as stack:
        nodes = ThreeNodes(kafka, tmp_path, 2, **settings)
        stack.callback(nodes.close)
        client = stack.enter_context(nodes.nodes[0].client(tls=True, ca=str(cert)))
        create(client)
        for number in range(60):
            client.publish("orders", b"%d" % number, key=str(number))
        assert forwarded(nodes) == 0
        assert set(client._core.owners._links) == {address(nodes.nodes[1])}
        with BatchReader(
            [nodes.nodes[0].address],
            token="root-token-of-16",
            tls=client._core.link.broker[2],
            timeout=10,
        ) as reader:
            partition = owners_of(client).index(address(nodes.nodes[1]))
            end = len(stored(client)[partition])
            found = [each for some in reader.read("orders", partition, 0, end) for each in some]
            assert found[-1].end_offset == end
            assert reader._socket is not None
            assert reader._socket.getpeername()[1] == nodes.nodes[1].port

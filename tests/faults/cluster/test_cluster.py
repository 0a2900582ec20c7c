"""A few faults of three nodes in this process, over the Kafka that all tests share. ``make faults-cluster`` does more than a hundred."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import RunningServer
from tests.crash.checker import Checker
from tests.faults.cluster.load import ClusterLoad
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")


def drop_connections(node: RunningServer) -> None:
    """Clients and other nodes lose their connections to it, in the middle of whatever they do."""

    def drop() -> None:
        for connection in list(node.server.hub.connections):
            connection.abort()

    node.call(drop)


def drain_and_restart(node: RunningServer) -> None:
    with node.client() as client:
        client.drain_node(f"127.0.0.1:{node.port}")
    node.restart()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_faults(three_nodes: ThreeNodes, tmp_path: Path) -> None:
    """Nothing is lost, doubled, reordered, invented or skipped when connections break and nodes go and come."""
    seed = secrets.randbits(31)
    servers = [f"127.0.0.1:{node.port}" for node in three_nodes.nodes]
    load = ClusterLoad(servers, tmp_path, seed, pace=4.0)
    faults: list[tuple[str, Callable[[RunningServer], Any]]] = [
        ("connections dropped", drop_connections),
        ("node restarted", RunningServer.restart),
        ("node drained", drain_and_restart),
    ]
    try:
        load.define()
        load.start()
        assert load.wait_until_served(30.0) is not None
        for number, (what, fault) in enumerate(faults):
            at, at_ms = time.monotonic_ns(), time.time_ns() // 1_000_000
            fault(three_nodes.nodes[number])
            load.oracle.tell(
                "fault",
                what=what,
                at=at,
                at_ms=at_ms,
                until=time.monotonic_ns(),
                until_ms=time.time_ns() // 1_000_000,
                holds=False,
            )
            assert load.wait_until_served(30.0) is not None, f"seed {seed}"
        load.drain(60.0)
        load.read_all()
    finally:
        load.close()
    checker: Checker = load.verdict()
    assert checker.anomalies == [], f"seed {seed}: {[str(each) for each in checker.anomalies[:5]]}"
    assert checker.counts["messages acknowledged"] > 100
    assert checker.counts["deliveries"] > 100

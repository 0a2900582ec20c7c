"""``headrace cluster`` against three real nodes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import BrokerClient
from tests.cli.rig import Command
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture
def addresses(three_nodes: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the nodes. The commands ask the first one."""
    found = [f"127.0.0.1:{node.port}" for node in three_nodes.nodes]
    monkeypatch.setenv("HEADRACE_SERVER", found[0])
    with three_nodes.nodes[0].client() as client:
        client.create_topic("orders", partitions=6)
        client.create_subscription("email", "orders")
        for partition in range(6):
            client.publish("orders", b"x", partition=partition)
    return found


def test_status_lists_the_nodes(command: Command, addresses: list[str]) -> None:
    """Without a command, too: one line for each, with its slots, its partitions and its lag."""
    for arguments in ((), ("status",)):
        ran = command("cluster", *arguments)
        assert ran.code == 0, ran.err
        titles, *rows = ran.rows
        assert titles == ["node", "slots", "partitions", "connections", "lag", "moves", "state"]
        assert sorted(row[0] for row in rows) == sorted(addresses)
        assert {row[-1] for row in rows} == {"serving"}
        assert sum(int(row[-3]) for row in rows) == 6
    document = command("cluster", "status", "--json").json
    assert document["missing"] == []
    assert sum(node["lag"] for node in document["nodes"]) == 6


def test_status_lists_the_slots(command: Command, addresses: list[str]) -> None:
    """The owner, the partitions and the lag of each, as a table and as JSON."""
    ran = command("cluster", "status", "--slots")
    assert ran.code == 0, ran.err
    titles, *rows = ran.rows
    assert titles == ["slot", "node", "partitions", "lag"]
    assert [row[0] for row in rows] == [str(slot) for slot in range(6)]
    assert {row[1] for row in rows} == set(addresses)
    assert [row[3] for row in rows] == ["1"] * 6
    document = command("cluster", "status", "--slots", "--json").json
    assert [[str(each[title]) for title in titles] for each in document] == rows


def test_a_node_is_drained_by_a_command(
    command: Command, addresses: list[str], three_nodes: ThreeNodes
) -> None:
    """It has no slots when the command returns; a wrong name is named."""
    ran = command("cluster", "drain", "nobody:1")
    assert ran.code == 2
    assert "there is no node 'nobody:1'" in ran.err
    ran = command("cluster", "drain", addresses[2])
    assert ran.code == 0, ran.err
    assert ran.lines == [f"{addresses[2]} is drained: stop it, and start it again when you like."]
    drained = next(row for row in command("cluster").rows if row[0] == addresses[2])
    assert (drained[1], drained[-1]) == ("-", "drained")
    three_nodes.nodes[2].restart()
    three_nodes.wait_until_ready()


@pytest.mark.parametrize(
    ("node", "missing", "state", "complaint"),
    [
        ({"reachable": False}, [], "unreachable", ""),
        ({"kafka_away": True}, [], "away", ""),
        ({}, [0, 1, 4], "serving", "No node serves slots 0-1, 4 now."),
    ],
    ids=["a node is gone", "Kafka is away", "slots are missing"],
)
def test_trouble_is_an_exit_code(
    command: Command,
    addresses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    node: dict[str, Any],
    missing: list[int],
    state: str,
    complaint: str,
) -> None:
    """1, so that a script can wait until everything is served; JSON says it in the document."""
    ask = BrokerClient.cluster_status

    def troubled(client: BrokerClient) -> Any:
        found = ask(client)
        first, *others = found["nodes"]
        return {**found, "nodes": [{**first, **node}, *others], "missing": missing}

    monkeypatch.setattr(BrokerClient, "cluster_status", troubled)
    ran = command("cluster", "status")
    assert (ran.code, ran.rows[1][-1]) == (1, state)
    assert complaint in ran.err
    assert command("cluster", "status", "--slots").code == 1
    ran = command("cluster", "status", "--json")
    assert (ran.code, ran.err, ran.json["missing"]) == (1, "", missing)

"""``headrace cluster``: the nodes that divide the partitions of a cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace import BrokerClient
from headrace.cli.connecting import BROKER_OPTIONS, with_client
from headrace.cli.printing import AsJson, complain, print_listing, say

cluster = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
SLOT_COLUMNS = ("slot", "node", "partitions", "lag")
COLUMNS = ("node", "slots", "partitions", "connections", "lag", "moves", "state")


@cluster.callback()
def default(context: typer.Context) -> None:
    """The nodes of a cluster; without a command: ``status``."""
    if context.invoked_subcommand is None:
        status(slots=False, as_json=False, **dict.fromkeys(BROKER_OPTIONS))


@cluster.command()
@with_client
def status(
    client: BrokerClient,
    slots: Annotated[
        bool, typer.Option("--slots", help="List the slots, with the owner of each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the nodes, with the slots and the lag of each.

    Exit code 1: a slot has no owner, or a node cannot be reached or cannot reach Kafka.

    \b
    Examples:
      headrace cluster
      headrace cluster status --slots
      headrace cluster status --json
    """
    found = client.cluster_status()
    if slots:
        rows: list[dict[str, Any]] = [
            {**each, "node": each["node"] or "-"} for each in found["owners"]
        ]
        print_listing(as_json, found["owners"], rows, SLOT_COLUMNS, "No slots.")
    else:
        rows = [
            {**node, "slots": ranges(node["slots"]) or "-", "state": state_of(node)}
            for node in found["nodes"]
        ]
        print_listing(as_json, found, rows, COLUMNS, "No nodes.")
    trouble = [each for each in found["nodes"] if not each["reachable"] or each["kafka_away"]]
    if found["missing"] and not as_json:
        complain(f"No node serves slots {ranges(found['missing'])} now.")
    if found["missing"] or trouble:
        raise typer.Exit(1)


def state_of(node: Any) -> str:
    if not node["reachable"]:
        return "unreachable"
    if node["kafka_away"]:
        return "Kafka away"
    return "drained" if node["drained"] else "serving" if node["slots"] else "idle"


@cluster.command()
@with_client
def drain(
    client: BrokerClient,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its address, as status shows it.")],
) -> None:
    """Hand the slots of a node to the others, before you stop it.

    The node forwards requests until you stop it.

    \b
    Examples:
      headrace cluster drain node1:9999
    """
    client.drain_node(node)
    say(f"{node} is drained: stop it, and start it again when you like.")


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as 0-2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in found)

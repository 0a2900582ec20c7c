"""``headrace topics``, ``describe``, ``create-topic``, ``alter-topic``, ``delete-topic``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headrace.cli.connecting import Topic, named_values, with_client
from headrace.cli.printing import (
    AsJson,
    count_of,
    print_each,
    print_json,
    print_rows,
    say,
    size,
    when,
)
from headrace.cli.values import Yes, confirm
from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument
from headrace.operations.results import TopicStats

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting; may be repeated."),
]


def settings_of(pairs: list[str] | None) -> dict[str, Any]:
    """The values of ``--set``: JSON, ``none``, or text."""
    settings: dict[str, Any] = {}
    for name, value in named_values("--set", pairs).items():
        try:
            settings[name] = None if value == "none" else json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


@with_client
def create_topic(
    client: BrokerClient,
    topic: Topic,
    partitions: Annotated[int | None, typer.Option(help="How many partitions.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep it in memory.")] = False,
    sets: Sets = None,
) -> None:
    """Create a topic.

    If it already exists with the same settings, nothing changes.

    \b
    Examples:
      headrace create-topic events --partitions 1
      headrace create-topic logs --set durability=interval --set retention_hours=72
    """
    settings = settings_of(sets)
    if memory:
        settings["durable"] = False
    stats = client.create_topic(topic, partitions, **settings)
    count = count_of(len(stats["partitions"]), "partition")
    if stats["outcome"] == "created":
        say(f"Created topic {topic} ({count}).")
    else:
        say(f"Topic {topic} already exists, unchanged ({count}).")


@with_client
def alter_topic(client: BrokerClient, topic: Topic, sets: Sets = None) -> None:
    """Change a topic's settings.

    Partitions can be added, not removed.

    \b
    Example:
      headrace alter-topic events --set partitions=4 --set retention_hours=none
    """
    changes = settings_of(sets)
    if not changes:
        raise InvalidArgument("nothing to change: give --set NAME=VALUE")
    if client.change_topic(topic, **changes)["outcome"] == "updated":
        say(f"Updated topic {topic}: {', '.join(changes)}.")
    else:
        say(f"Topic {topic} already has these settings, unchanged.")


@with_client
def delete_topic(client: BrokerClient, topic: Topic, yes: Yes = False) -> None:
    """Delete a topic, its messages and its subscriptions."""
    messages = count_of(client.topic_stats(topic)["messages"], "message")
    confirm(f"Delete topic {topic} and its {messages}?", yes)
    client.delete_topic(topic)
    say(f"Deleted topic {topic}.")


@with_client
def topics(client: BrokerClient, as_json: AsJson = False) -> None:
    """List the topics."""
    empty = "No topics yet. The first publish creates one."
    print_each(as_json, client.list_topics(), _row, empty)


def _row(topic: TopicStats) -> dict[str, Any]:
    return {
        "topic": topic["topic"],
        "partitions": len(topic["partitions"]),
        "messages": topic["messages"],
        "size": size(topic["bytes"]),
        "durability": topic["durability"],
        "subscriptions": ", ".join(topic["subscriptions"]) or None,
    }


@with_client
def describe(client: BrokerClient, topic: Topic, as_json: AsJson = False) -> None:
    """Show one topic: partitions, subscriptions, settings."""
    stats = client.topic_stats(topic)
    groups = client.subscriptions(topic)
    if as_json:
        print_json({**stats, "subscriptions": groups})
        return
    say(
        f"{topic}: {count_of(stats['messages'], 'message')}, {size(stats['bytes'])}, "
        f"durability {stats['durability']}"
    )
    say(f"created {when(stats['created'])} UTC")
    say("")
    titles = {
        "partition": "partition",
        "start_offset": "first",
        "end_offset": "next",
        "bytes": "size",
        "read_only": "read-only",
    }
    print_rows([{**part, "bytes": size(part["bytes"])} for part in stats["partitions"]], titles, "")
    say("")
    titles = {"name": "subscription", "lag": "lag", "in_flight": "in flight", "members": "members"}
    print_rows(groups, titles, "No subscriptions.")
    say("")
    settings = [{"setting": k, "value": v} for k, v in stats["settings"].items()]
    print_rows(settings, ("setting", "value"), "")

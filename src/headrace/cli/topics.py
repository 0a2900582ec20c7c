"""``headrace topics``, ``describe``, ``create-topic``, ``alter-topic``, ``delete-topic``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Server,
    Token,
    Topic,
    connected,
    count_of,
    print_json,
    print_rows,
    say,
    size,
    when,
)
from headrace.errors import InvalidArgument

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A topic setting; may be repeated."),
]


def settings_of(pairs: list[str] | None) -> dict[str, Any]:
    """``name=value`` pairs with values as in JSON, or text."""
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidArgument(f"--set takes NAME=VALUE, not {pair!r}")
        try:
            settings[name] = None if value == "none" else json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def create_topic(
    topic: Topic,
    partitions: Annotated[int | None, typer.Option(help="How many partitions.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep it in memory.")] = False,
    sets: Sets = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Create a topic. One that exists with these settings is fine.

    Examples:

      headrace create-topic events --partitions 1

      headrace create-topic logs --set durability=interval --set retention_hours=72
    """
    settings = settings_of(sets)
    if memory:
        settings["durable"] = False
    with connected(server, token, ca) as client:
        client.create_topic(topic, partitions, **settings)
        count = len(client.topic_stats(topic)["partitions"])
    say(f"topic {topic} is there, with {count_of(count, 'partition')}")


def alter_topic(
    topic: Topic,
    sets: Sets = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Change settings of a topic; partitions can be added.

    Example:

      headrace alter-topic events --set partitions=4 --set retention_hours=none
    """
    changes = settings_of(sets)
    if not changes:
        raise InvalidArgument("nothing to change: give --set NAME=VALUE")
    with connected(server, token, ca) as client:
        client.change_topic(topic, **changes)
    say(f"topic {topic} changed: {', '.join(changes)}")


def delete_topic(
    topic: Topic,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Delete a topic with all its messages and its subscriptions."""
    with connected(server, token, ca) as client:
        stats = client.topic_stats(topic)
        if not yes:
            messages = count_of(stats["messages"], "message")
            typer.confirm(f"Delete {topic} with {messages}?", abort=True)
        client.delete_topic(topic)
    say(f"topic {topic} is deleted")


def topics(
    as_json: AsJson = False, server: Server = None, token: Token = None, ca: Ca = None
) -> None:
    """List the topics."""
    with connected(server, token, ca) as client:
        stats = client.list_topics()
    if as_json:
        print_json(stats)
        return
    rows = [
        {
            "topic": item["topic"],
            "partitions": len(item["partitions"]),
            "messages": item["messages"],
            "size": size(item["bytes"]),
            "durability": item["durability"],
            "groups": ", ".join(item["subscriptions"]) or None,
        }
        for item in stats
    ]
    titles = {name: name for name in ("topic", "partitions", "messages", "size", "durability")}
    titles["groups"] = "subscriptions"
    print_rows(rows, titles, "There are no topics yet: publish something.")


def describe(
    topic: Topic, as_json: AsJson = False, server: Server = None, token: Token = None, ca: Ca = None
) -> None:
    """Show one topic: partitions, settings, subscriptions with their lag."""
    with connected(server, token, ca) as client:
        stats = client.topic_stats(topic)
        groups = client.subscriptions(topic)
    if as_json:
        print_json({**stats, "subscriptions": groups})
        return
    say(
        f"{topic}: {count_of(stats['messages'], 'message')}, {size(stats['bytes'])}, "
        f"durability {stats['durability']}, created {when(stats['created'])} UTC"
    )
    say("")
    titles = {
        "partition": "partition",
        "start_offset": "first",
        "end_offset": "next",
        "bytes": "bytes",
        "read_only": "read-only",
    }
    print_rows(stats["partitions"], titles, "")
    say("")
    print_rows(
        groups,
        {"name": "subscription", "lag": "lag", "in_flight": "in flight", "members": "members"},
        "No subscriptions.",
    )
    say("")
    settings = [{"setting": k, "value": v} for k, v in stats["settings"].items()]
    print_rows(settings, {"setting": "setting", "value": "value"}, "")

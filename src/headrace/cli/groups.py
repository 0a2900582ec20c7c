"""``headrace groups``, ``create-subscription``, ``delete-subscription``, ``seek``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Group,
    Server,
    Token,
    Topic,
    connected,
    count_of,
    print_json,
    print_rows,
    say,
)
from headrace.cli.topics import settings_of

OfTopic = Annotated[
    str | None, typer.Option("--topic", help="Its topic, if the name is not unique.")
]


def create_subscription(
    subscription: Group,
    topic: Topic,
    offset: Annotated[
        str, typer.Option(help="Where it begins: a number, earliest, latest, or a time.")
    ] = "earliest",
    ack_timeout: Annotated[float | None, typer.Option(help="Seconds for one message.")] = None,
    max_deliveries: Annotated[
        int | None, typer.Option(help="Then it is a dead letter; 0: never.")
    ] = None,
    ordering: Annotated[str | None, typer.Option(help="'key': one key, one at a time.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting; may be repeated."),
    ] = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Create a subscription, or change the settings given.

    Examples:

      headrace create-subscription my-group events --offset 0

      headrace create-subscription audit 'orders.>' --ack-timeout 60
    """
    settings: dict[str, Any] = settings_of(sets)
    given = {"ack_timeout": ack_timeout, "max_deliveries": max_deliveries, "ordering": ordering}
    settings |= {name: value for name, value in given.items() if value is not None}
    with connected(server, token, ca) as client:
        client.create_subscription(subscription, topic, offset, **settings)
        lag = client.subscription_stats(subscription, topic)["lag"]
    say(f"subscription {subscription} over {topic} is there, {count_of(lag, 'message')} behind")


def delete_subscription(
    subscription: Group,
    topic: OfTopic = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Delete a subscription, with its position."""
    with connected(server, token, ca) as client:
        client.delete_subscription(subscription, topic)
    say(f"subscription {subscription} is deleted")


def groups(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only those over this topic.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List the subscriptions with their lag."""
    with connected(server, token, ca) as client:
        stats = client.subscriptions(topic)
    if as_json:
        print_json(stats)
        return
    columns = {
        "name": "subscription",
        "topic": "topic",
        "lag": "lag",
        "in_flight": "in flight",
        "waiting_for_retry": "to retry",
        "members": "members",
        "acked": "acked",
        "dead_lettered": "dead",
    }
    empty = "There are no subscriptions yet." if topic is None else f"Nobody subscribes to {topic}."
    print_rows(stats, columns, empty)
    for item in stats:
        for part in item["partitions"]:
            if part["blocked"]:
                say(
                    f"{item['name']} stands still at {part['topic']}/{part['partition']} "
                    f"offset {part['position']}: {part['blocked']}"
                )


def seek(
    subscription: Group,
    to: Annotated[str, typer.Argument(metavar="TO", help="A number, earliest, latest, or a time.")],
    topic: OfTopic = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.")] = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Move a subscription: replay from an offset or a time on, or skip.

    Examples:

      headrace seek my-group earliest

      headrace seek my-group 2026-01-31T12:00:00Z
    """
    with connected(server, token, ca) as client:
        client.seek(subscription, to, topic=topic, partition=partition)
        lag = client.subscription_stats(subscription, topic)["lag"]
    say(f"subscription {subscription} moved, {count_of(lag, 'message')} ahead of it")

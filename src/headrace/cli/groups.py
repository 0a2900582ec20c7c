"""``headrace groups``, ``create-subscription``, ``delete-subscription``, ``seek``."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.connecting import Group, TopicOrWildcard, with_client
from headrace.cli.printing import AsJson, complain, print_listing, say
from headrace.cli.topics import Sets, settings_of
from headrace.client.threads import BrokerClient
from headrace.operations.results import SubscriptionStats

OfTopic = Annotated[
    str | None, typer.Option("--topic", help="Its topic, if several have this name.")
]


def tell_created(made: SubscriptionStats) -> None:
    """A misspelt topic must not look like one without messages."""
    if made.get("topic_created"):
        complain(f"Topic {made['topic']} did not exist: it was created now, and is empty.")


@with_client
def create_subscription(
    client: BrokerClient,
    subscription: Group,
    topic: TopicOrWildcard,
    offset: Annotated[
        str, typer.Option(help="Where a new one begins: a number, earliest, latest, or a time.")
    ] = "earliest",
    ack_timeout: Annotated[
        float | None, typer.Option(help="Seconds in which a message must be acknowledged.")
    ] = None,
    max_deliveries: Annotated[
        int | None,
        typer.Option(help="Failed deliveries before a message is a dead letter; 0: no limit."),
    ] = None,
    ordering: Annotated[
        str | None, typer.Option(help="'key': messages of one key in order, one at a time.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Create a subscription.

    If it already exists, the settings that are given change, and its position stays.

    \b
    Examples:
      headrace create-subscription my-group events --offset 0
      headrace create-subscription audit 'orders.>' --ack-timeout 60
    """
    settings = settings_of(sets)
    given = {"ack_timeout": ack_timeout, "max_deliveries": max_deliveries, "ordering": ordering}
    settings |= {name: value for name, value in given.items() if value is not None}
    exists = (subscription, topic) in [
        (each["name"], each["topic"]) for each in client.subscriptions()
    ]
    made = client.create_subscription(subscription, topic, offset, **settings)
    lag = made["lag"]
    done = "Changed" if exists else "Created"
    say(f"{done} subscription {subscription} on {topic} ({lag:,} unread).")
    tell_created(made)


@with_client
def delete_subscription(client: BrokerClient, subscription: Group, topic: OfTopic = None) -> None:
    """Delete a subscription and its position."""
    client.delete_subscription(subscription, topic)
    say(f"Deleted subscription {subscription}.")


@with_client
def groups(
    client: BrokerClient,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only subscriptions on this topic.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the subscriptions with their lag."""
    found = client.subscriptions(topic)
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
    empty = "No subscriptions yet." if topic is None else f"No subscriptions on {topic}."
    print_listing(as_json, found, found, columns, empty)
    for each in [] if as_json else found:
        for part in each["partitions"]:
            if part["blocked"]:
                say(
                    f"{each['name']} is stopped at {part['topic']}/{part['partition']} "
                    f"offset {part['position']}: {part['blocked']}"
                )


@with_client
def seek(
    client: BrokerClient,
    subscription: Group,
    to: Annotated[str, typer.Argument(metavar="TO", help="A number, earliest, latest, or a time.")],
    topic: OfTopic = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.")] = None,
) -> None:
    """Move a subscription: replay messages, or skip them.

    \b
    Examples:
      headrace seek my-group earliest
      headrace seek my-group 2026-01-31T12:00:00Z
    """
    lag = client.seek(subscription, to, topic=topic, partition=partition)["lag"]
    say(f"Moved subscription {subscription} ({lag:,} unread).")

"""``headrace groups``, ``create-subscription``, ``delete-subscription``, ``seek``, ``pause``, ``resume``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.text import Text

from headrace.cli.connecting import Group, TopicOrWildcard, with_client
from headrace.cli.live import Interval, Screen
from headrace.cli.printing import (
    AsJson,
    complain,
    console,
    is_narrow,
    print_json,
    print_listing,
    say,
    table_of,
    when,
)
from headrace.cli.topics import Sets, settings_of
from headrace.cli.values import Yes, confirm, duration_option, topic_filter
from headrace.client.threads import BrokerClient
from headrace.model import is_pattern
from headrace.operations.results import SubscriptionStats

COLUMNS = {
    "name": "subscription",
    "topic": "topic",
    "lag": "lag",
    "in_flight": "in flight",
    "waiting_for_retry": "to retry",
    "members": "members",
    "acked": "acked",
    "dead_lettered": "dead",
    "state": "state",
}
SHORT = {"in_flight": "flight", "waiting_for_retry": "retry"}
"""Titles on a narrow terminal, which leave more room for the names."""
OfTopic = Annotated[
    str | None, typer.Option("--topic", help="Its topic, if several have this name.")
]


def tell_created(topic: str, is_new: bool | None) -> None:
    """A misspelt topic must not look like one without messages."""
    if is_new:
        complain(f"Topic {topic} did not exist: it was created now, and is empty.")


def tell_paused(stats: SubscriptionStats) -> None:
    """A paused subscription must not look like one without messages."""
    if stats["paused"]:
        name = stats["name"]
        complain(
            f"Subscription {name} is paused: it delivers nothing until 'headrace resume {name}'."
        )


@with_client
def create_subscription(
    client: BrokerClient,
    subscription: Group,
    topic: TopicOrWildcard,
    offset: Annotated[
        str | None,
        typer.Option(
            help="Where a new subscription begins: a number, earliest (the default), latest, or a time."
        ),
    ] = None,
    ack_timeout: Annotated[
        float | None,
        duration_option(help="Time in which a message must be acknowledged: seconds, or 5m."),
    ] = None,
    max_deliveries: Annotated[
        int | None,
        typer.Option(help="Failed deliveries before a message becomes a dead letter; 0: no limit."),
    ] = None,
    ordering: Annotated[
        str | None, typer.Option(help="'key': messages of one key in order, one at a time.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Create a subscription.

    If it already exists, the given settings change. Its position does not change.

    \b
    Examples:
      headrace create-subscription my-group events --offset 0
      headrace create-subscription audit 'orders.>' --ack-timeout 60
    """
    settings = settings_of(sets)
    given = {"ack_timeout": ack_timeout, "max_deliveries": max_deliveries, "ordering": ordering}
    settings |= {name: value for name, value in given.items() if value is not None}
    made = client.create_subscription(subscription, topic, offset or "earliest", **settings)
    unread = f"({made['lag']:,} unread)"
    if made["outcome"] == "unchanged":
        say(f"Subscription {subscription} on {topic} already exists, unchanged {unread}.")
    else:
        say(f"{made['outcome'].capitalize()} subscription {subscription} on {topic} {unread}.")
    if offset is not None and made["outcome"] != "created":
        complain(
            f"headrace: {subscription} keeps its position: --offset is where a new subscription "
            f"begins. To move it: headrace seek {subscription} {offset} --topic {topic}"
        )
    tell_created(topic, made.get("topic_created"))


@with_client
def delete_subscription(
    client: BrokerClient, subscription: Group, topic: OfTopic = None, yes: Yes = False
) -> None:
    """Delete a subscription and its position."""
    unread = client.subscription_stats(subscription, topic)["lag"]
    confirm(f"Delete subscription {subscription} and its position ({unread:,} unread)?", yes)
    client.delete_subscription(subscription, topic)
    say(f"Deleted subscription {subscription}.")


@with_client
def groups(
    client: BrokerClient,
    topic: Annotated[str | None, topic_filter("subscriptions on")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the list until you press q.")
    ] = False,
    interval: Interval = 2.0,
    as_json: AsJson = False,
) -> None:
    """List the subscriptions with their lag.

    With --watch, the list is refreshed every --interval, on a terminal.

    \b
    Examples:
      headrace groups
      headrace groups orders --watch
    """
    empty = "No subscriptions yet." if topic is None else f"No subscriptions on {topic}."
    if watch and console.is_terminal and not as_json:
        Screen(
            lambda: client.subscriptions(topic),
            lambda found, _, every: RichGroup(*_drawn(found, empty, every)),
            interval,
        ).run()
        return
    found = client.subscriptions(topic)
    if not found and topic is not None and not is_pattern(topic):
        client.topic_stats(topic)  # an error if it does not exist
    print_listing(as_json, found, map(_row, found), _columns(), empty)
    for line in [] if as_json else _stops(found):
        say(line)


def _columns() -> dict[str, str]:
    return COLUMNS | SHORT if is_narrow() else COLUMNS


def _row(stats: SubscriptionStats) -> dict[str, Any]:
    blocked = any(part["blocked"] for part in stats["partitions"])
    state = state_of(stats["paused"], blocked, stats["lag"], stats["members"])
    verdict = stats.get("verdict", "ok")
    return {**stats, "state": state or ("" if verdict == "ok" else verdict)}


def state_of(paused: bool, blocked: bool, lag: int, members: int) -> str:
    """Why nothing is delivered; empty if something is, or if there is nothing."""
    if blocked:
        return "blocked"
    if paused:
        return "paused"
    return "no members" if lag and not members else ""


def _drawn(found: list[SubscriptionStats], empty: str, every: float) -> Iterator[RenderableType]:
    """What needs attention first, as much as fits."""
    room = max(console.height - 4, 1)
    ordered = sorted(found, key=lambda each: (-each["lag"], each["name"]))
    yield Text(f"headrace groups  every {every:g}s", style="reverse")
    yield table_of([_row(each) for each in ordered[:room]], _columns()) if found else Text(empty)
    if len(found) > room:
        yield Text(f"and {len(found) - room:,} more", style="dim")
    yield from map(Text, list(_stops(found))[:room])


def _stops(found: list[SubscriptionStats]) -> Iterator[str]:
    """A line for each partition that cannot be read on."""
    for each in found:
        for part in each["partitions"]:
            if part["blocked"]:
                yield (
                    f"{each['name']} is stopped at {part['topic']}/{part['partition']} "
                    f"offset {part['position']}: {part['blocked']}"
                )


@with_client
def pause(client: BrokerClient, subscription: Group, topic: OfTopic = None) -> None:
    """Pause a subscription: nothing is delivered until you resume it.

    It stays paused over a restart of the broker. Messages in flight may still be acknowledged.

    \b
    Example:
      headrace pause email
    """
    stats = client.pause_subscription(subscription, topic)
    say(
        f"Paused subscription {subscription} ({stats['lag']:,} unread, "
        f"{stats['in_flight']:,} in flight)."
    )


@with_client
def explain(
    client: BrokerClient, subscription: Group, topic: OfTopic = None, as_json: AsJson = False
) -> None:
    """Explain why a subscription is stuck or lags, and which member holds which messages.

    \b
    Example:
      headrace explain email
    """
    found = client.explain_subscription(subscription, topic)
    if as_json:
        print_json(found)
        return
    say(f"{subscription} is {found['state']}.")
    for concern in found["findings"]:
        say(f"{concern['severity']}: {concern['text']}")
    oldest = found["oldest"]
    if oldest is not None:
        place = f"{oldest['topic']}/{oldest['partition']} offset {oldest['offset']}"
        say(
            f"The oldest message that is not done is {place}, of {when(oldest['timestamp'])} UTC: {oldest['state']}."
        )
    for member in found["members"]:
        held = member["oldest"]
        since = (
            ""
            if held is None
            else f", the oldest since {when(held['since'])} UTC, attempt {held['attempt']}"
        )
        say(
            f"{member['name']} ({member['address'] or 'has left'}) holds {member['in_flight']:,} of {member['prefetch']:,}{since}"
        )


@with_client
def resume(client: BrokerClient, subscription: Group, topic: OfTopic = None) -> None:
    """Resume a paused subscription.

    \b
    Example:
      headrace resume email
    """
    stats = client.resume_subscription(subscription, topic)
    say(f"Resumed subscription {subscription} ({stats['lag']:,} unread).")


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

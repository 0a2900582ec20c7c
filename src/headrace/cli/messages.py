"""``headrace publish``, ``fetch``, ``tail``, ``subscribe``, ``join-subscription``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headrace.cli.connecting import Group, Topic, TopicOrWildcard, named_values, with_client
from headrace.cli.groups import OfTopic, tell_created
from headrace.cli.printing import (
    AsJson,
    count_of,
    print_json,
    print_message,
    progress_bar,
    say,
)
from headrace.client.threads import BrokerClient
from headrace.errors import Closed, InvalidArgument, RequestTimeout, StaleDelivery
from headrace.model import is_pattern

CHUNK = 5_000
FETCH_MAX = 1_000

Headers = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated."),
]
Count = Annotated[
    int | None, typer.Option("--count", "-n", min=1, help="Exit after this number of messages.")
]
Timeout = Annotated[
    float | None, typer.Option(help="Exit after this number of seconds without a message.")
]


@with_client
def publish(
    client: BrokerClient,
    topic: Topic,
    message: Annotated[
        str,
        typer.Argument(metavar="MESSAGE", help="The text; '-' reads lines from standard input."),
    ],
    key: Annotated[
        str | None, typer.Option(help="Messages with the same key go to the same partition.")
    ] = None,
    header: Headers = None,
    to: Annotated[str | None, typer.Option(help="Deliver only to this subscription.")] = None,
    delay: Annotated[float | None, typer.Option(help="Publish after this many seconds.")] = None,
    ttl: Annotated[
        float | None, typer.Option(help="Do not deliver after this many seconds.")
    ] = None,
    partition: Annotated[int | None, typer.Option(help="The partition.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, or lines of standard input.

    \b
    Examples:
      headrace publish events "Hello World"
      headrace publish events "later" --delay 60 --header source=cli
      cat lines.txt | headrace publish events -
    """
    headers = named_values("--header", header)
    options: dict[str, Any] = {"to": to, "ttl": ttl, "partition": partition}
    if message == "-":
        if delay is not None:
            raise InvalidArgument("--delay is for a single message, not for standard input")
        count = _publish_lines(client, topic, key, headers, options)
        if as_json:
            print_json({"published": count})
        else:
            say(f"Published {count_of(count, 'message')} to {topic}.")
        return
    receipt = client.publish(topic, message, headers, key=key, delay=delay, **options)
    is_delayed = receipt.offset < 0
    if as_json:
        print_json(receipt)
    elif is_delayed:
        say(f"Scheduled message {receipt.id}.")
    else:
        say(f"Published to {topic}/{receipt.partition} at offset {receipt.offset}.")


def _publish_lines(
    client: BrokerClient,
    topic: str,
    key: str | None,
    headers: dict[str, str],
    options: dict[str, Any],
) -> int:
    """Publish each line as a message. Ctrl-C stops between two batches."""
    count = 0
    with progress_bar("publishing") as bar:
        for lines in _chunks():
            keys = None if key is None else [key] * len(lines)
            client.publish_many(topic, lines, headers or None, keys=keys, **options)
            count += len(lines)
            bar.show_count(count, "message")
    return count


def _chunks() -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    for line in sys.stdin.buffer:
        lines.append(line.rstrip(b"\r\n"))
        if len(lines) == CHUNK:
            yield lines
            lines = []
    if lines:
        yield lines


@with_client
def fetch(
    client: BrokerClient,
    topic: Topic,
    offset: Annotated[
        str, typer.Argument(metavar="OFFSET", help="A number, earliest, latest, or a time.")
    ] = "earliest",
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Maximum number of messages.")
    ] = 10,
    partition: Annotated[int, typer.Option(help="The partition.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the first message.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Read messages by offset or time.

    They are not consumed: no subscription moves.

    \b
    Examples:
      headrace fetch events 0
      headrace fetch events 2026-01-31T12:00:00Z -n 100 --json
    """
    _print_range(client, topic, partition, offset, count, as_json, wait)


def _print_range(
    client: BrokerClient,
    topic: str,
    partition: int,
    at: str | int,
    count: int,
    as_json: bool,
    wait: float = 0.0,
) -> None:
    """Print up to ``count`` messages of a partition."""
    while count > 0:
        found = client.fetch(topic, at, min(count, FETCH_MAX), partition=partition, wait=wait)
        for message in found:
            print_message(message, as_json)
        if not found:
            break
        count -= len(found)
        at = found[-1].offset + 1
        wait = 0.0


@with_client
def tail(
    client: BrokerClient,
    topic: TopicOrWildcard,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with messages published from now on.")
    ] = False,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Messages to show of each partition.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the last messages of a topic.

    With -f it continues with new messages, until Ctrl-C. A wildcard needs -f.

    \b
    Examples:
      headrace tail events
      headrace tail -f 'orders.*'
    """
    wildcard = is_pattern(topic)
    if wildcard and not follow:
        raise InvalidArgument("a wildcard can only be followed: add -f, or name one topic")
    channel = client.subscribe(topic) if follow else None
    if count and not wildcard:
        for part in client.topic_stats(topic)["partitions"]:
            first = max(part["start_offset"], part["end_offset"] - count)
            left = part["end_offset"] - first
            _print_range(client, topic, part["partition"], first, left, as_json)
    if channel is not None:
        _print_all(channel, None, None, as_json, ack=False)


@with_client
def join_subscription(
    client: BrokerClient,
    subscription: Group,
    topic: OfTopic = None,
    count: Count = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Print and acknowledge a subscription's messages.

    Members that join the same subscription share its messages. Ctrl-C ends the command.

    \b
    Example:
      headrace join-subscription my-group
    """
    if topic is not None:
        tell_created(client.create_subscription(subscription, topic))
    channel = client.subscription(subscription, topic, prefetch=100)
    _print_all(channel, count, timeout, as_json, ack=True)


@with_client
def subscribe(
    client: BrokerClient,
    topic: TopicOrWildcard,
    offset: Annotated[
        str | None,
        typer.Option(help="Begin here: a number, earliest, or a time; default: now."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Use this subscription; created if it does not exist.")
    ] = None,
    count: Count = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Print messages of a topic or wildcard as they arrive.

    --offset uses a temporary subscription, --group one that is kept. Without them, the command prints
    every message that is published from now on. Ctrl-C ends it.

    \b
    Examples:
      headrace subscribe events --offset 0
      headrace subscribe 'orders.*'
    """
    if offset is None and group is None:
        _print_all(client.subscribe(topic), count, timeout, as_json, ack=False)
        return
    name = group or client.client_id
    try:
        start = offset or "earliest"
        tell_created(client.create_subscription(name, topic, start))
        channel = client.subscription(name, topic, prefetch=100, start=start)
        _print_all(channel, count, timeout, as_json, ack=True)
    finally:
        if group is None:  # it was created for this command alone
            client.delete_subscription(name, topic)


def _print_all(
    channel: Any, count: int | None, timeout: float | None, as_json: bool, *, ack: bool
) -> None:
    left = count
    while left is None or left > 0:
        try:
            message = channel.get(timeout)
        except (RequestTimeout, Closed):
            break
        print_message(message, as_json)
        if ack:
            with contextlib.suppress(StaleDelivery):  # the connection broke: it comes again
                message.ack()
        if left is not None:
            left -= 1
    channel.close()
    if channel.error is not None:
        raise channel.error

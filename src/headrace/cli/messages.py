"""``headrace publish``, ``fetch``, ``tail``, ``subscribe``, ``join-subscription``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Group,
    Server,
    Token,
    Topic,
    connected,
    console,
    count_of,
    print_json,
    print_message,
    say,
)
from headrace.client.threads import BrokerClient
from headrace.errors import Closed, InvalidArgument, RequestTimeout, StaleDelivery
from headrace.model import is_pattern
from headrace.operations import documents

CHUNK = 5_000
PROGRESS_AFTER = 20_000

Headers = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated."),
]
Count = Annotated[
    int | None, typer.Option("--count", "-n", min=1, help="Stop after so many messages.")
]


def _headers(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidArgument(f"--header takes NAME=VALUE, not {pair!r}")
        found[name] = value
    return found


def publish(
    topic: Topic,
    message: Annotated[
        str,
        typer.Argument(metavar="MESSAGE", help="The text; '-' reads lines from standard input."),
    ],
    key: Annotated[str | None, typer.Option(help="Decides the partition.")] = None,
    header: Headers = None,
    to: Annotated[str | None, typer.Option(help="The one subscription it is meant for.")] = None,
    delay: Annotated[float | None, typer.Option(help="Publish it so many seconds later.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Deliver it for so many seconds.")] = None,
    partition: Annotated[int | None, typer.Option(help="The partition.")] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Publish a message, or every line of standard input.

    Examples:

      headrace publish events "Hello World"

      headrace publish events "later" --delay 60 --header source=cli

      cat lines.txt | headrace publish events -
    """
    headers = _headers(header)
    with connected(server, token, ca) as client:
        if message == "-":
            if delay is not None:
                raise InvalidArgument("--delay is for a single message, not for standard input")
            options = {"to": to, "ttl": ttl, "partition": partition}
            count = _publish_lines(client, topic, key, headers, options)
            if as_json:
                print_json({"published": count})
            else:
                say(f"published {count_of(count, 'message')} to {topic}")
            return
        receipt = client.publish(
            topic,
            message,
            headers,
            key=key,
            to=to,
            delay=delay,
            ttl=ttl,
            partition=partition,
        )
    if as_json:
        document = documents.receipt(receipt)
        if receipt.offset < 0:  # it has no place yet
            del document["partition"], document["offset"]
            document["scheduled"] = True
        print_json(document)
    elif receipt.offset < 0:
        say(f"scheduled, id {receipt.id}")
    else:
        say(f"published to {topic}/{receipt.partition} at offset {receipt.offset}")


def _publish_lines(
    client: BrokerClient,
    topic: str,
    key: str | None,
    headers: dict[str, str],
    options: dict[str, Any],
) -> int:
    """A line a message; a bar when it takes long. Ctrl-C stops between two batches."""
    count = 0
    bar = Progress(
        TextColumn("published"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = None
    with contextlib.ExitStack() as stack:
        for lines in _chunks():
            keys = None if key is None else [key] * len(lines)
            client.publish_many(topic, lines, headers or None, keys=keys, **options)
            count += len(lines)
            if count >= PROGRESS_AFTER and task is None:
                stack.enter_context(bar)
                task = bar.add_task("", total=None)
            if task is not None:
                bar.update(task, completed=count)
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


def fetch(
    topic: Topic,
    offset: Annotated[
        str, typer.Argument(metavar="OFFSET", help="A number, earliest, latest, or a time.")
    ] = "earliest",
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many at most.")] = 10,
    partition: Annotated[int, typer.Option(help="The partition.")] = 0,
    wait: Annotated[float, typer.Option(help="Wait so many seconds for the first.")] = 0.0,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Read messages by offset or time, without consuming them.

    Examples:

      headrace fetch events 0

      headrace fetch events 2026-01-31T12:00:00Z -n 100 --json
    """
    with connected(server, token, ca) as client:
        at: str | int = offset
        left = count
        while left:
            found = client.fetch(topic, at, min(left, 1000), partition=partition, wait=wait)
            for message in found:
                print_message(message, as_json, documents.message)
            if not found:
                break
            left -= len(found)
            at = found[-1].offset + 1
            wait = 0.0


def tail(
    topic: Topic,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is published from now on.")
    ] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="How many of the last.")] = 10,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show the last messages of a topic; with -f go on, also of all that a wildcard stands for.

    Examples:

      headrace tail events

      headrace tail -f 'orders.*'
    """
    wildcard = is_pattern(topic)
    if wildcard and not follow:
        raise InvalidArgument("a wildcard can only be followed: add -f, or name one topic")
    with connected(server, token, ca) as client:
        channel = client.subscribe(topic) if follow else None
        if count and not wildcard:
            for part in client.topic_stats(topic)["partitions"]:
                first = max(part["start_offset"], part["end_offset"] - count)
                left = part["end_offset"] - first
                while left > 0:
                    found = client.fetch(topic, first, left, partition=part["partition"])
                    for message in found:
                        print_message(message, as_json, documents.message)
                    left -= len(found)
                    first += len(found)
                    if not found:
                        break
        if channel is not None:
            for message in channel:
                print_message(message, as_json, documents.message)
            if channel.error is not None:
                raise channel.error


def join_subscription(
    subscription: Group,
    topic: Annotated[str | None, typer.Option(help="Its topic, if the name is not unique.")] = None,
    count: Count = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after so many seconds without a message.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Join a subscription: print its messages and acknowledge them, until Ctrl-C.

    Example:

      headrace join-subscription my-group
    """
    with connected(server, token, ca) as client:
        _consume(client, subscription, topic, None, count, timeout, as_json)


def subscribe(
    topic: Topic,
    offset: Annotated[
        str | None, typer.Option(help="Begin at this offset, earliest or a time; else now.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="The subscription; made if it is not there.")
    ] = None,
    count: Count = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after so many seconds without a message.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Print the messages of a topic as they come, until Ctrl-C.

    With --offset or --group a subscription is made for it; without, everything from now on.

    Examples:

      headrace subscribe events --offset 0

      headrace subscribe 'orders.*'
    """
    with connected(server, token, ca) as client:
        if offset is None and group is None:
            _print_all(client.subscribe(topic), count, timeout, as_json, ack=False)
            return
        name = group or f"cli-{client.client_id.rsplit('-', 1)[-1]}"
        try:
            _consume(client, name, topic, offset or "earliest", count, timeout, as_json)
        finally:
            if group is None:  # made for this command alone
                client.delete_subscription(name, topic)


def _consume(
    client: BrokerClient,
    name: str,
    topic: str | None,
    start: str | None,
    count: int | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    options: dict[str, Any] = {} if start is None else {"start": start}
    consumer = client.subscription(name, topic, prefetch=100, **options)
    _print_all(consumer, count, timeout, as_json, ack=True)


def _print_all(
    channel: Any, count: int | None, timeout: float | None, as_json: bool, *, ack: bool
) -> None:
    left = count
    while left is None or left > 0:
        try:
            message = channel.get(timeout)
        except RequestTimeout:
            break
        except Closed:
            break
        print_message(message, as_json, documents.message)
        if ack:
            with contextlib.suppress(StaleDelivery):  # the connection broke: it comes again
                message.ack()
        if left is not None:
            left -= 1
    channel.close()
    if channel.error is not None:
        raise channel.error

"""``headrace publish``, ``fetch``, ``tail``, ``subscribe``, ``join-subscription``."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import typer

from headrace import limits
from headrace.channels import Channel
from headrace.cli.connecting import (
    Group,
    Topic,
    TopicOrWildcard,
    given_as,
    named_values,
    with_client,
    with_options,
)
from headrace.cli.groups import OfTopic, tell_created, tell_paused
from headrace.cli.printing import (
    MESSAGE_OPTIONS,
    AsJson,
    MessageStyle,
    count_of,
    print_json,
    print_message,
    progress_bar,
    say,
    size,
)
from headrace.cli.values import duration_option
from headrace.client.threads import BrokerClient
from headrace.errors import Closed, InvalidArgument, RequestTimeout, StaleDelivery, TooLarge
from headrace.model import Message, is_pattern
from headrace.paging import From

with_style = with_options("style", MESSAGE_OPTIONS, given_as(MessageStyle))
"""Give a command the options for how messages are printed, as its argument ``style``."""
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
    float | None, duration_option(help="Exit after this time without a message: seconds, or 5m.")
]


@with_client
def publish(
    client: BrokerClient,
    topic: Topic,
    message: Annotated[
        str | None,
        typer.Argument(metavar="MESSAGE", help="The text; '-' reads lines from standard input."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="PATH",
            help="Publish this file as one message, byte for byte; '-': standard input.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Messages with the same key go to the same partition.")
    ] = None,
    header: Headers = None,
    to: Annotated[str | None, typer.Option(help="Deliver only to this subscription.")] = None,
    delay: Annotated[
        float | None, duration_option(help="Publish after this time: seconds, or 1h.")
    ] = None,
    ttl: Annotated[
        float | None, duration_option(help="Do not deliver after this time: seconds, or 1h.")
    ] = None,
    partition: Annotated[int | None, typer.Option(help="The partition.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, a file, or lines of standard input.

    \b
    Examples:
      headrace publish events "Hello World"
      headrace publish events "later" --delay 60 --header source=cli
      headrace publish images --file photo.jpg --key customer-7
      cat lines.txt | headrace publish events -
    """
    if message is None and file is None:
        raise InvalidArgument("give a message, '-' for lines of standard input, or --file PATH")
    if message is not None and file is not None:
        raise InvalidArgument("give a message or --file PATH, not both")
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
    value = _content(file) if file is not None else message or ""
    receipt = client.publish(topic, value, headers, key=key, delay=delay, **options)
    if as_json:
        print_json(receipt)
    elif receipt.is_delayed:
        say(f"Scheduled message {receipt.id}.")
    else:
        say(f"Published to {topic}/{receipt.partition} at offset {receipt.offset}.")


def _content(path: str) -> bytes:
    """The bytes of a file. No more are read than a message may have: a device does not end."""
    try:
        with contextlib.ExitStack() as stack:
            stream = sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb"))
            content: bytes = stream.read(limits.MESSAGE_BYTES_CEILING + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > limits.MESSAGE_BYTES_CEILING:
        raise TooLarge(
            f"{path} is larger than a message may be, which is {size(limits.MESSAGE_BYTES_CEILING)} "
            "at most (max_message_size)",
            code="message_too_large",
        )
    return content


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
@with_style
def fetch(
    client: BrokerClient,
    topic: Topic,
    offset: Annotated[
        str, typer.Argument(metavar="OFFSET", help="A number, earliest, latest, or a time.")
    ] = "earliest",
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Maximum number of messages.")
    ] = 10,
    partition: Annotated[
        int | None, typer.Option(help="Read this partition only. Default: all, by time.")
    ] = None,
    wait: Annotated[
        float, duration_option(help="Wait this long for the first message: seconds, or 5m.")
    ] = 0.0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the bytes of the values, and nothing else.")
    ] = False,
    *,
    style: MessageStyle,
) -> None:
    """Read messages by offset or time.

    The messages are not consumed: no subscription moves. The command reads all partitions, in the
    order of time. If the topic has several partitions, a numeric offset needs --partition.

    \b
    Examples:
      headrace fetch events 0
      headrace fetch events 2026-01-31T12:00:00Z -n 100 --json
      headrace fetch events 1h --time --keys --headers
      headrace fetch images 7 -n 1 --raw > photo.jpg
    """
    if raw and any(style):
        raise InvalidArgument("--raw writes the values alone; leave out the other options")
    if raw and sys.stdout.isatty():
        raise InvalidArgument(
            "--raw writes bytes as they are, which a terminal may take for commands; write them to "
            "a file (> FILE) or into a pipe"
        )
    _print_range(client, topic, partition, offset, count, _write_raw if raw else style, wait)


def _write_raw(message: Message) -> None:
    sys.stdout.buffer.write(message.value or b"")
    sys.stdout.buffer.flush()


def _print_range(
    client: BrokerClient,
    topic: str,
    partition: int | None,
    at: From,
    count: int,
    style: MessageStyle | Callable[[Message], None],
    wait: float = 0.0,
) -> None:
    """Print up to ``count`` messages."""
    show = style if callable(style) else partial(print_message, style=style)
    for message in _messages(client, topic, partition, at, count, wait):
        show(message)


def _messages(
    client: BrokerClient, topic: str, partition: int | None, at: From, count: int, wait: float = 0.0
) -> Iterator[Message]:
    while count > 0:
        page = client.fetch(topic, at, min(count, FETCH_MAX), partition=partition, wait=wait)
        yield from page
        if not page:
            break
        count -= len(page)
        at, wait = page.next, 0.0


@with_client
@with_style
def tail(
    client: BrokerClient,
    topic: TopicOrWildcard,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with messages published from now on.")
    ] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Messages to show.")] = 10,
    *,
    style: MessageStyle,
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
    channel = _follow(client, topic) if follow else None
    if count and not wildcard:
        for message in _last(client, topic, count):
            print_message(message, style=style)
    if channel is not None:
        _print_all(channel, None, None, style, ack=False)


def _last(client: BrokerClient, topic: str, count: int) -> Iterable[Message]:
    """The last messages of a topic: they are among the last of each partition."""
    first, left = {}, 0
    for part in client.topic_stats(topic)["partitions"]:
        first[part["partition"]] = max(part["start_offset"], part["end_offset"] - count)
        left += part["end_offset"] - first[part["partition"]]
    return deque(_messages(client, topic, None, first, left), maxlen=count)


@with_client
@with_style
def join_subscription(
    client: BrokerClient,
    subscription: Group,
    topic: OfTopic = None,
    count: Count = None,
    timeout: Timeout = None,
    *,
    style: MessageStyle,
) -> None:
    """Print and acknowledge a subscription's messages.

    Members that join the same subscription share its messages. Ctrl-C ends the command.

    \b
    Example:
      headrace join-subscription my-group
    """
    if topic is not None:
        made = client.create_subscription(subscription, topic)
        tell_created(topic, made.get("topic_created"))
    channel = client.subscription(subscription, topic, prefetch=100)
    tell_paused(client.subscription_stats(subscription, topic))
    _print_all(channel, count, timeout, style, ack=True)


@with_client
@with_style
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
    *,
    style: MessageStyle,
) -> None:
    """Print messages of a topic or wildcard as they arrive.

    With --offset, the command uses a temporary subscription; with --group, a durable one. Without
    them, it prints every message that is published from now on. Ctrl-C ends it.

    \b
    Examples:
      headrace subscribe events --offset 0
      headrace subscribe 'orders.*'
    """
    if offset is None and group is None:
        _print_all(_follow(client, topic), count, timeout, style, ack=False)
        return
    name = group or client.client_id
    try:
        start = offset or "earliest"
        made = client.create_subscription(name, topic, start)
        tell_created(topic, made.get("topic_created"))
        tell_paused(made)
        channel = client.subscription(name, topic, prefetch=100, start=start)
        _print_all(channel, count, timeout, style, ack=True)
    finally:
        if group is None:  # it was created for this command alone
            client.delete_subscription(name, topic)


def _follow(client: BrokerClient, topic: str) -> Channel:
    channel = client.subscribe(topic)
    tell_created(topic, channel.topic_created)
    return channel


def _print_all(
    channel: Any, count: int | None, timeout: float | None, style: MessageStyle, *, ack: bool
) -> None:
    left = count
    while left is None or left > 0:
        try:
            message = channel.get(timeout)
        except (RequestTimeout, Closed):
            break
        print_message(message, style)
        if ack:
            with contextlib.suppress(StaleDelivery):  # the connection broke: it comes again
                message.ack()
        if left is not None:
            left -= 1
    channel.close()
    if channel.error is not None:
        raise channel.error

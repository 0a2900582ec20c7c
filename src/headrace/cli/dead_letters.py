"""``headrace dlq`` and ``headrace scheduled``: what was given up, and what waits for its time."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Group,
    Server,
    Token,
    connected,
    console,
    count_of,
    print_json,
    print_rows,
    say,
    text_of,
    when,
)
from headrace.errors import NotFound
from headrace.operations import documents

dlq = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
scheduled = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Offset = Annotated[int, typer.Argument(metavar="OFFSET", help="The letter's offset in the list.")]
Offsets = Annotated[
    list[int] | None, typer.Option("--offset", help="Only this letter; may be repeated.")
]


@dlq.command("list")
def list_letters(
    subscription: Annotated[
        str | None, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many at most.")] = 50,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List dead letters; without a subscription, how many there are of each."""
    with connected(server, token, ca) as client:
        if subscription is None:
            topics = client.dead_letter_topics()
            if as_json:
                print_json(topics)
            else:
                print_rows(topics, {"topic": "topic", "letters": "letters"}, "No dead letters.")
            return
        letters = client.dead_letters(subscription, limit=limit)
    if as_json:
        print_json([documents.letter(letter) for letter in letters])
        return
    rows = [
        {
            "offset": letter.offset,
            "when": when(letter.timestamp),
            "from": f"{letter.message.topic}/{letter.message.partition}@{letter.message.offset}",
            "attempts": letter.attempts,
            "reason": text_of(letter.reason.encode()),
            "value": text_of(letter.message.value)[:60],
        }
        for letter in letters
    ]
    names = ("offset", "when", "from", "attempts", "reason", "value")
    print_rows(rows, {name: name for name in names}, f"No dead letters of {subscription}.")


@dlq.command()
def show(
    subscription: Group,
    offset: Offset,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show one dead letter whole."""
    with connected(server, token, ca) as client:
        letter = client.dead_letter(subscription, offset)
    if as_json:
        print_json(documents.letter(letter))
        return
    message = letter.message
    origin = f"{message.topic}/{message.partition}@{message.offset}"
    attempts = "1 delivery" if letter.attempts == 1 else f"{letter.attempts:,} deliveries"
    say(f"from      {origin}, id {message.id}")
    say(f"given up  {when(letter.timestamp)} UTC after {attempts}")
    say(f"reason    {text_of(letter.reason.encode())}")
    if message.key is not None:
        say(f"key       {text_of(message.key)}")
    for name, value in message.headers.items():
        say(f"header    {name}={text_of(value.encode())}")
    say(text_of(message.value, lines=True))


@dlq.command()
def redrive(
    subscription: Group,
    offset: Offsets = None,
    reason: Annotated[str | None, typer.Option(help="Only whose reason has this text.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only those from this topic.")] = None,
    limit: Annotated[int | None, typer.Option(help="How many at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="Messages per second.")] = None,
    everybody: Annotated[
        bool,
        typer.Option("--everybody", help="To all subscriptions, not only the one that failed."),
    ] = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Publish dead letters back to where they came from.

    Examples:

      headrace dlq redrive email

      headrace dlq redrive email --reason timeout --rate 50
    """
    with (
        connected(server, token, ca) as client,
        console.status(f"redriving letters of {subscription}"),
    ):
        count = client.redrive(
            subscription,
            offsets=offset,
            reason=reason,
            topic=topic,
            limit=limit,
            rate=rate,
            to="topic" if everybody else "subscription",
        )
    say(f"redrove {count_of(count, 'letter')}")
    if offset is not None and limit is None and reason is None and topic is None:
        missing = len(set(offset)) - count
        if missing > 0:
            raise NotFound(
                f"{missing} of {len(set(offset))} letters named not found; see 'headrace dlq list'",
                code="message_not_found",
            )


@dlq.command()
def edit(
    subscription: Group,
    offset: Offset,
    value: Annotated[str, typer.Option(help="The corrected payload.")],
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Correct a dead letter's payload before it is redriven."""
    with connected(server, token, ca) as client:
        new = client.edit_dead_letter(subscription, offset, value=value.encode())
    say(f"letter {offset} is now letter {new}")


@dlq.command()
def purge(
    subscription: Group,
    offset: Offsets = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Give dead letters up for good."""
    if not yes:
        what = "these letters" if offset else "all letters"
        typer.confirm(f"Purge {what} of {subscription}?", abort=True)
    with connected(server, token, ca) as client:
        count = client.purge_dead_letters(subscription, offset)
    say(f"purged {count_of(count, 'letter')}")


@scheduled.command("list")
def list_scheduled(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="The topic.")] = None,
    limit: Annotated[int, typer.Option(help="How many at most.")] = 100,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List delayed messages, soonest first."""
    with connected(server, token, ca) as client:
        found = client.scheduled(topic, limit=limit)
    if as_json:
        print_json([documents.scheduled(item) for item in found])
        return
    rows = [{"id": i.id, "topic": i.topic, "when": when(i.deliver_at)} for i in found]
    print_rows(rows, {"when": "when (UTC)", "topic": "topic", "id": "id"}, "Nothing is scheduled.")


@scheduled.command()
def cancel(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Cancel a delayed message."""
    with connected(server, token, ca) as client:
        client.cancel(message_id)
    say(f"message {message_id} is cancelled")

"""``headrace dlq`` and ``headrace scheduled``: dead letters and delayed messages."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.connecting import Group, with_client
from headrace.cli.printing import (
    AsJson,
    count_of,
    errors,
    place_of,
    print_json,
    print_listing,
    say,
    text_of,
    when,
)
from headrace.cli.values import Yes, confirm
from headrace.client.threads import BrokerClient
from headrace.errors import Conflict, NotFound

dlq = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
scheduled = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Offset = Annotated[int, typer.Argument(metavar="OFFSET", help="The letter's offset in the list.")]
Offsets = Annotated[
    list[int] | None, typer.Option("--offset", help="Only this letter; may be repeated.")
]


@dlq.command("list")
@with_client
def list_letters(
    client: BrokerClient,
    subscription: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBSCRIPTION", help="The subscription; default: count the letters of all."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of letters.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of a subscription, or count all."""
    if subscription is None:
        counts = client.dead_letter_topics()
        print_listing(as_json, counts, counts, ("topic", "letters"), "No dead letters.")
        return
    letters = client.dead_letters(subscription, limit=limit)
    rows = [
        {
            "offset": letter.offset,
            "when": when(letter.timestamp),
            "from": place_of(letter.message),
            "attempts": letter.attempts,
            "reason": text_of(letter.reason.encode()),
            "value": text_of(letter.message.value)[:60],
        }
        for letter in letters
    ]
    names = ("offset", "when", "from", "attempts", "reason", "value")
    columns = {**dict(zip(names, names, strict=True)), "when": "when (UTC)"}
    print_listing(as_json, letters, rows, columns, f"No dead letters of {subscription}.")


@dlq.command()
@with_client
def show(
    client: BrokerClient, subscription: Group, offset: Offset, as_json: AsJson = False
) -> None:
    """Show all of one dead letter."""
    letter = client.dead_letter(subscription, offset)
    if as_json:
        print_json(letter)
        return
    message = letter.message
    attempts = "1 delivery" if letter.attempts == 1 else f"{letter.attempts:,} deliveries"
    say(f"from      {place_of(message)}, id {message.id}")
    say(f"failed    {when(letter.timestamp)} UTC after {attempts}")
    say(f"reason    {text_of(letter.reason.encode())}")
    if message.key is not None:
        say(f"key       {text_of(message.key)}")
    for name, value in message.headers.items():
        say(f"header    {name}={text_of(value.encode())}")
    say(text_of(message.value, lines=True))


@dlq.command()
@with_client
def redrive(
    client: BrokerClient,
    subscription: Group,
    offset: Offsets = None,
    reason: Annotated[
        str | None, typer.Option(help="Only letters whose reason contains this text.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only letters from this topic.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of letters.")] = None,
    rate: Annotated[float | None, typer.Option(help="Messages per second.")] = None,
    everybody: Annotated[
        bool,
        typer.Option("--everybody", help="Deliver to all subscriptions, not only to this one."),
    ] = False,
) -> None:
    """Publish dead letters to their topics again.

    \b
    Examples:
      headrace dlq redrive email
      headrace dlq redrive email --reason timeout --rate 50
    """
    with errors.status(f"redriving dead letters of {subscription}"):
        result = client.redrive(
            subscription,
            offsets=offset,
            reason=reason,
            topic=topic,
            limit=limit,
            rate=rate,
            to="topic" if everybody else "subscription",
        )
    count, skipped = result["redriven"], result["skipped"]
    say(f"Redrove {count_of(count, 'letter')}.")
    if skipped:
        raise Conflict(
            f"{count_of(skipped, 'letter')} cannot be redriven and stays: {result['reason']}",
            code="no_origin",
        )
    if offset is not None and limit is None and reason is None and topic is None:
        missing = len(set(offset)) - count
        if missing > 0:
            raise NotFound(
                f"{missing} of {count_of(len(set(offset)), 'letter')} not found; "
                "see 'headrace dlq list'",
                code="message_not_found",
            )


@dlq.command()
@with_client
def edit(
    client: BrokerClient,
    subscription: Group,
    offset: Offset,
    value: Annotated[str, typer.Option(help="The corrected payload.")],
) -> None:
    """Correct the payload of a dead letter."""
    new = client.edit_dead_letter(subscription, offset, value=value.encode())
    say(f"Letter {offset} is now letter {new}.")


@dlq.command()
@with_client
def purge(
    client: BrokerClient, subscription: Group, offset: Offsets = None, yes: Yes = False
) -> None:
    """Delete dead letters."""
    which = count_of(len(set(offset)), "dead letter") if offset else "all dead letters"
    confirm(f"Delete {which} of {subscription}?", yes)
    count = client.purge_dead_letters(subscription, offset)
    say(f"Deleted {count_of(count, 'letter')}.")


@scheduled.command("list")
@with_client
def list_scheduled(
    client: BrokerClient,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only messages for this topic.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of messages.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List delayed messages, soonest first."""
    found = client.scheduled(topic, limit=limit)
    rows = [{"id": each.id, "topic": each.topic, "when": when(each.deliver_at)} for each in found]
    columns = {"when": "when (UTC)", "topic": "topic", "id": "id"}
    print_listing(as_json, found, rows, columns, "No delayed messages.")


@scheduled.command()
@with_client
def cancel(
    client: BrokerClient,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    yes: Yes = False,
) -> None:
    """Cancel a delayed message: it is deleted, and never published."""
    confirm(f"Cancel message {message_id}?", yes)
    client.cancel(message_id)
    say(f"Cancelled message {message_id}.")

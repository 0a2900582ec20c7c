"""``headrace dlq`` and ``headrace scheduled``: dead letters and delayed messages."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from typing import Annotated, Any, Literal

import typer

from headrace import limits
from headrace.cli.connecting import Group, with_client
from headrace.cli.printing import (
    AsJson,
    count_of,
    place_of,
    print_each,
    print_json,
    progress_bar,
    say,
    text_of,
    when,
)
from headrace.cli.values import Yes, confirm, topic_filter
from headrace.client.threads import BrokerClient
from headrace.errors import Conflict, InvalidArgument, NotFound
from headrace.model import DeadLetter
from headrace.operations.results import Redriven

dlq = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
scheduled = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
LOOK_S = 1.0
"""Between two looks at a redrive."""
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
    """List the dead letters of a subscription, or count those of all."""
    if subscription is None:
        print_each(as_json, client.dead_letter_topics(), dict, "No dead letters.")
        return
    letters = client.dead_letters(subscription, limit=limit)
    print_each(as_json, letters, _row, f"No dead letters of {subscription}.")


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "offset": letter.offset,
        "when (UTC)": when(letter.timestamp),
        "from": place_of(letter.message),
        "attempts": letter.attempts,
        "reason": text_of(letter.reason.encode()),
        "value": text_of(letter.message.value)[:60],
    }


@dlq.command()
@with_client
def show(
    client: BrokerClient, subscription: Group, offset: Offset, as_json: AsJson = False
) -> None:
    """Show one dead letter in full."""
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
    destination: Annotated[
        str | None, typer.Option("--to", metavar="TOPIC", help="Publish to this topic instead.")
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Change each payload by a JSON Merge Patch or JSON Patch."
        ),
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show what would be published, and publish nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once; the redrive runs in the broker.")
    ] = False,
) -> None:
    """Publish dead letters to their topics again.

    Ctrl-C stops the redrive; letters that were not published stay. If this command is killed, or its
    connection is lost for 30 seconds, the redrive stops, too. With --detach it goes on without it.

    \b
    Examples:
      headrace dlq redrive email
      headrace dlq redrive email --reason timeout --rate 50
      headrace dlq redrive email --transform '{"currency": "EUR"}' --preview
    """
    wanted: dict[str, Any] = {
        "offsets": offset,
        "reason": reason,
        "topic": topic,
        "limit": limit,
        "destination": destination,
        "transform": None if transform is None else read_patch(transform),
    }
    if preview:
        found = client.preview_redrive(subscription, **wanted)
        failing = f", {found['failing']:,} of them cannot be" if found["failing"] else ""
        say(f"{count_of(found['matching'], 'letter')} would be redriven{failing}.")
        for sample in found["samples"]:
            what = sample["error"] or text_of((sample["after"] or "").encode())
            say(f"{sample['offset']} to {sample['topic']}: {what}")
        return
    to: Literal["topic", "subscription"] = "topic" if everybody else "subscription"
    wanted |= {"rate": rate, "to": to}
    if detach:
        begun = client.redrive(subscription, wait=0, **wanted)
        say(f"Redrive {begun['id']} runs in the broker.")
        say(f"'headrace dlq redrives {subscription}' shows its progress.")
        return
    result = _follow(client, subscription, wanted)
    if result["state"] == "stopped":
        raise Conflict(
            f"the redrive was stopped ({result['why']}) after {count_of(result['redriven'], 'letter')}",
            code="redrive_stopped",
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
                f"see 'headrace dlq list {subscription}'",
                code="message_not_found",
            )


def _follow(client: BrokerClient, subscription: str, wanted: dict[str, Any]) -> Redriven:
    """Redrive, show the progress, and stop it at Ctrl-C."""
    id = str(uuid.uuid4())
    try:
        with progress_bar(f"redriving dead letters of {subscription}") as bar:
            found = client.redrive(
                subscription, id=id, wait=LOOK_S, lease=limits.REDRIVE_LEASE_S, **wanted
            )
            while found["state"] == "running":
                bar.show(found["redriven"], found["redriven"] + found["left"], "letter")
                found = client.redrive_progress(subscription, id, wait=LOOK_S)
    except KeyboardInterrupt:
        with suppress(NotFound):  # it had not begun
            _say_stopped(client.stop_redrive(subscription, id))
        raise
    return found


def _say_stopped(found: Redriven) -> None:
    say(
        f"Stopped: redrove {count_of(found['redriven'], 'letter')}; "
        f"{count_of(found['left'], 'letter')} left."
    )


@dlq.command()
@with_client
def redrives(client: BrokerClient, subscription: Group, as_json: AsJson = False) -> None:
    """List the redrives of a subscription: those that run, and those that ended lately."""
    found = client.redrives(subscription)
    print_each(as_json, found, _redrive_row, f"No redrives of {subscription}.")


def _redrive_row(found: Redriven) -> dict[str, Any]:
    return {
        "id": found["id"],
        "began (UTC)": when(found["began"]),
        "by": found["by"],
        "state": found["state"],
        "redriven": found["redriven"],
        "skipped": found["skipped"],
        "left": found["left"],
        "why": found["why"] or found["reason"] or "",
    }


@dlq.command("stop-redrive")
@with_client
def stop_redrive(
    client: BrokerClient,
    subscription: Group,
    redrive: Annotated[
        str | None, typer.Argument(metavar="ID", help="The redrive; default: all that run.")
    ] = None,
) -> None:
    """Stop redrives. Letters that were not published stay dead letters."""
    if redrive is None:
        running = [
            each["id"] for each in client.redrives(subscription) if each["state"] == "running"
        ]
    else:
        running = [redrive]
    for id in running:
        _say_stopped(client.stop_redrive(subscription, id))
    if not running:
        say(f"No redrive of {subscription} runs.")


def read_patch(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(
            f"the transform is not JSON: {error}", code="invalid_transform"
        ) from None


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
    topic: Annotated[str | None, topic_filter("messages for")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of messages.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List delayed messages, soonest first."""
    found = client.scheduled(topic, limit=limit)
    print_each(
        as_json,
        found,
        lambda each: {"when (UTC)": when(each.deliver_at), "topic": each.topic, "id": each.id},
        "No delayed messages.",
    )


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


@scheduled.command("publish")
@with_client
def publish_scheduled(
    client: BrokerClient,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
) -> None:
    """Publish a delayed message now."""
    client.publish_now(message_id)
    say(f"Published message {message_id}.")

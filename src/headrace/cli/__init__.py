"""The commands. Each module here is one command; this file is the list of them.

Exit codes: 0 it went well, 1 it went well and what it found is not (see the command), 2 it could not
be done, 130 interrupted. A user's mistake is one line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headrace.cli import (
    archive,
    bench,
    dead_letters,
    doctor,
    groups,
    messages,
    pipeline,
    replay,
    serve,
    sql,
    topics,
)
from headrace.errors import HeadraceError, InvalidArgument

app = typer.Typer(
    name="headrace",
    help="Headrace, a message broker that leads messages to the services that wait for them.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Run the broker.")(serve.serve)
app.command(short_help="Print the settings in force.")(serve.config)
app.command(short_help="Publish a message, or lines of standard input.")(messages.publish)
app.command(short_help="Read messages by offset or time.")(messages.fetch)
app.command(short_help="Show the last messages; -f goes on.")(messages.tail)
app.command(short_help="Print messages as they come.")(messages.subscribe)
app.command(short_help="Consume and acknowledge a subscription.")(messages.join_subscription)
app.command(short_help="List the topics.")(topics.topics)
app.command(short_help="Show one topic.")(topics.describe)
app.command(short_help="Create a topic.")(topics.create_topic)
app.command(short_help="Change a topic's settings.")(topics.alter_topic)
app.command(short_help="Delete a topic.")(topics.delete_topic)
app.command(short_help="List the subscriptions with their lag.")(groups.groups)
app.command(short_help="Create a subscription.")(groups.create_subscription)
app.command(short_help="Delete a subscription.")(groups.delete_subscription)
app.command(short_help="Replay a subscription, or skip.")(groups.seek)
app.add_typer(dead_letters.dlq, name="dlq", help="Dead letters: list, show, redrive, edit, purge.")
app.add_typer(dead_letters.scheduled, name="scheduled", help="Delayed messages: list, cancel.")
app.add_typer(
    pipeline.pipeline, name="pipeline", help="Spark pipelines: run, list, validate, status, stop."
)
app.add_typer(
    archive.archive,
    name="archive",
    help="Topics into lake tables: run, verify, list, show, compact.",
)
app.command(short_help="Examine or repair a data directory.")(doctor.doctor)
app.command(short_help="Test a running broker under load.")(bench.bench)
app.command(short_help="Query topics with SQL.")(sql.sql)
app.command(short_help="Write a topic or a table back into a topic.")(replay.replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """The options before the command."""


def _check_arguments() -> None:
    """What the shell hands over may be any bytes; names and texts are UTF-8."""
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"the argument {argument!r} is not valid UTF-8") from None


def main() -> None:
    try:
        _check_arguments()
        app(prog_name="headrace")  # whatever started Python: a script, -m, a test runner
    except HeadraceError as error:
        print(f"headrace: {error.message} [{error.code}]", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

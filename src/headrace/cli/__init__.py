"""The commands. Each module here holds some of them; this file lists them all.

Exit codes: 0 success; 1 the command ran but found a problem (each command says which), or you answered
no; 2 it could not run; 69 the broker's address is not available; 130 interrupted. A user's mistake is one
line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headrace.cli import (
    archive,
    backup,
    bench,
    bridge,
    cluster,
    dead_letters,
    doctor,
    groups,
    messages,
    moving,
    pipeline,
    replay,
    report,
    serve,
    sql,
    tokens,
    top,
    topics,
    transfer,
    users,
)
from headrace.cli.connecting import refusal
from headrace.cli.printing import print_error
from headrace.cli.serve import EXIT_UNAVAILABLE
from headrace.errors import HeadraceError, InvalidArgument

app = typer.Typer(
    name="headrace",
    help="Headrace, a message broker. Each command explains itself with --help.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(serve.serve, serve.config),
    *(messages.publish, messages.fetch, messages.tail),
    *(messages.subscribe, messages.join_subscription),
    *(topics.topics, topics.describe),
    *(topics.create_topic, topics.alter_topic, topics.delete_topic),
    *(groups.groups, groups.create_subscription, groups.delete_subscription, groups.seek),
    *(groups.pause, groups.resume, groups.explain, top.top, top.clients),
):
    app.command()(command)
app.add_typer(
    dead_letters.dlq,
    name="dlq",
    help="Dead letters: list, show, redrive, redrives, stop-redrive, edit, purge.",
)
app.add_typer(
    dead_letters.scheduled, name="scheduled", help="Delayed messages: list, cancel, publish."
)
app.add_typer(
    pipeline.pipeline, name="pipeline", help="Spark pipelines: run, list, validate, status, stop."
)
app.add_typer(
    archive.archive, name="archive", help="Lake tables: run, verify, list, show, compact."
)
app.add_typer(bridge.bridge, name="bridge", help="Plain Kafka topics: from-kafka, to-kafka.")
moving.register(cluster.cluster)
app.add_typer(
    cluster.cluster, name="cluster", help="Several nodes over Kafka: status, drain, import, export."
)
app.add_typer(users.users, name="users", help="Users: add, list, change, delete.")
app.add_typer(tokens.tokens, name="tokens", help="Tokens: create, list, revoke.")
app.add_typer(users.access, name="access", help="Rights: whoami, quotas.")
for command in (
    *(doctor.doctor, backup.backup, backup.restore, backup.verify),
    *(bench.bench, sql.sql, report.report, replay.replay),
):
    app.command()(command)
app.command("export")(transfer.export)
app.command("import")(transfer.import_lines)


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
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            hidden=True,
            callback=refusal(
                "write --server after the command: headrace topics --server HOST:PORT"
            ),
        ),
    ] = None,
) -> None:
    """The options before the command."""


def _check_arguments() -> None:
    """Refuse arguments that are not UTF-8: a shell may pass any bytes."""
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
        print_error(error)
        sys.exit(EXIT_UNAVAILABLE if error.code == "cannot_listen" else 2)
    except KeyboardInterrupt:
        sys.exit(130)

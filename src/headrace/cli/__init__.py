"""The commands. Each module here is one command; this file is the list of them.

Exit codes: 0 it went well, 1 it went well and what it found is not (see the command), 2 it could not
be done, 130 interrupted. A user's mistake is one line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headrace.cli import doctor, serve
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Headrace, a message broker that leads messages to the services that wait for them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Run the broker.")(serve.serve)
app.command(short_help="Print the settings in force.")(serve.config)
app.command(short_help="Examine or repair a data directory.")(doctor.doctor)


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


def main() -> None:
    try:
        app()
    except HeadraceError as error:
        print(f"headrace: {error.message} [{error.code}]", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

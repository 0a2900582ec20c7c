"""Options that several commands take, and the question before something is deleted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from msgspec import Meta

from headrace import limits
from headrace.checking import check
from headrace.cli.printing import complain
from headrace.errors import InvalidArgument
from headrace.notation import BYTES, SECONDS

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def _reader(annotation: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        try:
            return check("it", value, annotation, strict=False)
        except InvalidArgument as error:
            raise typer.BadParameter(error.message) from None

    return read


def duration_option(
    *names: str, help: str, low: float = 0, high: float = limits.DELAY_S_MAX, **more: Any
) -> Any:
    """An option that takes seconds, or a duration such as ``90s`` or ``1h``."""
    read = _reader(Annotated[float, Meta(ge=low, le=high), SECONDS])
    return typer.Option(*names, metavar="TIME", parser=read, help=help, **more)


def size_option(*names: str, help: str, low: int = 0, high: int = limits.OFFSET_MAX) -> Any:
    """An option that takes bytes, or a size such as ``512KB`` or ``1GB``."""
    read = _reader(Annotated[int, Meta(ge=low, le=high), BYTES])
    return typer.Option(*names, metavar="SIZE", parser=read, help=help)


def repartition_option(source: str) -> Any:
    """A flag of the commands that copy records with their partitions."""
    help = f"Choose partitions by key, not as in {source}."
    return typer.Option("--repartition", help=help)


def topic_filter(listed: str) -> Any:
    """An argument that limits a list to one topic."""
    return typer.Argument(metavar="TOPIC", help=f"Only {listed} this topic.")


def confirm(question: str, yes: bool) -> None:
    """Ask before something is lost: on a terminal. Elsewhere ``--yes`` must answer before.

    Every command that deletes calls this. A question that nobody sees, in a script, would be answered by
    whatever happens to be on standard input.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(
            f"{question} There is no terminal to answer on; add --yes to do it",
            code="not_confirmed",
        )
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort as abort:  # Ctrl-C or Ctrl-D: only the first is an interrupt
        if isinstance(abort.__context__, KeyboardInterrupt):
            complain("")
            raise KeyboardInterrupt from None
        raise
    if not agreed:
        raise typer.Abort

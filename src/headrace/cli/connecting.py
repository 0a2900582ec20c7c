"""What every command that talks to a broker shares: where it is, and how things are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument
from headrace.model import Message
from headrace.settings import BY_NAME

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        envvar="HEADRACE_SERVER",
        help="The broker; tls:// in front of it for TLS.",
    ),
]
Token = Annotated[
    str | None, typer.Option("--token", envvar="HEADRACE_TOKEN", help="The broker's token.")
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", envvar="HEADRACE_CA", help="Use TLS and trust this certificate (PEM)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
Group = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.")]

console = Console()


PUBLISH_S = 5.0
"""How long a publish is tried again, say into a queue that is full: somebody waits for the answer."""


class Address(NamedTuple):
    host: str
    port: int
    tls: bool


def address(server: str | None) -> Address:
    """The broker's address from the flag, the environment, or the defaults."""
    host = os.environ.get("HEADRACE_HOST") or os.environ.get("QB_SERVER_HOST") or "127.0.0.1"
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # where a broker listens everywhere
    port = os.environ.get("HEADRACE_PORT") or os.environ.get("QB_SERVER_PORT") or "9999"
    scheme = "tcp"
    if server:
        text = server
        if "://" in server:  # as the line says that "headrace serve" prints
            scheme, text = server.split("://", 1)
        host, colon, given = text.rpartition(":")
        host, port = (host.strip("[]"), given) if colon else (text, port)
    if scheme not in ("tcp", "tls"):
        raise InvalidArgument(f"{server!r} is not tcp:// or tls://; --server takes HOST:PORT")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{port!r} is not a port; --server takes HOST:PORT")
    return Address(host or "127.0.0.1", int(port), scheme == "tls")


def request_timeout() -> float:
    """From ``HEADRACE_REQUEST_TIMEOUT``, checked as ``headrace config`` checks it."""
    setting = BY_NAME["request_timeout"]
    given = os.environ.get("HEADRACE_REQUEST_TIMEOUT")
    try:
        return float(setting.default if given is None else setting.read(given))
    except ValueError as error:
        raise InvalidArgument(f"HEADRACE_REQUEST_TIMEOUT cannot be {given!r}: {error}") from None


@contextmanager
def connected(server: str | None, token: str | None, ca: str | None) -> Iterator[BrokerClient]:
    host, port, tls = address(server)
    try:
        client = BrokerClient(
            host,
            port,
            client_id=f"cli-{os.getpid()}",
            token=token,
            tls=tls,
            ca=ca,
            request_timeout=request_timeout(),
            delivery_timeout=min(request_timeout(), PUBLISH_S),
        )
    except OSError as error:
        raise InvalidArgument(f"the certificate {ca} cannot be used: {error}") from None
    client.connect()
    try:
        yield client
    finally:
        client.disconnect()


# --- printing -------------------------------------------------------------------------------------
def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def say(text: str) -> None:
    """One sentence on one line, however narrow the terminal: it may be read by a program."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_rows(rows: Iterable[Mapping[str, Any]], columns: dict[str, str], empty: str) -> None:
    """A table of some keys of each row; numbers to the right."""
    rows = list(rows)
    if not rows:
        say(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for key, title in columns.items():
        number = all(isinstance(row.get(key), int) for row in rows)
        table.add_column(title, justify="right" if number else "left", overflow="fold")
    for row in rows:
        # As Text: what users have written is never taken for markup.
        table.add_row(*[Text(_cell(row.get(key))) for key in columns])
    print_table(table)


def print_table(table: Table) -> None:
    """As wide as the terminal; into a pipe as wide as it needs to be, a row a line."""
    (console if console.is_terminal else Console(width=_PIPE_CHARS)).print(table)


_PIPE_CHARS = 10_000


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def when(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of(value: bytes, *, lines: bool = False) -> str:
    """A value for people: text as it is, other bytes as Python would show them.

    What cannot be printed is escaped: a message must not be able to steer the reader's terminal,
    and, unless ``lines`` are wanted, it stays on its line.
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return repr(value)
    if text.isprintable():
        return text
    kept = "\t\n" if lines else "\t"
    return "".join([c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text])


def message_line(message: Message) -> str:
    return f"{message.topic}/{message.partition}@{message.offset}  {text_of(message.value)}"


def print_message(message: Message, as_json: bool, document: Callable[[Message], Any]) -> None:
    """One line each, at once: the reader may be a pipe."""
    line = json.dumps(document(message), ensure_ascii=False) if as_json else message_line(message)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

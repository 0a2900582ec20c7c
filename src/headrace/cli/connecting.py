"""The options that commands share, and the connection to the broker."""

from __future__ import annotations

import getpass
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument
from headrace.settings import BY_NAME

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        envvar="HEADRACE_SERVER",
        help="The broker; prefix tls:// to use TLS.",
    ),
]
Token = Annotated[
    str | None, typer.Option("--token", envvar="HEADRACE_TOKEN", help="The broker's token.")
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", envvar="HEADRACE_CA", help="Use TLS and trust this certificate (PEM)."),
]
User = Annotated[
    str | None,
    typer.Option(
        "--user",
        envvar="HEADRACE_USER",
        help="Log in as this user. The password is in HEADRACE_PASSWORD, or asked for.",
    ),
]


def refusal(sentence: str) -> Callable[[str | None], None]:
    """The callback of a hidden option, which somebody may try: it says what to write instead."""

    def refuse(value: str | None) -> None:
        if value is not None:
            raise InvalidArgument(sentence)

    return refuse


NoPort = Annotated[
    str | None,
    typer.Option(
        "--port",
        "--host",
        hidden=True,
        callback=refusal("write the whole address of the broker: --server HOST:PORT"),
    ),
]
"""``serve`` has these two; a command of a client has one option for both."""
BROKER_OPTIONS: dict[str, Any] = {"server": Server, "token": Token, "ca": Ca, "user": User}
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
TopicOrWildcard = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic, or a wildcard such as 'orders.*'.")
]
Group = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.")]

Command = Callable[..., None]
PUBLISH_S = 5.0
"""How long a publish is retried, for example while a queue is full: a person waits for the answer."""


# --- options --------------------------------------------------------------------------------------
def with_options(
    argument: str,
    options: Mapping[str, Any],
    opened: Callable[..., AbstractContextManager[Any]],
) -> Callable[[Command], Command]:
    """Give a command further options, and the value made of them as its ``argument``.

    ``options`` maps names to annotations; all are None by default. ``opened`` takes them as keyword
    arguments; it is entered for the length of the command and yields the value.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        parameters = [
            each.replace(annotation=hints[name])
            for name, each in inspect.signature(command).parameters.items()
            if name != argument
        ]
        kind = inspect.Parameter.KEYWORD_ONLY
        for name, hint in options.items():
            parameters.append(inspect.Parameter(name, kind, default=None, annotation=hint))
        if "server" in options:
            parameters.append(inspect.Parameter("port", kind, default=None, annotation=NoPort))

        @wraps(command)
        def run(**given: Any) -> None:
            if "server" in options:
                given.pop("port", None)
            with opened(**{name: given.pop(name) for name in options}) as value:
                command(**given, **{argument: value})

        # typer reads the options of a command from these two.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def given_as(kind: Callable[..., Any]) -> Callable[..., AbstractContextManager[Any]]:
    """For ``with_options``: a value of this kind, which needs no closing."""
    return lambda **options: nullcontext(kind(**options))


class BrokerPlace(NamedTuple):
    """How the broker is reached."""

    server: str | None
    token: str | None
    ca: str | None
    user: str | None


with_broker_place = with_options("place", BROKER_OPTIONS, given_as(BrokerPlace))


def named_values(option: str, pairs: Iterable[str] | None, prefix: str = "") -> dict[str, str]:
    """The values of an option that takes NAME=VALUE and may be repeated."""
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.startswith(prefix):
            raise InvalidArgument(f"{option} takes {prefix}NAME=VALUE, not {pair!r}")
        found[name] = value
    return found


# --- the broker -----------------------------------------------------------------------------------
def request_timeout() -> float:
    """``HEADRACE_REQUEST_TIMEOUT``, checked as ``headrace config`` checks it."""
    setting = BY_NAME["request_timeout"]
    given = os.environ.get("HEADRACE_REQUEST_TIMEOUT")
    if given is None:
        return float(setting.default)
    return float(setting.read(given, "environment HEADRACE_REQUEST_TIMEOUT"))


@contextmanager
def connected(
    place: BrokerPlace,
    password: str | None = None,
    *,
    patience: float | None = None,
    delivery: float = PUBLISH_S,
) -> Iterator[BrokerClient]:
    """``patience``: the most seconds for one request, if somebody watches. ``delivery``: for a publish."""
    user = place.user
    if password is None:
        user, password = login_as(place.token, user)
    client = BrokerClient(
        place.server,
        client_id=f"cli-{os.getpid()}",
        token=place.token,
        user=user,
        password=password,
        ca=place.ca,
        request_timeout=min(request_timeout(), patience or request_timeout()),
        delivery_timeout=min(request_timeout(), delivery),
    )
    with client:
        yield client


def login_as(token: str | None, user: str | None) -> tuple[str | None, str | None]:
    """(user, password) to log in with; none of them if there is a token, which is the stronger one."""
    return (None, None) if token is not None or user is None else (user, password_of(user))


def password_of(user: str) -> str:
    """From the environment, or asked for. Never a flag: other users of the machine see flags."""
    found = os.environ.get("HEADRACE_PASSWORD")
    if found is None and sys.stdin.isatty():
        found = _ask_password(user)
    if found is None:
        raise InvalidArgument(f"set HEADRACE_PASSWORD to the password of {user}")
    return found


@cache
def _ask_password(user: str) -> str:
    """Once: a command may connect several times."""
    return getpass.getpass(f"Password of {user}: ")


with_client = with_options(
    "client", BROKER_OPTIONS, lambda **place: connected(BrokerPlace(**place))
)
"""Connect for the length of a command, which gets the client as its argument ``client``."""

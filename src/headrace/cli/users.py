"""``headrace users`` and ``headrace access``: users, their rights and their quotas.

Without ``--data`` a command asks the broker, as any client does. With it, the command changes the access
file of a data directory: this is how the first administrator is made. A broker that runs there takes the
change over within a second.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from headrace.access.directory import AccessDirectory
from headrace.cli.connecting import (
    BROKER_OPTIONS,
    BrokerPlace,
    connected,
    given_as,
    named_values,
    with_client,
    with_options,
)
from headrace.cli.printing import AsJson, print_each, print_json, print_listing, say
from headrace.cli.values import Yes, confirm
from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument
from headrace.operations.results import UserInfo

users = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
access = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="USER", help="The user.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Change this data directory, without asking a broker."
    ),
]
Grants = Annotated[
    list[str] | None,
    typer.Option(
        "--grant",
        metavar="RIGHTS:TOPICS[:NAMES]",
        help="A right, such as 'publish,consume:orders.>'; may be repeated.",
    ),
]
Admin = Annotated[bool, typer.Option("--admin", help="Make it an administrator of the broker.")]
Namespace = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace", metavar="PREFIX", help="Make it an administrator of this prefix: 'team.'."
    ),
]
Certificates = Annotated[
    list[str] | None,
    typer.Option("--certificate", help="A name in its client certificate; may be repeated."),
]


def quota_option(name: str, help: str) -> Any:
    return typer.Option(name, metavar="NAME=VALUE", help=help)


QuotaOptions = Annotated[
    list[str] | None, quota_option("--quota", "A quota, such as connections=100.")
]


@contextmanager
def administrated(data: Path | None, **broker: Any) -> Iterator[Any]:
    """The broker, or a data directory: both have the methods that the commands use."""
    if data is not None:
        yield AccessDirectory(data)
        return
    with connected(BrokerPlace(**broker)) as client:
        yield client


with_access = with_options("rules", {"data": Data, **BROKER_OPTIONS}, administrated)
"""Give a command the users and tokens of a broker or of a data directory, as its argument ``rules``."""


def quotas_of(option: str, pairs: Iterable[str] | None) -> dict[str, float | None] | None:
    if not pairs:
        return None
    found: dict[str, float | None] = {}
    for name, value in named_values(option, pairs).items():
        try:
            found[name] = None if value == "none" else float(value)
        except ValueError:
            raise InvalidArgument(f"{option} {name} takes a number, not {value!r}") from None
    return found


class Rights(NamedTuple):
    """The options that say what a user or a token may do, and how much."""

    grant: list[str] | None
    admin: bool
    quota: list[str] | None
    namespace: list[str] | None = None

    def grants(self) -> list[str] | None:
        """All grants that the options name; None if they name none."""
        found = list(self.grant or ())
        if self.admin:
            found.append("admin:>")
        for prefix in self.namespace or ():
            word = prefix.rstrip(".>").rstrip(".")
            found.append(f"admin:{word}.>:{word}.>")
        return found or None

    def quotas(self) -> dict[str, float | None] | None:
        return quotas_of("--quota", self.quota)


RIGHTS = {"grant": Grants, "admin": Admin, "quota": QuotaOptions}
with_rights = with_options("rights", {**RIGHTS, "namespace": Namespace}, given_as(Rights))


def new_password(user: str) -> str:
    """Asked for twice on a terminal; else the first line of the standard input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass(f"New password of {user}: ")
    if getpass.getpass("Again: ") != password:
        raise InvalidArgument("the two passwords differ")
    return password


@users.command()
@with_access
@with_rights
def add(
    rules: Any,
    name: Name,
    certificate: Certificates = None,
    no_password: Annotated[
        bool, typer.Option("--no-password", help="It logs in with tokens or certificates only.")
    ] = False,
    *,
    rights: Rights,
) -> None:
    """Add a user. The password is asked for, or read from the standard input.

    The rights are publish, consume, browse, manage, admin and metrics.

    \b
    Examples:
      headrace users add root --admin --data /var/lib/headrace
      headrace users add alice --grant 'publish,consume:orders.>'
      headrace users add team.lead --namespace team.
    """
    password = None if no_password else new_password(name)
    found = rules.create_user(
        name,
        password=password,
        grants=rights.grants(),
        certificates=certificate,
        quotas=rights.quotas(),
    )
    say(f"Added user {name} ({_rights(found['grants'])}).")


@users.command("list")
@with_access
def list_users(rules: Any, as_json: AsJson = False) -> None:
    """List the users and their rights."""
    print_each(as_json, rules.users(), _row, "No users yet.")


def _row(user: UserInfo) -> dict[str, Any]:
    return {
        "user": user["user"],
        "rights": _rights(user["grants"]),
        "password": user["has_password"],
        "certificates": ", ".join(user["certificates"]) or None,
        "tokens": ", ".join(user["tokens"]) or None,
        "disabled": user["disabled"],
    }


@users.command()
@with_access
@with_rights
def change(
    rules: Any,
    name: Name,
    no_grants: Annotated[bool, typer.Option("--no-grants", help="Take all rights away.")] = False,
    certificate: Certificates = None,
    password: Annotated[
        bool, typer.Option("--password", help="Set a new password (asked for, or from stdin).")
    ] = False,
    disable: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Whether it may log in.")
    ] = None,
    *,
    rights: Rights,
) -> None:
    """Change a user. Rights, certificates and quotas that are given replace the old ones.

    The change reaches open connections within a second.

    \b
    Examples:
      headrace users change alice --grant 'consume:orders.>'
      headrace users change alice --password
      headrace users change alice --disable
    """
    grants = [] if no_grants else rights.grants()
    if grants is None and not (certificate or rights.quota or password) and disable is None:
        raise InvalidArgument("nothing to change: give an option, see 'headrace users change -h'")
    found = rules.change_user(
        name,
        password=new_password(name) if password else None,
        grants=grants,
        certificates=certificate,
        quotas=rights.quotas(),
        disabled=disable,
    )
    say(f"Changed user {name} ({_rights(found['grants'])}).")


@users.command()
@with_access
def delete(rules: Any, name: Name, yes: Yes = False) -> None:
    """Delete a user and its tokens. Its connections end."""
    confirm(f"Delete user {name} and its tokens?", yes)
    rules.delete_user(name)
    say(f"Deleted user {name}.")


def _rights(grants: list[str]) -> str:
    return "; ".join(grants) or "no rights"


# --- your own rights, and quotas for all ------------------------------------------------------------
@access.command()
@with_client
def whoami(client: BrokerClient, as_json: AsJson = False) -> None:
    """Show your login and your rights."""
    found = client.whoami()
    if as_json:
        print_json(found)
        return
    say(found["name"])
    if found["administrator"]:
        say("may do everything")
    for grant in [] if found["administrator"] else found["grants"]:
        say(f"may {grant}")
    for name, value in found["quotas"].items():
        say(f"quota {name}={value:g}")


@access.command()
@with_client
def quotas(
    client: BrokerClient,
    address: Annotated[
        list[str] | None, quota_option("--address", "A quota of each address.")
    ] = None,
    default: Annotated[
        list[str] | None,
        quota_option("--default", "A quota of each user and token that has none of its own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the quotas of addresses and of all users, or replace them.

    \b
    Examples:
      headrace access quotas
      headrace access quotas --address connections=100 --default requests_per_second=1000
    """
    found = client.change_quotas(
        addresses=quotas_of("--address", address), default=quotas_of("--default", default)
    )
    rows = [
        {"for": who, "quota": name, "value": f"{value:g}"}
        for who, values in (("addresses", found["addresses"]), ("default", found["default"]))
        for name, value in values.items()
    ]
    print_listing(as_json, found, rows, ("for", "quota", "value"), "No quotas.")

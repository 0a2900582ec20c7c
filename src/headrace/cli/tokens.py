"""``headrace tokens``: tokens for programs, with rights of their own or for a user."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.connecting import given_as, with_options
from headrace.cli.printing import AsJson, complain, print_each, print_json, say, visible, when
from headrace.cli.users import RIGHTS, Rights, with_access
from headrace.cli.values import Yes, confirm
from headrace.errors import InvalidArgument
from headrace.operations.arguments import expiry_ms
from headrace.operations.results import TokenInfo

tokens = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="TOKEN", help="The name of the token.")]


@tokens.command()
@with_access
@with_options("rights", RIGHTS, given_as(Rights))
def create(
    rules: Any,
    name: Name,
    for_user: Annotated[
        str | None, typer.Option("--for", metavar="USER", help="Give it the rights of this user.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 90d, 12h, or a time. Default: never.")
    ] = None,
    as_json: AsJson = False,
    *,
    rights: Rights,
) -> None:
    """Create a token. Its secret is printed only once.

    To replace a token without an interruption, create another one, give it to the programs, and
    revoke the old one.

    \b
    Examples:
      headrace tokens create ci --grant 'publish:builds.>' --expires 90d
      headrace tokens create laptop --for alice
    """
    if not (rights.grant or rights.admin or for_user):
        raise InvalidArgument("a token needs rights: give --grant, --admin, or --for USER")
    found = rules.create_token(
        name,
        user=for_user,
        grants=rights.grants(),
        expires=None if expires is None else expiry_ms(expires),
        quotas=rights.quotas(),
    )
    if as_json:
        print_json(found)
        return
    complain(f"Created token {name}. Keep the secret: it is not shown again.")
    print(visible(found["secret"]), flush=True)


@tokens.command("list")
@with_access
def list_tokens(rules: Any, as_json: AsJson = False) -> None:
    """List the tokens and their rights."""
    print_each(as_json, rules.tokens(), _row, "No tokens yet.")


def _row(token: TokenInfo) -> dict[str, Any]:
    user, expires = token["user"], token["expires"]
    return {
        "token": token["token"],
        "rights": f"user {user}" if user else "; ".join(token["grants"]),
        "created": when(token["created"]),
        "expires": "never" if expires is None else when(expires),
        "expired": token["expired"],
    }


@tokens.command()
@with_access
def revoke(rules: Any, name: Name, yes: Yes = False) -> None:
    """Revoke a token. Connections that logged in with it end within a second."""
    confirm(f"Revoke token {name}?", yes)
    rules.revoke_token(name)
    say(f"Revoked token {name}.")

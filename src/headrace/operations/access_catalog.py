"""The operations about users, tokens and quotas: a part of ``catalog.py``."""

from __future__ import annotations

from headrace.operations.arguments import (
    CertificateNames,
    ExistingToken,
    ExistingUser,
    Expiry,
    GrantList,
    Password,
    PrincipalName,
    QuotaValues,
)
from headrace.operations.declaring import deletion, operation, route
from headrace.operations.results import CallerInfo, NewToken, QuotaInfo, TokenInfo, UserInfo

_REFUSED_RULES = (
    "grant_exceeded",
    "no_administrator",
    "invalid_grant",
    "invalid_password",
    "certificate_taken",
)


class AccessOperations:
    """Who may do what."""

    @operation(permission="none")
    @route("GET", "/access/whoami", "Show your own rights")
    async def whoami(self) -> CallerInfo:
        """Who the broker thinks you are, and what you may do.

        Example::

            print((await client.whoami())["name"])
        """

    @operation(permission="admin")
    @route("GET", "/access/users", "List users")
    async def users(self) -> list[UserInfo]:
        """The users that you may administer, by name.

        Example::

            for user in await client.users():
                print(user["user"])
        """

    @operation(
        permission="admin", about="user", repeatable=False, errors=("user_exists", *_REFUSED_RULES)
    )
    @route("POST", "/access/users/{user}", "Create a user")
    async def create_user(
        self,
        user: PrincipalName,
        *,
        password: Password | None = None,
        grants: GrantList | None = None,
        certificates: CertificateNames | None = None,
        quotas: QuotaValues | None = None,
    ) -> UserInfo:
        """Create a user. Without a password it logs in with tokens or certificates.

        A grant is ``RIGHTS:TOPICS`` or ``RIGHTS:TOPICS:NAMES``, each a list with commas.

        Example::

            await client.create_user("alice", password=secret, grants=["publish,consume:orders.>"])
        """

    @operation(permission="admin", about="user", errors=_REFUSED_RULES)
    @route("PATCH", "/access/users/{user}", "Change a user")
    async def change_user(
        self,
        user: ExistingUser,
        *,
        password: Password | None = None,
        grants: GrantList | None = None,
        certificates: CertificateNames | None = None,
        quotas: QuotaValues | None = None,
        disabled: bool | None = None,
    ) -> UserInfo:
        """Change what is given; a list replaces the old one.

        It takes effect within a second, also for open connections. A new password ends the connections
        that logged in with the old one.

        Example::

            await client.change_user("alice", grants=["consume:orders.>"])
        """

    @deletion(permission="admin", about="user", errors=("no_administrator",))
    @route("DELETE", "/access/users/{user}", "Delete a user")
    async def delete_user(self, user: ExistingUser) -> None:
        """Delete a user and its tokens. Its connections end.

        Example::

            await client.delete_user("alice")
        """

    @operation(permission="admin")
    @route("GET", "/access/tokens", "List tokens")
    async def tokens(self) -> list[TokenInfo]:
        """The tokens that you may administer, by name. The secrets are not known to the broker.

        Example::

            for token in await client.tokens():
                print(token["token"])
        """

    @operation(
        permission="admin",
        about="token",
        repeatable=False,
        errors=("token_exists", "user_not_found", "grant_exceeded", "no_administrator"),
    )
    @route("POST", "/access/tokens/{token}", "Create a token")
    async def create_token(
        self,
        token: PrincipalName,
        *,
        user: PrincipalName | None = None,
        grants: GrantList | None = None,
        expires: Expiry | None = None,
        quotas: QuotaValues | None = None,
    ) -> NewToken:
        """Create a token, with rights of its own or for a user. The secret is shown only in this answer.

        Example::

            await client.create_token("ci", grants=["publish:builds.>"], expires=datetime(2027, 1, 1))
        """

    @deletion(permission="admin", about="token", answer="revoked", errors=("no_administrator",))
    @route("DELETE", "/access/tokens/{token}", "Revoke a token")
    async def revoke_token(self, token: ExistingToken) -> None:
        """Revoke a token. Connections that logged in with it end.

        Example::

            await client.revoke_token("ci")
        """

    @operation(permission="admin")
    @route("PATCH", "/access/quotas", "Change the quotas of addresses and principals")
    async def change_quotas(
        self, *, addresses: QuotaValues | None = None, default: QuotaValues | None = None
    ) -> QuotaInfo:
        """The quotas of each address, and of each principal that has none of its own.

        What is given replaces the old quotas; without arguments they are only shown.

        Example::

            await client.change_quotas(default={"connections": 100})
        """

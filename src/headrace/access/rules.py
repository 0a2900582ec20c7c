"""What the access file says: users, tokens and quotas, as data.

Everything is a frozen struct that msgspec reads strictly: an unknown field, a wrong type or a value out
of bounds is an error, never a default.

A *user* has rights, and logs in with a password, with certificates, or with tokens that were made for it.
A *token* has rights of its own, or acts as a user. Both are principals: quotas, the audit and the owner of
a subscription name them as ``user:alice`` and ``token:ci``.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from headrace import limits
from headrace.access.rights import Grant
from headrace.errors import InvalidArgument
from headrace.model import check_principal_name

PRINCIPALS_MAX = 100_000

Grants = Annotated[tuple[Grant, ...], Meta(max_length=limits.GRANTS_MAX)]
Certificate = Annotated[str, Meta(min_length=1, max_length=255)]
_Count = Annotated[int, Meta(ge=0, le=limits.OFFSET_MAX)]
_Rate = Annotated[float, Meta(gt=0, le=1e15)]


class Quotas(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Bounds for one principal, or for one address; None: no bound."""

    connections: _Count | None = None
    topics: _Count | None = None
    """That it created."""
    partitions: _Count | None = None
    """Of the topics that it created."""
    subscriptions: _Count | None = None
    """That it created."""
    bytes_per_second: _Rate | None = None
    """That it sends and gets."""
    requests_per_second: _Rate | None = None
    memory: _Count | None = None
    """Bytes of its large requests that are not answered yet, and of answers that it does not read."""

    def is_within(self, held: Quotas) -> bool:
        """Whether no bound is wider than the one that is held."""
        pairs = ((getattr(self, name), getattr(held, name)) for name in QUOTAS)
        return all(bound is None or (mine is not None and mine <= bound) for mine, bound in pairs)

    def or_else(self, other: Quotas) -> Quotas:
        """These bounds, and those of ``other`` where these have none."""
        return Quotas(
            **{
                name: getattr(other, name) if getattr(self, name) is None else getattr(self, name)
                for name in QUOTAS
            }
        )


QUOTAS = tuple(get_type_hints(Quotas))


class User(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    name: str
    created: int
    password: str | None = None
    """An argon2 hash."""
    certificates: tuple[Certificate, ...] = ()
    """Names in client certificates that log in as this user."""
    grants: Grants = ()
    quotas: Quotas = Quotas()
    disabled: bool = False


class AccessToken(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    name: str
    created: int
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    user: str | None = None
    """The user it acts as; then it has no rights of its own."""
    expires: int | None = None
    """Milliseconds since 1970."""
    grants: Grants = ()
    quotas: Quotas = Quotas()


class AccessRules(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """The whole file. It is replaced as a whole, never changed."""

    version: int = 0
    """Grows with each change."""
    key: str = ""
    """Random: the broker seals with it what it hands out and takes back (``AccessControl.seal``)."""
    users: tuple[User, ...] = ()
    tokens: tuple[AccessToken, ...] = ()
    addresses: Quotas = Quotas()
    """Of each address."""
    default: Quotas = Quotas()
    """Of each principal, where it has no bound of its own."""

    def check(self) -> AccessRules:
        """Itself, or :class:`InvalidArgument`: what types and bounds cannot say."""
        if len(self.users) + len(self.tokens) > PRINCIPALS_MAX:
            raise InvalidArgument(
                f"at most {PRINCIPALS_MAX} users and tokens", code="too_many_principals"
            )
        for principals in (self.users, self.tokens):
            names = [check_principal_name(each.name) for each in principals]
            if len(set(names)) < len(names):
                raise InvalidArgument("a name occurs twice", code="invalid_access")
        users = {user.name for user in self.users}
        owners: dict[str, str] = {}
        for user in self.users:
            for certificate in user.certificates:
                other = owners.setdefault(certificate, user.name)
                if other != user.name:
                    raise InvalidArgument(
                        f"the certificate name {certificate!r} belongs to user {other!r} already",
                        code="certificate_taken",
                    )
            for grant in user.grants:
                grant.check()
        for token in self.tokens:
            if token.user is not None and (token.user not in users or token.grants):
                raise InvalidArgument(
                    f"token {token.name!r} acts as a user that does not exist, or has rights of its "
                    "own besides",
                    code="invalid_access",
                )
            for grant in token.grants:
                grant.check()
        return self

    @property
    def has_administrator(self) -> bool:
        """Whether anybody could still change these rules for good: a user, or a token without end."""
        whole = {u.name for u in self.users if not u.disabled and any(g.is_whole for g in u.grants)}
        can_log_in = {u.name for u in self.users if u.password or u.certificates}
        return bool(whole & can_log_in) or any(
            token.expires is None
            and (token.user in whole or any(grant.is_whole for grant in token.grants))
            for token in self.tokens
        )

    def user(self, name: str) -> User | None:
        return next((user for user in self.users if user.name == name), None)

    def token(self, name: str) -> AccessToken | None:
        return next((token for token in self.tokens if token.name == name), None)

    def but(self, **changes: Any) -> AccessRules:
        key = self.key or secrets.token_hex(32)
        return msgspec.structs.replace(self, version=self.version + 1, key=key, **changes).check()

    def with_user(self, user: User) -> AccessRules:
        return self.but(users=(*(u for u in self.users if u.name != user.name), user))

    def without_user(self, name: str) -> AccessRules:
        """Its tokens go with it."""
        return self.but(
            users=tuple(user for user in self.users if user.name != name),
            tokens=tuple(token for token in self.tokens if token.user != name),
        )

    def with_token(self, token: AccessToken) -> AccessRules:
        return self.but(tokens=(*(t for t in self.tokens if t.name != token.name), token))

    def without_token(self, name: str) -> AccessRules:
        return self.but(tokens=tuple(token for token in self.tokens if token.name != name))

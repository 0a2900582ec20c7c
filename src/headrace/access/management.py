"""Changes of the rules: pure functions from rules to rules, with the authority of whoever asks.

Rules:
- An administrator of the broker may change everything. An administrator of a namespace (``admin`` over
  ``team.>``) may change users and tokens whose names are in it, as long as these have no more than it has
  itself, and never gives more than it has: neither rights nor quotas. Certificates are for
  administrators of the broker alone: their names belong to nobody's namespace.
- A change that leaves nobody who could undo it is refused, unless the broker has a token in its settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import msgspec

from headrace.access.caller import Caller
from headrace.access.rights import (
    EVERYTHING,
    Grant,
    grant_text,
    is_allowed,
    is_within,
    parse_grant,
)
from headrace.access.rules import QUOTAS, AccessRules, AccessToken, Quotas, User
from headrace.checking import check
from headrace.errors import Conflict, Forbidden, InvalidArgument, NotFound

Principal = TypeVar("Principal")


class UserFields(TypedDict, total=False):
    """What a user has besides its password. None: nothing for a new user, no change for another."""

    grants: Iterable[str] | None
    certificates: Iterable[str] | None
    quotas: Mapping[str, float | None] | None


class TokenFields(TypedDict, total=False):
    user: str | None
    grants: Iterable[str] | None
    expires: int | None
    quotas: Mapping[str, float | None] | None


class Authority(NamedTuple):
    """Whoever asks for a change, as it was when it asked."""

    name: str
    unlimited: bool
    grants: tuple[Grant, ...]
    quotas: Quotas
    needs_administrator: bool
    """There is no token in the settings, so the rules themselves must have an administrator."""

    @classmethod
    def of(cls, caller: Caller, *, has_setting: bool) -> Authority:
        return cls(caller.name, caller.unlimited, caller.grants, caller.quotas, not has_setting)

    # --- what it may do -----------------------------------------------------------------------
    def may_administer(self, name: str, grants: Iterable[Grant] = ()) -> bool:
        """Whether it may see and change a principal of this name that has these grants."""
        return self.unlimited or (
            is_allowed(self.grants, "admin", name=name)
            and all(is_within(grant, self.grants) for grant in grants)
        )

    def need(self, name: str, grants: Iterable[Grant] = ()) -> None:
        if not self.may_administer(name, grants):
            raise Forbidden(
                f"{self.name} may not administer {name!r}: it is outside of its namespace, or has more "
                "rights than it has itself"
            )

    def given(self, texts: Iterable[str]) -> tuple[Grant, ...]:
        """The grants that it gives; never more than it has."""
        grants = tuple(self._narrowed(parse_grant(text)) for text in texts)
        for grant in grants:
            if not self.unlimited and not is_within(grant, self.grants):
                raise Forbidden(
                    f"{self.name} cannot grant {grant_text(grant)}: it does not have that itself",
                    code="grant_exceeded",
                )
        return grants

    def _narrowed(self, grant: Grant) -> Grant:
        """A grant over all names, given inside of a namespace, is one over the names of it."""
        if self.unlimited or grant.names != (EVERYTHING,):
            return grant
        for mine in self.grants:
            narrow = Grant(grant.rights, grant.topics, mine.names)
            if "admin" in mine.rights and is_within(narrow, (mine,)):
                return narrow
        return grant

    def bounded(self, quotas: Quotas) -> Quotas:
        if self.unlimited:
            return quotas
        quotas = quotas.or_else(self.quotas)
        if not quotas.is_within(self.quotas):
            raise Forbidden(
                f"{self.name} cannot give a larger quota than its own", code="grant_exceeded"
            )
        return quotas


def parse_quotas(values: Mapping[str, float | None]) -> Quotas:
    for name in values:
        if name not in QUOTAS:
            raise InvalidArgument(
                f"there is no quota {name[:40]!r}; the quotas are {', '.join(QUOTAS)}",
                code="invalid_quota",
            )
    found: Quotas = check("quotas", dict(values), Quotas, code="invalid_quota", strict=False)
    return found


def quota_values(quotas: Quotas) -> dict[str, float]:
    values = {name: getattr(quotas, name) for name in QUOTAS}
    return {name: value for name, value in values.items() if value is not None}


def user_info(rules: AccessRules, user: User) -> dict[str, Any]:
    """A user as operations and commands show it."""
    return {
        "user": user.name,
        "created": user.created,
        "grants": [grant_text(grant) for grant in user.grants],
        "quotas": quota_values(user.quotas),
        "has_password": user.password is not None,
        "certificates": list(user.certificates),
        "tokens": [token.name for token in rules.tokens if token.user == user.name],
        "disabled": user.disabled,
    }


def token_info(token: AccessToken, now_ms: int) -> dict[str, Any]:
    return {
        "token": token.name,
        "user": token.user,
        "created": token.created,
        "expires": token.expires,
        "expired": token.expires is not None and token.expires <= now_ms,
        "grants": [grant_text(grant) for grant in token.grants],
        "quotas": quota_values(token.quotas),
    }


def users(rules: AccessRules, by: Authority) -> list[dict[str, Any]]:
    """The users that it may administer, by name."""
    found = [user for user in rules.users if by.may_administer(user.name, user.grants)]
    return [user_info(rules, user) for user in sorted(found, key=lambda user: user.name)]


def tokens(rules: AccessRules, by: Authority, now_ms: int) -> list[dict[str, Any]]:
    found = [
        token for token in rules.tokens if by.may_administer(token.name, token_grants(rules, token))
    ]
    return [token_info(token, now_ms) for token in sorted(found, key=lambda token: token.name)]


# --- users ------------------------------------------------------------------------------------------
def create_user(
    rules: AccessRules,
    by: Authority,
    name: str,
    *,
    now_ms: int,
    password: str | None = None,
    **given: Unpack[UserFields],
) -> AccessRules:
    """``password`` is its hash."""
    by.need(name)
    if rules.user(name) is not None:
        raise Conflict(f"there is a user {name!r} already; change it", code="user_exists")
    certificates = given.get("certificates") or ()
    _check_certificates(by, certificates)
    user = User(
        name=name,
        created=now_ms,
        password=password,
        certificates=tuple(certificates),
        grants=by.given(given.get("grants") or ()),
        quotas=by.bounded(parse_quotas(given.get("quotas") or {})),
    )
    return _kept(by, rules.with_user(user))


def change_user(
    rules: AccessRules,
    by: Authority,
    name: str,
    *,
    password: str | None = None,
    disabled: bool | None = None,
    **given: Unpack[UserFields],
) -> AccessRules:
    user = _user(rules, by, name)
    grants, certificates = given.get("grants"), given.get("certificates")
    quotas = given.get("quotas")
    _check_certificates(by, certificates)
    changed = msgspec.structs.replace(
        user,
        password=user.password if password is None else password,
        grants=user.grants if grants is None else by.given(grants),
        certificates=user.certificates if certificates is None else tuple(certificates),
        quotas=user.quotas if quotas is None else by.bounded(parse_quotas(quotas)),
        disabled=user.disabled if disabled is None else disabled,
    )
    return _kept(by, rules.with_user(changed))


def delete_user(rules: AccessRules, by: Authority, name: str) -> AccessRules:
    _user(rules, by, name)
    return _kept(by, rules.without_user(name))


def _user(rules: AccessRules, by: Authority, name: str) -> User:
    user = _known(
        by, name, rules.user(name), NotFound(f"there is no user {name!r}", code="user_not_found")
    )
    by.need(name, user.grants)
    return user


def _check_certificates(by: Authority, certificates: Iterable[str] | None) -> None:
    if certificates and not by.unlimited:
        raise Forbidden("only an administrator of the broker may map certificates to users")


# --- tokens -----------------------------------------------------------------------------------------
def create_token(
    rules: AccessRules,
    by: Authority,
    name: str,
    *,
    now_ms: int,
    sha256: str,
    **fields: Unpack[TokenFields],
) -> AccessRules:
    by.need(name)
    if rules.token(name) is not None:
        raise Conflict(
            f"there is a token {name!r} already; revoke it, or choose another name",
            code="token_exists",
        )
    user, expires = fields.get("user"), fields.get("expires")
    given = tuple(fields.get("grants") or ())
    if user is not None:
        _user(rules, by, user)
        if given:
            raise InvalidArgument("a token for a user has the rights of the user: give no grants")
    if expires is not None and expires <= now_ms:
        raise InvalidArgument("the token would have expired already", code="invalid_expiry")
    token = AccessToken(
        name=name,
        created=now_ms,
        sha256=sha256,
        user=user,
        expires=expires,
        grants=by.given(given),
        quotas=by.bounded(parse_quotas(fields.get("quotas") or {})),
    )
    return _kept(by, rules.with_token(token))


def revoke_token(rules: AccessRules, by: Authority, name: str) -> AccessRules:
    token = _known(
        by, name, rules.token(name), NotFound(f"there is no token {name!r}", code="token_not_found")
    )
    by.need(name, token_grants(rules, token))
    return _kept(by, rules.without_token(name))


def token_grants(rules: AccessRules, token: AccessToken) -> tuple[Grant, ...]:
    """The rights it has, its own or its user's."""
    user = None if token.user is None else rules.user(token.user)
    return token.grants if user is None else user.grants


# --- quotas -----------------------------------------------------------------------------------------
def change_quotas(
    rules: AccessRules,
    by: Authority,
    *,
    addresses: Mapping[str, float | None] | None = None,
    default: Mapping[str, float | None] | None = None,
) -> AccessRules:
    if not by.unlimited:
        raise Forbidden("only an administrator of the broker may change these quotas")
    return rules.but(
        addresses=rules.addresses if addresses is None else parse_quotas(addresses),
        default=rules.default if default is None else parse_quotas(default),
    )


def _known(by: Authority, name: str, found: Principal | None, missing: NotFound) -> Principal:
    if found is None:
        by.need(name)
        raise missing
    return found


def _kept(by: Authority, rules: AccessRules) -> AccessRules:
    if by.needs_administrator and not rules.has_administrator:
        raise Conflict(
            "after this nobody could administer the broker: the first user must be an administrator "
            "(grant admin:>) that can log in, and the last one must stay",
            code="no_administrator",
        )
    return rules

"""The users and tokens of a data directory, without a broker: for the first administrator, and in need.

Whoever can write the directory may do everything with it, so this is an administrator. The methods are
those of a client. A broker that runs on the directory takes a change over within a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.access import management
from headrace.access.caller import OWNER
from headrace.access.file import AccessFile, Change
from headrace.access.hashing import hash_password, new_token, token_hash
from headrace.access.management import Authority
from headrace.access.rules import AccessRules
from headrace.clock import Clock

QuotaMap = Mapping[str, float | None]


class AccessDirectory:
    def __init__(self, data_dir: Path, clock: Clock | None = None):
        self._file = AccessFile(data_dir)
        self._clock = clock or Clock()
        self._by = Authority.of(OWNER, has_setting=False)

    def _change(self, change: Change) -> AccessRules:
        return self._file.change(change)

    def _rules(self) -> AccessRules:
        return self._file.read() or AccessRules()

    def users(self) -> list[dict[str, Any]]:
        return management.users(self._rules(), self._by)

    def create_user(
        self,
        user: str,
        *,
        password: str | None = None,
        grants: Iterable[str] | None = None,
        certificates: Iterable[str] | None = None,
        quotas: QuotaMap | None = None,
    ) -> dict[str, Any]:
        hashed = None if password is None else hash_password(password)
        rules = self._change(
            lambda rules: management.create_user(
                rules,
                self._by,
                user,
                now_ms=self._clock.now_ms(),
                password=hashed,
                grants=grants or (),
                certificates=certificates or (),
                quotas=quotas,
            )
        )
        return self._user(rules, user)

    def change_user(
        self,
        user: str,
        *,
        password: str | None = None,
        grants: Iterable[str] | None = None,
        certificates: Iterable[str] | None = None,
        quotas: QuotaMap | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        hashed = None if password is None else hash_password(password)
        rules = self._change(
            lambda rules: management.change_user(
                rules,
                self._by,
                user,
                password=hashed,
                grants=grants,
                certificates=certificates,
                quotas=quotas,
                disabled=disabled,
            )
        )
        return self._user(rules, user)

    @staticmethod
    def _user(rules: AccessRules, name: str) -> dict[str, Any]:
        found = rules.user(name)
        assert found is not None
        return management.user_info(rules, found)

    def delete_user(self, user: str) -> None:
        self._change(lambda rules: management.delete_user(rules, self._by, user))

    def tokens(self) -> list[dict[str, Any]]:
        return management.tokens(self._rules(), self._by, self._clock.now_ms())

    def create_token(
        self,
        token: str,
        *,
        user: str | None = None,
        grants: Iterable[str] | None = None,
        expires: int | None = None,
        quotas: QuotaMap | None = None,
    ) -> dict[str, Any]:
        secret = new_token()
        rules = self._change(
            lambda rules: management.create_token(
                rules,
                self._by,
                token,
                now_ms=self._clock.now_ms(),
                sha256=token_hash(secret),
                user=user,
                grants=grants or (),
                expires=expires,
                quotas=quotas,
            )
        )
        made = rules.token(token)
        assert made is not None
        return {**management.token_info(made, self._clock.now_ms()), "secret": secret}

    def revoke_token(self, token: str) -> None:
        self._change(lambda rules: management.revoke_token(rules, self._by, token))

"""The users and tokens of a data directory, without a broker: for the first administrator, and in need.

Whoever can write the directory may do everything with it, so this is an administrator. The methods are
those of a client. A broker that runs on the directory takes a change over within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from headrace.access import management
from headrace.access.caller import OWNER
from headrace.access.file import AccessFile
from headrace.access.hashing import hash_password, new_token, token_hash
from headrace.access.management import Authority, TokenFields, UserFields
from headrace.access.rules import AccessRules
from headrace.clock import Clock


class AccessDirectory:
    def __init__(self, data_dir: Path, clock: Clock | None = None):
        self._file = AccessFile(data_dir)
        self._clock = clock or Clock()
        self._by = Authority.of(OWNER, has_setting=False)

    def _change(self, change: Callable[..., AccessRules], *args: Any, **given: Any) -> AccessRules:
        return self._file.change(lambda rules: change(rules, self._by, *args, **given))

    def _rules(self) -> AccessRules:
        return self._file.read() or AccessRules()

    def users(self) -> list[dict[str, Any]]:
        return management.users(self._rules(), self._by)

    def create_user(
        self, user: str, *, password: str | None = None, **given: Unpack[UserFields]
    ) -> dict[str, Any]:
        hashed = None if password is None else hash_password(password)
        now = self._clock.now_ms()
        create = management.create_user
        return self._user(self._change(create, user, now_ms=now, password=hashed, **given), user)

    def change_user(
        self,
        user: str,
        *,
        password: str | None = None,
        disabled: bool | None = None,
        **given: Unpack[UserFields],
    ) -> dict[str, Any]:
        hashed = None if password is None else hash_password(password)
        change = management.change_user
        rules = self._change(change, user, password=hashed, disabled=disabled, **given)
        return self._user(rules, user)

    @staticmethod
    def _user(rules: AccessRules, name: str) -> dict[str, Any]:
        found = rules.user(name)
        assert found is not None
        return management.user_info(rules, found)

    def delete_user(self, user: str) -> None:
        self._change(management.delete_user, user)

    def tokens(self) -> list[dict[str, Any]]:
        return management.tokens(self._rules(), self._by, self._clock.now_ms())

    def create_token(self, token: str, **given: Unpack[TokenFields]) -> dict[str, Any]:
        secret = new_token()
        now, sha256 = self._clock.now_ms(), token_hash(secret)
        rules = self._change(management.create_token, token, now_ms=now, sha256=sha256, **given)
        made = rules.token(token)
        assert made is not None
        return {**management.token_info(made, now), "secret": secret}

    def revoke_token(self, token: str) -> None:
        self._change(management.revoke_token, token)

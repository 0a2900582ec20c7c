"""Logging in, for every protocol: a token, a user with a password, or a client certificate.

A login that needs no waiting is done at once (``at_once``): a token that the broker made, a password that
was right before. All others are ``check``ed in a task: a password is hashed in a thread, and a client that
has failed too often waits for its turn (``access/guessing.py``).

Failures are counted, recorded in the audit, and logged, at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.access.caller import Caller
from headrace.access.control import SETTING
from headrace.access.guessing import Guesses
from headrace.broker.engine import Engine
from headrace.errors import InvalidArgument, QueueFull, Unauthenticated

logger = logging.getLogger("headrace.server")
LOGGED_EVERY_S = 1.0


class Credentials(NamedTuple):
    """What a client shows: a token, or a user and a password."""

    token: str = ""
    user: str | None = None
    password: str = ""

    @classmethod
    def of_words(cls, words: list[str]) -> Credentials:
        """``AUTH <token>``, ``AUTH <user> <password>``."""
        if len(words) == 1:
            return cls(words[0])
        if len(words) == 2:
            return cls(user=words[0], password=words[1])
        raise InvalidArgument("it is AUTH <token> or AUTH <user> <password>", code="bad_command")

    @classmethod
    def of_properties(cls, properties: Mapping[str, str]) -> Credentials:
        if "user" in properties:
            return cls(user=properties["user"], password=properties.get("password", ""))
        if not properties.get("token"):
            raise InvalidArgument("the property 'token' is missing", code="missing_property")
        return cls(properties["token"])


class Logins:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._access = engine.access
        self.guesses = Guesses(engine.time)
        self.failed = 0
        self.delayed = 0
        self.refused = 0
        """Logins that were not even looked at: too many had failed before."""
        self._logged_at = float("-inf")
        self._unlogged = 0

    def at_once(self, peer: str, address: str, credentials: Credentials) -> Caller | None:
        """Who it is, if that can be told without waiting; None: ``check`` it.

        :class:`Unauthenticated` if the secret is wrong.
        """
        access = self._access
        if credentials.user is not None:
            if not self.guesses.is_free(address, credentials.user):
                return None
            return access.by_known_password(credentials.user, credentials.password)
        caller = access.by_token(credentials.token)
        if caller is not None and caller.name != SETTING:
            return caller
        # The token of the settings may be weak enough to be guessed.
        if not self.guesses.is_free(address):
            return None
        if caller is None:
            raise self._failed(peer, address, None)
        return caller

    async def check(self, peer: str, address: str, credentials: Credentials) -> Caller:
        """Who it is; :class:`Unauthenticated` if the secret is wrong."""
        user = credentials.user
        try:
            wait = self.guesses.turn(address, user)
        except QueueFull:
            self.refused += 1
            self._record(peer, user, "too_many_attempts")
            self._log(peer, user)
            raise
        if wait > 0:
            self.delayed += 1
            await asyncio.sleep(wait)
        if user is None:
            caller = self._access.by_token(credentials.token)
        else:
            caller = await self._access.by_password(user, credentials.password)
        if caller is None:
            raise self._failed(peer, address, user)
        return caller

    def _failed(self, peer: str, address: str, user: str | None) -> Unauthenticated:
        self.failed += 1
        self.guesses.failed(address, user)
        self._record(peer, user, "unauthenticated")
        self._log(peer, user)
        return Unauthenticated("wrong token" if user is None else "wrong user or password")

    def _record(self, peer: str, user: str | None, outcome: str) -> None:
        who = "unknown" if user is None else f"user:{user[:200]}"
        self._engine.audit.record(who, peer, "login", outcome)

    def _log(self, peer: str, user: str | None) -> None:
        now = self._engine.time()
        if now - self._logged_at < LOGGED_EVERY_S:
            self._unlogged += 1
            return
        more = f", and {self._unlogged} others before" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        what = "with a token" if user is None else f"as user {user[:80]!r}"
        logger.warning("failed login from %s %s%s", peer, what, more)


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """The names in a client's certificate, the alternative names before the common name."""
    if not certificate:
        return []
    found = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    for part in certificate.get("subject", ()):
        found += [str(value) for kind, value in part if kind == "commonName"]
    return found


_KINDS = ("DNS", "URI", "email")

"""Logging in, for every protocol: a token, a user with a password, or a client certificate.

A login that needs no waiting is done at once (``at_once``): a token that the broker made, a password that
was right before. All others are ``check``ed in a task: a password is hashed in a thread, and a client that
has failed too often waits for its turn (``access/guessing.py``).

Failures are counted, recorded in the audit, and logged once for each address (``refusals.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.access.caller import Caller
from headrace.access.control import SETTING
from headrace.access.guessing import Guesses
from headrace.broker.audit import LOGIN, Source
from headrace.broker.engine import Engine
from headrace.errors import InvalidArgument, QueueFull, StorageFailed, Unauthenticated
from headrace.server.refusals import Refusals


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
        self.refusals = Refusals(engine.time)

    def at_once(self, source: Source, credentials: Credentials) -> Caller | None:
        """Who it is, if that can be told without waiting; None: ``check`` it.

        :class:`Unauthenticated` if the secret is wrong. In a cluster, another node may have made it just now.
        """
        access = self._access
        if credentials.user is not None:
            if not self.guesses.is_free(source.address, credentials.user):
                return None
            return access.by_known_password(credentials.user, credentials.password)
        caller = access.by_token(credentials.token)
        if caller is not None and caller.name != SETTING:
            return caller
        # The token of the settings may be weak enough to be guessed.
        if not self.guesses.is_free(source.address):
            return None
        if caller is None and self._engine.cluster is None:
            raise self.wrong(source, None)
        return caller

    async def check(self, source: Source, credentials: Credentials) -> Caller:
        """Who it is; :class:`Unauthenticated` if the secret is wrong."""
        user = credentials.user
        try:
            wait = self.guesses.turn(source.address, user)
        except QueueFull:
            self.refused += 1
            self._note(source, user, "too_many_attempts")
            raise
        if wait > 0:
            self.delayed += 1
            await asyncio.sleep(wait)
        caller, cluster = await self._find(credentials), self._engine.cluster
        if caller is None and cluster is not None:  # another node may have changed the rules
            self.guesses.failed(source.address, user)  # already now: nobody guesses while we wait
            before = self._access.rules
            with contextlib.suppress(StorageFailed):  # Kafka is away: what is known counts
                await cluster.fresh()
            if self._access.rules is not before:
                caller = await self._find(credentials)
        if caller is None:
            raise self.wrong(source, user, counted=cluster is not None)
        return caller

    async def _find(self, credentials: Credentials) -> Caller | None:
        if credentials.user is None:
            return self._access.by_token(credentials.token)
        return await self._access.by_password(credentials.user, credentials.password)

    def wrong(self, source: Source, user: str | None, *, counted: bool = False) -> Unauthenticated:
        """Count and record a wrong secret. The error is what to answer."""
        self.failed += 1
        if not counted:
            self.guesses.failed(source.address, user)
        self._note(source, user, "unauthenticated")
        return Unauthenticated("wrong token" if user is None else "wrong user or password")

    def _note(self, source: Source, user: str | None, outcome: str) -> None:
        who = "unknown" if user is None else f"user:{user[:200]}"
        self._engine.audit.record(who, source, LOGIN, outcome)
        text = (
            "failed login with a token: it is neither the one of the setting 'token' nor one that "
            "'headrace tokens list' names"
            if user is None
            else f"failed login as user {user[:80]!r}: there is no such user, or the password is wrong; "
            "see 'headrace users list' and 'headrace users change'"
        )
        if outcome == "too_many_attempts":
            text += "; there were too many, so this one was not looked at"
        self.refusals.note("login", source, text, "token" if user is None else "password")


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """The names in a client's certificate, the alternative names before the common name."""
    if not certificate:
        return []
    found = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    for part in certificate.get("subject", ()):
        found += [str(value) for kind, value in part if kind == "commonName"]
    return found


_KINDS = ("DNS", "URI", "email")

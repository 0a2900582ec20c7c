"""Access control of one broker: who a client is, and rules that change while it runs.

The rules come from the access file, or from the cluster that the broker is a node of. The file is looked at
twice a second, so a change by a command (or by a restored backup) reaches a running broker within a second,
like a change by an operation. The same look ends what has expired.

A file that breaks while the broker runs changes nothing: the last good rules stay, and ``problem`` says
so (log, metric, readiness). So does a file that disappears.

Passwords are checked in two threads of their own, and those that wait are bounded. A password that was
right is remembered by a keyed hash, so a client that sends it with every request (HTTP Basic) costs one
slow hash and not one for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.access.caller import Caller
from headrace.access.file import AccessFile, Change, RuleStore
from headrace.access.hashing import hash_password, is_password, token_hash
from headrace.access.quotas import Meter, Meters
from headrace.access.rights import Grant, is_allowed
from headrace.access.rules import AccessRules, AccessToken, Quotas, User
from headrace.clock import Clock, Loop, Timer
from headrace.errors import DataCorrupt, HeadraceError, QueueFull
from headrace.files import Files

logger = logging.getLogger("headrace.access")
LOOK_S = 0.5
THREADS = 2
"""Each hash takes 64 MiB while it is computed."""
WAITING_MAX = 64
"""Passwords that wait for a thread."""
REMEMBERED_MAX = 10_000
SETTING = "token"
"""The name of whoever has the token of the settings."""
Credential = tuple[str, ...]
Result = TypeVar("Result")


class AccessControl:
    def __init__(
        self,
        data_dir: Path | None,
        loop: Loop,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
    ):
        self.store: RuleStore = AccessFile(data_dir, files)
        self._loop, self._clock = loop, clock or Clock()
        self.rules: AccessRules | None = None
        self.problem: str | None = None
        """Why the file cannot be used at present; the last good rules are in force."""
        self.listeners: list[Callable[[], None]] = []
        """Called after each change of rules."""
        self.anyone = Caller("anyone", unlimited=True)
        """Every client, while access control is off."""
        self.nobody = Caller("nobody")
        """A client that has not logged in."""
        self.meters = Meters(loop)
        self._setting: str | None = None
        self._callers: dict[Credential, Caller] = {}
        self._users: dict[str, User] = {}
        self._tokens: dict[str, AccessToken] = {}
        """By their hashes."""
        self._certificates: dict[str, User] = {}
        self._owners: dict[str, tuple[Grant, ...]] = {}
        """Principal -> its grants."""
        self._stamp: object = None
        self._timer: Timer | None = None
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, str] = {}
        """Keyed hash of (user, password) -> the stored hash that it fits."""
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    @property
    def is_on(self) -> bool:
        return self.rules is not None or self._setting is not None

    @property
    def setting(self) -> str | None:
        """The token of the settings: an administrator."""
        return self._setting

    @setting.setter
    def setting(self, token: str | None) -> None:
        self._setting = token
        self._changed()

    # --- the file -------------------------------------------------------------------------------
    def open(self) -> None:
        """Read the file. Raises if it cannot be trusted: a broker must not start then."""
        self._stamp = self.store.stamp()
        self.rules = self.store.read()
        self._changed()

    def watch(self) -> None:
        """From now on, take over changes of the file, and end what has expired. A server needs that; a broker
        inside of a program has no clients that log in."""
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._tick)
        self.look()

    def look(self) -> None:
        """Read the file if it has changed, and end what has expired."""
        try:
            stamp = self.store.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                rules = self.store.read()
                if rules is None and self.rules is not None:
                    raise DataCorrupt("the access file is gone")
                self.problem = None
                self._take(rules)
            elif self._has_expired():
                self._changed()
        except HeadraceError as error:
            if error.message != self.problem:
                logger.error("%s; the last good rules stay in force", error)
            self.problem = error.message

    def _has_expired(self) -> bool:
        now = self._clock.now_ms()
        return any(
            caller.valid
            and credential[0] == "token"
            and not _is_alive(self._tokens.get(credential[1]), now)
            for credential, caller in self._callers.items()
        )

    def _take(self, rules: AccessRules | None) -> None:
        if rules != self.rules:
            self.rules = rules
            logger.info("access rules are in force, version %d", rules.version if rules else 0)
            self._changed()

    def _changed(self) -> None:
        """Bring every caller up to date, and tell those who hold on to something."""
        rules = self.rules or AccessRules()
        self._users = {user.name: user for user in rules.users}
        self._tokens = {token.sha256: token for token in rules.tokens}
        self._certificates = {name: user for user in rules.users for name in user.certificates}
        self._owners = {f"user:{user.name}": _grants_of(user) for user in rules.users}
        for token in rules.tokens:
            if token.user is None:
                self._owners[f"token:{token.name}"] = token.grants
        self.meters.address_quotas = rules.addresses
        for credential, caller in list(self._callers.items()):
            if not self._refresh(credential, caller):
                caller.revoke()
                del self._callers[credential]
        if self.is_on == self.anyone.valid:
            self.anyone.revoke()
            self.anyone = Caller("anyone", unlimited=True)
            self.anyone.valid = not self.is_on
        for listener in tuple(self.listeners):
            listener()

    def _refresh(self, credential: Credential, caller: Caller) -> bool:
        """Give the caller its rights of now; False if the credential is not valid any more."""
        kind, *parts = credential
        default = Quotas() if self.rules is None else self.rules.default
        if kind == "setting":
            return self._setting is not None and parts[0] == token_hash(self._setting)
        if kind == "token":
            token = self._tokens.get(parts[0])
            if token is None or not _is_alive(token, self._clock.now_ms()):
                return False
            if token.user is None:
                self._set(caller, token.grants, token.quotas.or_else(default))
                return True
            user = self._users.get(token.user)
        else:
            user = self._users.get(parts[0])
            if user is not None and parts[1] not in (user.password, *user.certificates):
                user = None
        if user is None or user.disabled:
            return False
        self._set(caller, user.grants, user.quotas.or_else(default))
        return True

    def _set(self, caller: Caller, grants: tuple[Grant, ...], quotas: Quotas) -> None:
        caller.change(grants, quotas, self.meters.of(caller.name, quotas))

    # --- logging in -----------------------------------------------------------------------------
    def _caller(self, credential: Credential, name: str) -> Caller | None:
        caller = self._callers.get(credential)
        if caller is None:
            caller = Caller(name, unlimited=credential[0] == "setting")
            if not self._refresh(credential, caller):
                return None
            self._callers[credential] = caller
        return caller

    def by_token(self, text: str) -> Caller | None:
        hashed = token_hash(text)
        setting = self._setting
        if setting is not None and hmac.compare_digest(setting.encode(), text.encode()):
            return self._caller(("setting", hashed), SETTING)
        token = self._tokens.get(hashed)
        if token is None or not _is_alive(token, self._clock.now_ms()):
            return None
        name = f"token:{token.name}" if token.user is None else f"user:{token.user}"
        return self._caller(("token", hashed), name)

    def by_certificate(self, names: Iterable[str]) -> Caller | None:
        for name in names:
            user = self._certificates.get(name)
            if user is not None and not user.disabled:
                return self._caller(("certificate", user.name, name), f"user:{user.name}")
        return None

    def by_known_password(self, name: str, password: str) -> Caller | None:
        """The user, if this password was right before; without the slow hash."""
        stored = self._remembered.get(self._digest(name, password))
        user = self._users.get(name)
        if user is None or stored is None or user.password != stored:
            return None
        return self._caller(("password", name, stored), f"user:{name}")

    async def by_password(self, name: str, password: str) -> Caller | None:
        known = self.by_known_password(name, password)
        if known is not None:
            return known
        user = self._users.get(name)
        stored = None if user is None else user.password
        if not await self.in_thread(is_password, stored, password) or stored is None:
            return None
        if len(self._remembered) >= REMEMBERED_MAX:
            self._remembered.clear()
        self._remembered[self._digest(name, password)] = stored
        return self.by_known_password(name, password)  # it may have changed meanwhile

    def _digest(self, name: str, password: str) -> bytes:
        text = f"{len(name)}:{name}{password}".encode()
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()

    def login_of(self, caller: Caller, mark: str) -> Caller | None:
        """Another caller with the same credential, which ``log_out`` ends alone; None if it has ended."""
        for credential, known in self._callers.items():
            if known is caller:
                return self._caller((*credential, mark), caller.name)
        return None

    def log_out(self, caller: Caller) -> None:
        """End a caller of ``login_of``, and what is open in its name."""
        for credential, known in list(self._callers.items()):
            if known is caller:
                del self._callers[credential]
        caller.revoke()
        for listener in tuple(self.listeners):
            listener()

    async def in_thread(self, work: Callable[..., Result], *args: object) -> Result:
        """Run slow work in one of our threads; :class:`QueueFull` if too many wait."""
        if self._waiting >= WAITING_MAX:
            raise QueueFull("too many logins at the same time; try again", code="too_many_logins")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "headrace-access")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._waiting -= 1

    async def file_content(self) -> bytes:
        """The access file as it is, for a backup; empty if there is none."""
        return await self.in_thread(self.store.content)

    # --- changing the rules -----------------------------------------------------------------------
    async def change(self, change: Change) -> AccessRules:
        """Write a change of the rules and put it in force."""
        rules = await self.store.change_in(self.in_thread, change)
        self.look()
        return rules

    async def hashed(self, password: str) -> str:
        return await self.in_thread(hash_password, password)

    def principal(self, name: str) -> Caller:
        """What somebody may do who has logged in at another node of the cluster."""
        if not self.is_on or name in (SETTING, "owner", "anyone"):
            return Caller(name, unlimited=True)
        grants = self._owners.get(name, ())
        return Caller(name, grants, unlimited=any(grant.is_whole for grant in grants))

    # --- seals ------------------------------------------------------------------------------------
    def seal(self, text: str, topic: str) -> str:
        """A text for a client that nobody else can make: it says for which topic it was given out.

        The id of a staged batch says where the batch goes, but nothing on disk does. Without the seal a
        client could send somebody else's batch to a topic of its own.
        """
        return f"{text}~{self._mac(text, topic)}~{topic}" if self.rules is not None else text

    def unseal(self, sealed: str) -> tuple[str, str | None]:
        """The text, and the topic for which it was given out; None if that cannot be trusted."""
        text, mark, rest = sealed.partition("~")
        mac, _, topic = rest.partition("~")
        if not mark or not hmac.compare_digest(mac.encode(), self._mac(text, topic).encode()):
            return text, None
        return text, topic

    def _mac(self, text: str, topic: str) -> str:
        key = b"" if self.rules is None else self.rules.key.encode()
        return hashlib.blake2b(f"{text}~{topic}".encode(), key=key[:64], digest_size=16).hexdigest()

    # --- questions --------------------------------------------------------------------------------
    def owner_may_consume(self, owner: str, topic: str, subscription: str) -> bool:
        """Whether a subscription that this principal created gets the messages of a topic."""
        if not self.is_on or owner == SETTING:
            return True
        return is_allowed(self._owners.get(owner, ()), "consume", topic, subscription)

    def forget_topic(self, topic: str) -> None:
        """It is deleted: whoever publishes to it again creates another one, within its quotas."""
        for caller in self._callers.values():
            caller.publishes.discard(topic)

    def meter_of(self, address: str) -> Meter | None:
        """What counts the use of an address; None without quotas for addresses."""
        return self.meters.of_address(address)


def _is_alive(token: AccessToken | None, now_ms: int) -> bool:
    return token is not None and (token.expires is None or token.expires > now_ms)


def _grants_of(user: User) -> tuple[Grant, ...]:
    return () if user.disabled else user.grants

"""Sessions of browsers: a login that lasts as long as its cookie.

::

    POST /console/session {token} or {user, password}
         │  server/logins.py: the same check, and the same pauses after failures, as for every login
         ▼
    a Caller of its own (AccessControl.login_of) ◀── found by the hash of ── the cookie, 256 random bits

Rules:
- The cookie is HttpOnly, SameSite=Strict, and Secure under TLS. Browsers send the cookies of a host to all of
  its ports, so the name has the port in it: two brokers on a machine do not log each other out.
- A session ends after ``SESSION_S``, by logging out, with its token or password, or when too many others were
  begun. Its caller is revoked then: heads that were admitted before, and open streams, end with it.
- The cookie counts only in requests of our own page. SameSite does not tell ports apart, and a listed origin
  may send requests too. So the browser must say that it is the same origin (``Sec-Fetch-Site``), or the
  request has the header ``X-Headrace-Console``, which other origins can send only after a preflight; whatever
  is not a GET or HEAD has that header, and an ``Origin`` that is given is our own.
- A page of another origin cannot log anybody in or out: a user who works in the session of somebody else gives
  away what it publishes there. A login makes a new cookie, and ends the session of the one that came with it. Two
  cookies of our name are none: one of them was set by another port or name of this host.
- Only a hash of the cookie is kept. The table is bounded, also for each principal.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.access.caller import Caller
from headrace.access.control import AccessControl
from headrace.errors import Unauthenticated
from headrace.wire.http import Request

SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1_000
PER_PRINCIPAL_MAX = 20
HEADER = "x-headrace-console"


class _Session(NamedTuple):
    caller: Caller
    ends_at: float


class ConsoleSessions:
    def __init__(
        self,
        access: AccessControl,
        time: Callable[[], float],
        call_later: Callable[..., Any],
    ):
        self._access, self._time, self._call_later = access, time, call_later
        self._sessions: dict[str, _Session] = {}
        """By the hash of the cookie, oldest first."""
        self._timer: Any = None
        self.cookie = "headrace"
        self.secure = False

    def __len__(self) -> int:
        return len(self._sessions)

    def served(self, port: int, *, tls: bool) -> None:
        """The port of the pages, and whether it has TLS."""
        self.secure = tls
        self.cookie = f"{'__Host-' if tls else ''}headrace-{port}"

    # --- beginning and ending ---------------------------------------------------------------------
    def begin(self, caller: Caller, request: Request) -> str:
        """A session of whoever has just logged in; returns the value of its cookie."""
        self.end(request)
        self._end_overdue()
        mine = [key for key, each in self._sessions.items() if each.caller.name == caller.name]
        if len(mine) >= PER_PRINCIPAL_MAX:
            self._end(mine[0])
        elif len(self._sessions) >= SESSIONS_MAX:
            self._end(next(iter(self._sessions)))
        secret = secrets.token_urlsafe(32)
        key = _hash(secret)
        own = self._access.login_of(caller, f"session {key}")
        if own is None:
            raise caller.refusal("browse")
        self._sessions[key] = _Session(own, self._time() + SESSION_S)
        self._arm()
        return secret

    def end(self, request: Request) -> None:
        """Log out. Without a session there is nothing to do."""
        for secret in self._secrets(request):
            self._end(_hash(secret))

    @staticmethod
    def check_origin(request: Request) -> None:
        """Refuse a login or logout that another page asks for, also one that may use the API."""
        if not _is_same_origin(request):
            raise _not_ours("only the console itself logs in and out; other pages send a token")

    def _end(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._access.log_out(session.caller)

    def _end_overdue(self) -> None:
        now = self._time()
        for key, session in list(self._sessions.items()):
            if session.ends_at <= now or not session.caller.valid:
                self._end(key)

    def _arm(self) -> None:
        if self._timer is None and self._sessions:
            first = min(session.ends_at for session in self._sessions.values())
            self._timer = self._call_later(max(first - self._time(), 1.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._end_overdue()
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the cookie -------------------------------------------------------------------------------
    def find(self, request: Request) -> Caller | None:
        """Whose session a request belongs to; None: it has no cookie of ours.

        :class:`Unauthenticated` if the cookie does not count, so that nobody wonders.
        """
        secrets = self._secrets(request)
        if not secrets:
            return None
        if not _is_ours(request):
            raise _not_ours(
                "the console's cookie counts only in requests of the console; send a token"
            )
        session = self._sessions.get(_hash(secrets[0])) if len(secrets) == 1 else None
        if session is None or session.ends_at <= self._time() or not session.caller.valid:
            raise Unauthenticated("this session has ended; log in again", code="login_ended")
        return session.caller

    def _secrets(self, request: Request) -> list[str]:
        pairs = [
            pair.strip().partition("=") for pair in request.headers.get("cookie", "").split(";")
        ]
        return [value for name, _, value in pairs if name == self.cookie and value]

    def header(self, secret: str, request: Request) -> str:
        """``Set-Cookie`` with this value; an empty one removes the cookie."""
        # A proxy that ends TLS for us says so. Whoever lies about it only loses a cookie of its own.
        secure = self.secure or request.headers.get("x-forwarded-proto") == "https"
        age = int(SESSION_S) if secret else 0
        text = f"{self.cookie}={secret}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict"
        return text + ("; Secure" if secure else "")


def _is_same_origin(request: Request) -> bool:
    """Whether no browser says that another page sent it."""
    headers = request.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_own = origin is None or origin.partition("://")[2] == headers.get("host", "")
    return is_own and site in (None, "same-origin")


def _is_ours(request: Request) -> bool:
    """Whether our own page sent it, as far as a browser can be asked."""
    if not _is_same_origin(request):
        return False
    if HEADER in request.headers:
        return True
    site = request.headers.get("sec-fetch-site")
    return request.method in ("GET", "HEAD") and site == "same-origin"


def _not_ours(text: str) -> Unauthenticated:
    return Unauthenticated(text, code="not_the_console")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

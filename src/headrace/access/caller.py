"""What one login may do. Every decision about a right is made here.

A :class:`Caller` belongs to one credential: a token, a password of a user, a certificate. All connections
that logged in with it share it. When the rules change, ``AccessControl`` changes it in place, so everybody
who holds one sees the change at once; nobody keeps a copy of its rights.

``publishes`` is for the hot path: a publish is one lookup in it. It holds topics that were checked since
the rules last changed; whatever is not in it is asked of ``need``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.access.rights import EVERYTHING, RIGHTS, Grant, Right, is_allowed, is_within
from headrace.access.rules import Quotas
from headrace.errors import Forbidden, HeadraceError, Unauthenticated

if TYPE_CHECKING:
    from headrace.access.quotas import Meter

CACHED_MAX = 10_000
"""Decisions that one caller keeps."""


class Caller:
    __slots__ = (
        "_decisions",
        "grants",
        "meter",
        "name",
        "publishes",
        "quotas",
        "unlimited",
        "valid",
    )

    def __init__(
        self,
        name: str,
        grants: Iterable[Grant] = (),
        *,
        unlimited: bool = False,
        meter: Meter | None = None,
    ):
        self.name = name
        """``user:alice``, ``token:ci``: the principal, as the audit and the owner of a subscription say
        it."""
        self.valid = True
        """False for ever once the credential is revoked, changed or expired."""
        self.unlimited = unlimited
        """It may do everything: access control is off, or it is an administrator of the broker."""
        self.grants = tuple(grants)
        self.quotas = Quotas()
        self.meter = meter
        """Counts what the principal uses; None if it has no quotas."""
        self.publishes: set[str] = set()
        self._decisions: dict[tuple[Right, str | None, str | None], bool] = {}

    def __repr__(self) -> str:
        return f"Caller({self.name!r})"

    def change(self, grants: tuple[Grant, ...], quotas: Quotas, meter: Meter | None) -> None:
        """New rules; everything that was decided before is forgotten."""
        self.grants, self.quotas, self.meter = grants, quotas, meter
        self.unlimited = any(grant.is_whole for grant in grants)
        self.forget()

    def forget(self) -> None:
        """Decide everything anew."""
        self.publishes.clear()
        self._decisions.clear()

    def revoke(self) -> None:
        self.valid = self.unlimited = False
        self.grants = ()
        self.forget()

    # --- decisions ----------------------------------------------------------------------------
    def may(self, right: Right, topic: str | None = None, name: str | None = None) -> bool:
        """Whether it has the right over the topic and the name; None: over any."""
        if self.unlimited:
            return True
        key = (right, topic, name)
        known = self._decisions.get(key)
        if known is None:
            if len(self._decisions) >= CACHED_MAX:
                self._decisions.clear()
            known = self._decisions[key] = is_allowed(self.grants, right, topic, name)
        return known

    def may_all(self, right: Right, pattern: str, name: str) -> bool:
        """Whether it has the right over everything that a pattern can match."""
        return self.unlimited or is_within(Grant((right,), (pattern,), (name,)), self.grants)

    def sees(self, topic: str | None = None, name: str | None = None) -> bool:
        """Whether it has any right over it: then it may know that it exists."""
        return self.unlimited or any(self.may(right, topic, name) for right in RIGHTS)

    def need(self, right: Right, topic: str | None = None, name: str | None = None) -> None:
        """Nothing, or :class:`Forbidden`."""
        if not self.may(right, topic, name):
            raise self.refusal(right, topic, name)

    def need_everything(self) -> None:
        """Nothing, or :class:`Forbidden` unless it is an administrator of the whole broker."""
        if not self.unlimited:
            raise self.refusal("admin", EVERYTHING)

    def refusal(
        self, right: str, topic: str | None = None, name: str | None = None
    ) -> HeadraceError:
        """The error for a right that it does not have."""
        if not self.valid:
            return Unauthenticated(
                "this login is not valid any more: it was revoked, changed, or has expired; log in "
                "again",
                code="login_ended",
            )
        over = [repr(each[:80]) for each in (topic, name) if each is not None]
        place = f" over {' and '.join(over)}" if over else ""
        return Forbidden(
            f"{self.name} does not have the right {right!r}{place}; ask an administrator for it",
            code="forbidden",
        )


OWNER = Caller("owner", unlimited=True)
"""The process itself: an embedded broker, and what the broker does on its own."""

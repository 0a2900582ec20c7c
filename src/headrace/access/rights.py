"""Rights over names: what a grant allows, and whether one grant is a part of another.

A grant gives rights over topics and over names. A *name* is that of a subscription, a producer, a
pipeline, a user or a token: all these are named alike, so one list of patterns serves all of them.

Patterns are those of subscriptions: ``*`` is one word, ``>`` at the end is the rest. Here they also match
dead-letter topics, because a team's prefix covers the dead letters of the team. They never match the
broker's own topics (``__events``): such a topic is granted by its full name.

``admin`` includes all other rights within its patterns. ``admin`` over ``>`` is an administrator of the
broker; ``admin`` over ``team.>`` is an administrator of the namespace ``team.``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, get_args

import msgspec

from headrace.errors import InvalidArgument
from headrace.model import INTERNAL_PREFIX, check_pattern, check_topic_name, is_pattern

Right = Literal["publish", "consume", "browse", "manage", "admin", "metrics"]
RIGHTS: tuple[Right, ...] = get_args(Right)
EVERYTHING = ">"
PATTERNS_MAX = 1_000
"""In one grant."""


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``rights`` over all topics and names that match."""

    rights: tuple[Right, ...]
    topics: tuple[str, ...] = (EVERYTHING,)
    names: tuple[str, ...] = (EVERYTHING,)

    def check(self) -> Grant:
        """Itself, or :class:`InvalidArgument`."""
        for right in self.rights:
            if right not in RIGHTS:
                raise InvalidArgument(
                    f"there is no right {right!r}; the rights are {', '.join(RIGHTS)}",
                    code="invalid_grant",
                )
        if not self.rights or not self.topics or not self.names:
            raise InvalidArgument(
                "a grant has at least one right, one topic and one name", code="invalid_grant"
            )
        if len(self.topics) + len(self.names) > PATTERNS_MAX:
            raise InvalidArgument(
                f"a grant has at most {PATTERNS_MAX} patterns", code="invalid_grant"
            )
        for pattern in self.topics:
            if pattern.startswith(INTERNAL_PREFIX):
                check_topic_name(pattern, internal=True)
            else:
                check_pattern(pattern)
        for pattern in self.names:
            check_pattern(pattern)
        return self

    @property
    def is_whole(self) -> bool:
        """Whether it makes an administrator of the broker."""
        return "admin" in self.rights and EVERYTHING in self.topics and EVERYTHING in self.names


def parse_grant(text: str) -> Grant:
    """``RIGHT[,RIGHT…]:TOPIC[,TOPIC…][:NAME[,NAME…]]``, as people write it.

    A part that is empty is an error. It is often a variable of a script that is not set, and must not stand
    for everything.
    """
    rights, *patterns = text.split(":")
    if not 1 <= len(patterns) <= 2 or not all(patterns):
        raise InvalidArgument(
            f"a grant is RIGHTS:TOPICS or RIGHTS:TOPICS:NAMES, not {text[:80]!r}; all topics are '>'",
            code="invalid_grant",
        )
    lists = [tuple(part.split(",")) for part in (*patterns, EVERYTHING)]
    return Grant(tuple(rights.split(",")), lists[0], lists[1]).check()  # type: ignore[arg-type]


def grant_text(grant: Grant) -> str:
    """The reverse of :func:`parse_grant`."""
    text = f"{','.join(grant.rights)}:{','.join(grant.topics)}"
    return text if grant.names == (EVERYTHING,) else f"{text}:{','.join(grant.names)}"


@lru_cache(maxsize=4096)
def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a grant matches a name."""
    if not is_pattern(pattern):
        return pattern == name
    if name.startswith(INTERNAL_PREFIX):
        return False
    return covers(pattern, name)


def covers(pattern: str, other: str) -> bool:
    """Whether everything that ``other`` (a name or a pattern) matches is matched by ``pattern``."""
    if other.startswith(INTERNAL_PREFIX):
        return pattern == other
    wanted, words = pattern.split("."), other.split(".")
    for place, want in enumerate(wanted):
        if place >= len(words):
            return False
        if want == ">" and place == len(wanted) - 1:
            return True
        if words[place] == ">" or want not in ("*", words[place]):
            return False
    return len(wanted) == len(words)


def _any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def is_allowed(
    grants: Iterable[Grant], right: Right, topic: str | None = None, name: str | None = None
) -> bool:
    """Whether a grant gives the right over the topic and the name. None: over any."""
    return any(
        (right in grant.rights or "admin" in grant.rights)
        and (topic is None or _any_matches(grant.topics, topic))
        and (name is None or _any_matches(grant.names, name))
        for grant in grants
    )


def is_within(grant: Grant, held: Iterable[Grant]) -> bool:
    """Whether everything in ``grant`` is also in one of the grants that are held.

    A grant that only several held grants together cover is refused: it can be given in parts.
    """
    return all(
        any(
            (right in mine.rights or "admin" in mine.rights)
            and any(covers(pattern, topic) for pattern in mine.topics)
            and any(covers(pattern, name) for pattern in mine.names)
            for mine in held
        )
        for right in grant.rights
        for topic in grant.topics
        for name in grant.names
    )

"""Which topic goes where, which messages are skipped, and how far the copy is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from headrace.errors import InvalidArgument
from headrace.model import check_subscription_name, check_topic_name

Skip = Literal["too-large", "deleted"]
SKIPS: tuple[Skip, ...] = get_args(Skip)
NAME_CHARS_MAX = 150
RATE_S = 5.0
"""Rates are those of about this time."""


@dataclass(eq=False)
class BridgeRoute:
    """One topic into one other topic."""

    kafka: str
    headrace: str
    copied: int = 0
    skipped: int = 0
    """Messages that were left out because ``--skip`` says so."""
    positions: dict[int, int] = field(default_factory=dict)
    """Of the source's partitions: the offset of the next message that is to be copied."""
    ends: dict[int, int] = field(default_factory=dict)
    """Of the source's partitions: the end, when it was last seen."""

    @property
    def lag(self) -> int:
        return sum(
            max(end - self.positions.get(number, end), 0) for number, end in self.ends.items()
        )


def parse_routes(texts: Sequence[str], *, inward: bool) -> list[BridgeRoute]:
    """Each ``TOPIC`` or ``FROM=TO``. No topic is written by two routes, and none is read by two."""
    routes = []
    for text in texts:
        source, equals, target = text.partition("=")
        target = target if equals else source
        kafka, headrace = (source, target) if inward else (target, source)
        if not kafka or not headrace:
            raise InvalidArgument(f"{text!r} names no topic; write TOPIC or FROM=TO")
        routes.append(BridgeRoute(kafka, check_topic_name(headrace)))
    for names in ([each.kafka for each in routes], [each.headrace for each in routes]):
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgument(f"topic {name} is named twice; name each topic once")
    return routes


def parse_skips(texts: Sequence[str]) -> frozenset[str]:
    for text in texts:
        if text not in SKIPS:
            raise InvalidArgument(f"--skip is {' or '.join(SKIPS)}, not {text!r}")
    return frozenset(texts)


def check_bridge_name(name: str) -> str:
    """It becomes a part of topics, of a subscription and of a commit."""
    if len(name) > NAME_CHARS_MAX:
        raise InvalidArgument(f"a bridge's name has at most {NAME_CHARS_MAX} characters")
    return check_subscription_name(name)


class BridgeProgress:
    """How far a bridge is. One thread writes it, any thread reads it."""

    def __init__(self, routes: Sequence[BridgeRoute]):
        self.routes = list(routes)
        self.trouble: str | None = None
        """Why nothing is copied now."""
        self.is_caught_up = False
        self._rates: list[tuple[float, int]] = [(time.monotonic(), 0)]

    @property
    def copied(self) -> int:
        return sum(route.copied for route in self.routes)

    @property
    def skipped(self) -> int:
        return sum(route.skipped for route in self.routes)

    @property
    def lag(self) -> int:
        return sum(route.lag for route in self.routes)

    def rate(self) -> float:
        """Messages a second."""
        now = time.monotonic()
        self._rates.append((now, self.copied))
        while len(self._rates) > 2 and self._rates[1][0] < now - RATE_S:
            del self._rates[0]
        since, before = self._rates[0]
        return (self.copied - before) / max(now - since, 0.001)

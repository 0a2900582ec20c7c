"""The last ten minutes, kept in memory: of the broker, and of each topic and subscription that was active.

::

    every 5 s   one sample of the broker:          13 series of 120 numbers
    every 10 s  one of each topic, subscription:    2 or 3 series of 60 numbers, from its first activity on

Rules:
- Samples are differences of counters that exist anyway: publishing and delivering cost nothing more.
- A round is done in pieces between the turns of the loop (``pace.py``), and costs little for what is idle.
- Memory is bounded: ``ITEMS_MAX`` topics and subscriptions have a ring, of 480 or 720 bytes.
- It is for eyes. What is to be kept or added up is in the metrics and in ``__events``.
- Failed deliveries are remembered too, the last ``FAILURES_MAX`` of the broker, and deliveries that have ended
  (``lives.py``): ``message_life`` tells of them.

Rejected: SQLite or a topic (a disk write for each look at a plot); averages that fade (they cannot be plotted).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.lives import Lives
from headrace.files import resident_bytes
from headrace.model import INTERNAL_PREFIX
from headrace.operations.results import Verdict
from headrace.operations.watching import History

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic

INTERVAL_S = 5.0
SAMPLES = 120
EVERY = 2
"""Topics and subscriptions are sampled in each second round."""
ITEM_SAMPLES = SAMPLES // EVERY
ITEMS_MAX = 10_000
FAILURES_MAX = 20_000
GROWN_MIN = 100
"""Messages by which a lag grows in a minute before it is worth a word."""
MANY = 2_000
"""Topics and subscriptions; beyond it, all are looked at every ten seconds and not every five."""
TOPIC_SERIES = ("published_per_second", "bytes_per_second")
SUBSCRIPTION_SERIES = ("lag", "delivered_per_second", "acked_per_second")
_COUNTED = ("published", "bytes", "delivered", "acked", "redelivered", "dead_lettered")
Timings = tuple[int, float, int, float]
"""Syncs, their seconds, commits, their seconds: since the start."""


class Failure(NamedTuple):
    """A delivery that failed."""

    subscription: int
    """Its number."""
    cursor: int
    offset: int
    time_ms: int
    attempt: int
    member: str
    reason: str


class HistoryRing:
    """Numbers of one topic or subscription. The place of a round is the same in all rings.

    A round in which nothing happened writes nothing: ``catch_up`` writes it when somebody looks, or when
    something happens again.
    """

    __slots__ = ("gauges", "last", "number", "series", "values")

    def __init__(
        self, series: int, gauges: tuple[int, ...], counters: tuple[int, ...], number: int
    ):
        self.series = series
        self.values = array("f", bytes(4 * series * ITEM_SAMPLES))
        self.gauges, self.last = gauges, counters
        """As they were in the last round."""
        self.number = number
        """The last round that is written."""

    def catch_up(self, number: int) -> None:
        """Write the rounds up to this one in which nothing happened."""
        for each in range(max(self.number, number - ITEM_SAMPLES) + 1, number + 1):
            for place in range(self.series):
                value = self.gauges[place] if place < len(self.gauges) else 0
                self.values[place * ITEM_SAMPLES + each % ITEM_SAMPLES] = value
        self.number = max(self.number, number)

    def add(
        self, number: int, gauges: tuple[int, ...], counters: tuple[int, ...], passed: float
    ) -> None:
        self.catch_up(number - 1)
        rates = ((new - old) / passed for new, old in zip(counters, self.last, strict=True))
        for place, value in enumerate((*gauges, *rates)):
            self.values[place * ITEM_SAMPLES + number % ITEM_SAMPLES] = value
        self.gauges, self.last, self.number = gauges, counters, number

    def of(self, place: int, number: int) -> list[float]:
        """One series, oldest first, up to the round ``number``."""
        self.catch_up(number)
        values = self.values[place * ITEM_SAMPLES : (place + 1) * ITEM_SAMPLES]
        at = (number + 1) % ITEM_SAMPLES
        return [*values[at:], *values[:at]]

    def value(self, place: int, number: int) -> float:
        self.catch_up(number)
        return self.values[place * ITEM_SAMPLES + number % ITEM_SAMPLES]


class Recording:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._timer: Any = None
        self._work: Iterator[None] | None = None
        self._times: deque[int] = deque(maxlen=SAMPLES)
        self._series: dict[str, deque[float]] = {}
        self._last: dict[str, float] = {}
        self._rings = 0
        """How many there were at the last round."""
        self._many = False
        """So many topics and subscriptions that they are looked at in each second round only."""
        self._totals_at = 0.0
        self._rounds = 0
        self._item_round = -1
        """The number of the last round over topics and subscriptions."""
        self._item_times: deque[int] = deque(maxlen=ITEM_SAMPLES)
        self._items_at = 0.0
        self.failures: deque[Failure] = deque(maxlen=FAILURES_MAX)
        self.lives = Lives()
        self.timings: Callable[[], Timings] = lambda: (0, 0.0, 0, 0.0)
        """Set by the server, whose metrics measure them."""

    def start(self) -> None:
        """A server records; a broker inside of a program has nobody who looks."""
        self._totals_at = self._items_at = self._engine.time()
        self._timer = self._engine.call_later(INTERVAL_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._work = None

    # --- sampling -------------------------------------------------------------------------------
    def _tick(self) -> None:
        if self._engine.closing or self._engine.failed is not None:
            self._timer = None
            return
        self._timer = self._engine.call_later(INTERVAL_S, self._tick)
        if self._work is None:
            self._work = self._round()
            self._engine.pace.soon(self._step)

    def _step(self) -> None:
        pace = self._engine.pace
        deadline = pace.deadline()
        for count, _ in enumerate(self._work or ()):
            if count % 16 == 15 and pace.is_past(deadline):
                pace.soon(self._step, late=True)
                return
        self._work = None

    def _round(self) -> Iterator[None]:
        """One sample of everything, an item at a time."""
        engine, now = self._engine, self._engine.time()
        items = self._rounds % EVERY == EVERY - 1
        self._rounds += 1
        if self._many and not items:
            self._add({name: values[-1] for name, values in self._series.items()})
            return
        passed, number = max(now - self._items_at, 0.001), self._item_round + 1
        published = size = lag = in_flight = delivered = acked = redelivered = buried = 0
        rings = count = 0
        for topic in list(engine.topics):
            yield
            if topic.name.startswith(INTERNAL_PREFIX):
                continue
            counters = (topic.published_total(), topic.published_bytes)
            published += counters[0]
            size += counters[1]
            if items:
                self._take(topic, 2, (), counters, number, passed)
            rings += topic.ring is not None
            count += 1
        for subscription in list(engine.subscriptions()):
            yield
            tally, behind = subscription.tally, subscription.lag()
            lag += behind
            in_flight += subscription.in_flight() if subscription.leases else 0
            delivered += tally.delivered
            acked += tally.acked
            redelivered += tally.redelivered
            buried += tally.dead_lettered
            if items:
                counters = (tally.delivered, tally.acked)
                self._take(subscription, 3, (behind,), counters, number, passed)
            rings += subscription.ring is not None
            count += 1
        if items:
            self._item_round, self._items_at = number, now
            self._item_times.append(engine.now_ms())
        self._rings, self._many = rings, count > MANY
        since, self._totals_at = max(now - self._totals_at, 0.001), now
        rates = self._grown(
            zip(_COUNTED, (published, size, delivered, acked, redelivered, buried), strict=True)
        )
        sample = {f"{name}_per_second": rates[name] / since for name in _COUNTED}
        self._add({**sample, "lag": lag, "in_flight": in_flight})

    def _take(
        self,
        item: Topic | Subscription,
        series: int,
        gauges: tuple[int, ...],
        counters: tuple[int, ...],
        number: int,
        passed: float,
    ) -> None:
        ring = item.ring
        if ring is None:
            if (any(gauges) or any(counters)) and self._rings < ITEMS_MAX:
                # Whatever happened before the first round happened before we looked.
                known = counters if number == 0 else (0,) * len(counters)
                ring = item.ring = HistoryRing(series, gauges, known, number - 1)
                ring.add(number, gauges, counters, passed)
                self._rings += 1
        elif ring.last != counters or ring.gauges != gauges:
            ring.add(number, gauges, counters, passed)

    def _grown(self, counters: Iterable[tuple[str, float]]) -> dict[str, float]:
        """By how much counters have grown since the last call; never less than nothing."""
        grown = {}
        for name, value in counters:
            grown[name] = max(value - self._last.get(name, value), 0)
            self._last[name] = value
        return grown

    def _add(self, sample: dict[str, float]) -> None:
        """A sample of the whole broker."""
        engine = self._engine
        times = self._grown(
            zip(("syncs", "sync_s", "commits", "commit_s"), self.timings(), strict=True)
        )
        sample["sync_ms"] = 1000 * times["sync_s"] / (times["syncs"] or 1)
        sample["commit_ms"] = 1000 * times["commit_s"] / (times["commits"] or 1)
        sample["connections"] = sum(1 for _ in engine.connections())
        sample["memory_bytes"] = engine.budget.used
        sample["resident_bytes"] = max(resident_bytes(), 0)
        engine.guard.refusal()  # it looks at the disk
        sample["disk_free_bytes"] = 0 if engine.directory is None else engine.guard.free_bytes
        self._times.append(engine.now_ms())
        for name, value in sample.items():
            self._series.setdefault(name, deque(maxlen=SAMPLES)).append(float(value))

    # --- asking ---------------------------------------------------------------------------------
    def broker(self) -> History:
        series = {name: [*values] for name, values in self._series.items()}
        return {"interval_ms": int(INTERVAL_S * 1000), "times": [*self._times], "series": series}

    def topic(self, topic: Topic) -> History:
        return self._of(topic.ring, TOPIC_SERIES)

    def subscription(self, subscription: Subscription) -> History:
        return self._of(subscription.ring, SUBSCRIPTION_SERIES)

    def _of(self, ring: HistoryRing | None, names: tuple[str, ...]) -> History:
        times = [*self._item_times]
        series = {
            name: [0.0] * len(times)
            if ring is None
            else ring.of(at, self._item_round)[ITEM_SAMPLES - len(times) :]
            for at, name in enumerate(names)
        }
        return {"interval_ms": int(EVERY * INTERVAL_S * 1000), "times": times, "series": series}

    def rates(self, item: Topic | Subscription) -> tuple[float, ...]:
        """The last values of its series."""
        ring = item.ring
        if ring is None:
            return (0.0, 0.0, 0.0)
        return tuple(ring.value(place, self._item_round) for place in range(ring.series))

    def growth(self, subscription: Subscription, rounds: int = 6) -> float:
        """By how much its lag has grown in the last rounds: a minute."""
        ring = subscription.ring
        if ring is None or self._item_round < rounds:
            return 0.0
        return ring.value(0, self._item_round) - ring.of(0, self._item_round)[-1 - rounds]

    def verdict(self, subscription: Subscription, rounds: int = 6) -> Verdict:
        """Whether it keeps up, by the last rounds: a minute. A paused one is as it should be."""
        ring = subscription.ring
        if (
            ring is None
            or self._item_round < rounds
            or subscription.paused
            or not subscription.lag()
        ):
            return "ok"
        lags = ring.of(0, self._item_round)[-1 - rounds :]
        if all(lags) and not any(ring.of(2, self._item_round)[-rounds:]):
            return "stalled"
        return "falling behind" if lags[-1] - lags[0] >= GROWN_MIN else "ok"

    # --- failures -------------------------------------------------------------------------------
    def failures_of(self, subscription: int, cursor: int, offset: int) -> list[Failure]:
        return [
            each
            for each in self.failures
            if each.offset == offset and each.cursor == cursor and each.subscription == subscription
        ]

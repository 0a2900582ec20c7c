"""The broker at a glance, for ``headrace top``: its totals, and what needs attention first.

A broker may have a hundred thousand subscriptions. All of them are counted, in turns of the loop, and only
the first few are sent. Rates are not kept here: a caller asks twice and compares the counters.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from headrace.access.caller import Caller
from headrace.broker.dead_letters import KEEPER
from headrace.broker.permissions import Permissions
from headrace.broker.topic_statistics import topic_subscriptions
from headrace.files import resident_bytes
from headrace.model import DEAD_LETTER_SUFFIX, INTERNAL_PREFIX
from headrace.operations.results import BrokerLoad, ClientInfo, Overview, OverviewRow

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic


class Connected(Protocol):
    """A connection, as the broker knows it: there are none where it is embedded."""

    number: int
    """Grows with each connection."""
    caller: Caller
    since: float
    """When it was made, by the loop's clock."""

    def describe(self) -> ClientInfo: ...


async def overview(engine: Engine, permissions: Permissions, limit: int) -> Overview:
    """All that the caller may see; rows for the ``limit`` that need attention most."""
    total: Counter[str] = Counter()
    rows: list[OverviewRow] = []
    letters: dict[str, int] = {}

    def add(row: OverviewRow) -> None:
        rows.append(row)
        if len(rows) > 4 * limit:
            rows[:] = heapq.nlargest(limit, rows, key=_attention)

    sees = permissions.caller.sees
    async for topic in engine.pace.each(list(engine.topics)):
        if topic.name.startswith(INTERNAL_PREFIX):
            continue
        count = _letters(engine, topic)
        if count:
            letters[topic.name] = count
        if not sees(topic.name):
            continue
        total["topics"] += 1
        total["published"] += topic.published_total()
        total["bytes"] += topic.size_bytes()
        total["dead_letters"] += count
        if not topic_subscriptions(topic, engine) and not topic.name.endswith(DEAD_LETTER_SUFFIX):
            add(_topic_row(topic))
    for_all = Counter[str]()
    async for subscription in engine.pace.each(engine.subscriptions()):
        if subscription.closed or not permissions.sees(subscription):
            continue
        buried_in = engine.dead_letters.topic_name(subscription, subscription.pattern)
        row = _row(subscription, letters.get(buried_in, 0))
        for_all.update({name: row[name] for name in _SUMMED})  # type: ignore[literal-required]
        total["subscriptions"] += 1
        add(row)
    found: Overview = {
        "time": engine.now_ms(),
        "topics": total["topics"],
        "subscriptions": total["subscriptions"],
        "bytes": total["bytes"],
        "published": total["published"],
        "dead_letters": total["dead_letters"],
        "delivered": for_all["delivered"],
        "acked": for_all["acked"],
        "redelivered": for_all["redelivered"],
        "lag": for_all["lag"],
        "in_flight": for_all["in_flight"],
        "rows": heapq.nlargest(limit, rows, key=_attention),
    }
    if permissions.caller.may_all("metrics", ">", ">"):  # as for /metrics
        found["load"] = _load(engine)
    return found


_SUMMED = ("delivered", "acked", "redelivered", "lag", "in_flight")


def _attention(row: OverviewRow) -> tuple[bool, bool, bool, int, int, int]:
    """What cannot go on, then dead letters, then lag that nobody works on, then the other lag."""
    is_stuck = row["lag"] > 0 and (row["paused"] or not row["members"])
    return (
        row["blocked"] > 0,
        row["dead_letters"] > 0,
        is_stuck and row["subscription"] is not None,
        row["lag"],
        row["in_flight"],
        row["end"],
    )


def _letters(engine: Engine, topic: Topic) -> int:
    keeper = engine.subscription_or_none(KEEPER, topic.name)
    if keeper is not None:
        return keeper.lag()
    log = topic.partitions[0].log
    is_theirs = topic.name.endswith(DEAD_LETTER_SUFFIX)
    return log.end_offset - log.start_offset if is_theirs else 0


def _topic_row(topic: Topic) -> OverviewRow:
    return {
        "topic": topic.name,
        "subscription": None,
        "end": sum(topic.end_offsets()),
        "lag": 0,
        "in_flight": 0,
        "waiting_for_retry": 0,
        "members": 0,
        "paused": False,
        "blocked": sum(1 for partition in topic.partitions if partition.log.read_only),
        "dead_letters": 0,
        "delivered": 0,
        "acked": 0,
        "redelivered": 0,
    }


def _row(subscription: Subscription, letters: int) -> OverviewRow:
    cursors, tally = subscription.cursors.values(), subscription.tally
    return {
        "topic": subscription.pattern,
        "subscription": subscription.name,
        "end": sum(cursor.partition.log.end_offset for cursor in cursors),
        "lag": subscription.lag(),
        "in_flight": subscription.in_flight(),
        "waiting_for_retry": subscription.waiting_for_retry(),
        "members": len(subscription.members),
        "paused": subscription.paused,
        "blocked": sum(1 for cursor in cursors if cursor.blocked),
        "dead_letters": letters,
        "delivered": tally.delivered,
        "acked": tally.acked,
        "redelivered": tally.redelivered,
    }


def _load(engine: Engine) -> BrokerLoad:
    is_durable = engine.directory is not None
    return {
        "connections": sum(1 for _ in engine.connections()),
        "memory_used": engine.budget.used,
        "memory_limit": engine.budget.limit,
        "resident_bytes": resident_bytes(),
        "disk_free_bytes": engine.guard.free_bytes if is_durable else None,
        "disk_full": engine.guard.full,
        "started": engine.started_ms,
    }


async def clients(engine: Engine, sees: Iterable[Connected], limit: int) -> list[ClientInfo]:
    """What the first ``limit`` of them are and hold."""
    found: list[ClientInfo] = []
    async for connection in engine.pace.each(sees):
        found.append(connection.describe())
        if len(found) == limit:
            break
    return found

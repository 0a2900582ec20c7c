"""Why a subscription is stuck, what became of a message, and what needs attention: in words.

Everything is read from the state that delivers messages, at the moment of the question. Lists in an answer are
bounded; where many messages could be looked at, the first ``LOOKED_AT`` are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.broker.delivery import Lease, Member
from headrace.broker.history import GROWN_MIN, Failure, Recording
from headrace.broker.lives import PastDelivery
from headrace.operations.watching import (
    Concern,
    Held,
    MemberInfo,
    MessageDelivery,
    MessageState,
    Severity,
    WaitingRetry,
)

if TYPE_CHECKING:
    from headrace.broker.cursor import Cursor
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription

SHOWN_MAX = 100
LOOKED_AT = 100_000
HELD_SHOWN = 5
SLOW_S = 10.0
"""A member that has held a message for so long may be stuck."""
_ORDER: tuple[Severity, ...] = ("critical", "warning", "notice", "ok")


def worst_first(findings: list[Concern]) -> list[Concern]:
    """Of the same severity, the first of each kind first: a hundred subscriptions without members hide no dead letters."""
    seen: Counter[str] = Counter()

    def rank(finding: Concern) -> tuple[int, int]:
        seen[finding["code"]] += 1
        return _ORDER.index(finding["severity"]), seen[finding["code"]]

    return sorted(findings, key=rank)


def findings_of(
    subscription: Subscription, recording: Recording, sees: Callable[[str], bool]
) -> Iterator[Concern]:
    """What is the case with a subscription; nothing if all its messages are done."""
    name = subscription.name

    def found(severity: Severity, code: str, text: str) -> Concern:
        return {
            "severity": severity,
            "code": code,
            "text": text,
            "topic": subscription.pattern,
            "subscription": name,
        }

    for (topic, number), cursor in islice(subscription.cursors.items(), SHOWN_MAX):
        if cursor.blocked and sees(topic):
            yield found(
                "critical",
                "damaged",
                f"{topic}/{number} cannot be read at offset {cursor.next}: {cursor.blocked}. Nothing "
                "behind it is delivered. Run headrace doctor, or seek past the damage.",
            )
    lag = subscription.lag()
    if not lag:
        return
    if subscription.paused:
        yield found(
            "warning",
            "paused",
            f"{name} is paused and {_messages(lag, 'waits', 'wait')}. Nothing is delivered until you resume it.",
        )
    in_flight, retries = subscription.in_flight(), subscription.waiting_for_retry()
    unread = lag - in_flight - retries
    members = list(subscription.members)
    if not members and not subscription.paused:
        text = f"{name} has no members, and {_messages(lag, 'waits', 'wait')}. Start a consumer."
        if in_flight:
            text = (
                f"{name} has no members. {_messages(in_flight, 'is', 'are')} held by clients that asked over "
                "HTTP or have left; they are delivered again after their deadlines."
            )
        yield found("warning", "no_members", text)
    yield from _members_findings(subscription, members, unread, found)
    if retries:
        due = subscription._retries.next_due()
        when = "" if due is None else f"; the next one at {_clock(subscription, due)}"
        yield found(
            "notice" if unread or in_flight else "warning",
            "retrying",
            f"{_messages(retries, 'waits', 'wait')} to be delivered again after a failure{when}.",
        )
    parked = sum(cursor.parked for cursor in subscription.cursors.values())
    if parked:
        yield found(
            "notice",
            "key_busy",
            f"{_messages(parked, 'waits', 'wait')} because an earlier message with the same key is with a member "
            "or waits for a retry (ordering=key).",
        )
    if subscription._burying:
        yield found(
            "notice",
            "burying",
            f"{_messages(len(subscription._burying), 'is', 'are')} being stored as dead letters.",
        )
    growth = recording.growth(subscription)
    if growth >= GROWN_MIN and members and not subscription.paused:
        yield found(
            "warning",
            "growing",
            f"The lag of {name} has grown by {int(growth):,} in the last minute, to {lag:,}. Its members "
            "are slower than the publishers: add members.",
        )


def _members_findings(
    subscription: Subscription, members: list[Member], unread: int, found: Any
) -> Iterator[Concern]:
    name = subscription.name
    stalled = [member for member in members if member.stalled]
    if stalled:
        who = ", ".join(member.name for member in stalled[:3])
        yield found(
            "warning",
            "stalled",
            f"{len(stalled)} of {len(members)} members let a deadline pass and have settled nothing "
            f"since ({who}). They get one message at a time. Look whether they hang.",
        )
    full = [member for member in members if member.in_flight >= member.prefetch]
    if members and len(full) == len(members) and unread > 0:
        oldest = max(
            (_age(subscription, lease) for lease in subscription.leases.values()), default=0.0
        )
        severity = "warning" if oldest >= SLOW_S else "notice"
        yield found(
            severity,
            "prefetch_full",
            f"All members of {name} hold as many messages as they may (prefetch "
            f"{max(member.prefetch for member in members)}), the oldest for {oldest:.0f} s. The next "
            "message goes out when they settle one: they are slow, they forget to acknowledge, or they "
            "are too few.",
        )
    closed = [member for member in members if member not in full and member.sink.room() <= 0]
    if closed and len(closed) + len(full) == len(members) and unread > 0:
        who = ", ".join(member.name for member in closed[:3])
        yield found(
            "warning",
            "not_reading",
            f"The connections of {who} take nothing more: these clients do not read what was sent, or "
            "the broker is short of memory.",
        )


def members_of(subscription: Subscription) -> list[MemberInfo]:
    """The members, and those who have left and still hold something."""
    found: dict[Member, None] = dict.fromkeys(subscription.members)
    for lease in islice(subscription.leases.values(), LOOKED_AT):
        found.setdefault(lease.member)
    return [_member(subscription, member) for member in islice(found, SHOWN_MAX)]


def _member(subscription: Subscription, member: Member) -> MemberInfo:
    about: Any = getattr(member.sink, "about", dict)()
    held = [*islice(_held(subscription, member), HELD_SHOWN)]
    is_in = member in subscription.members
    joined = _ms(subscription, member.joined) if is_in else None
    return {
        "name": about.get("client_id") or member.name,
        "connection": about.get("connection"),
        "address": about.get("address", ""),
        "prefetch": member.prefetch,
        "in_flight": member.in_flight,
        "stalled": member.stalled,
        "reads": not is_in or member.sink.room() > 0,
        "joined": joined,
        "oldest": held[0] if held else None,
        "held": held,
    }


def _held(subscription: Subscription, member: Member) -> Iterator[Held]:
    """What a member holds, the oldest first, as it was handed out."""
    for lease in member.leases.values():
        for index in range(lease.count):
            if lease.mask >> index & 1:
                yield {
                    "topic": lease.cursor.partition.topic,
                    "partition": lease.cursor.partition.number,
                    "offset": lease.offsets[index],
                    "attempt": lease.attempt_at(index),
                    "since": _ms(subscription, lease.since),
                    "deadline": _ms(subscription, lease.deadline),
                }


def retries_of(subscription: Subscription, limit: int) -> list[WaitingRetry]:
    """The next messages that are delivered again."""
    later = sorted(islice(subscription._retries.later, LOOKED_AT))[:limit]
    found = [
        (cursor, offset, None) for cursor, offset in islice(subscription._retries.ready, limit)
    ]
    found += [(cursor, offset, _ms(subscription, due)) for due, _, cursor, offset in later]  # type: ignore[misc]
    return [
        {
            "topic": cursor.partition.topic,
            "partition": cursor.partition.number,
            "offset": offset,
            "attempts": cursor.failures(offset),
            "due": due,
        }
        for cursor, offset, due in found[:limit]
    ]


def state_of(
    engine: Engine, subscription: Subscription, cursor: Cursor, offset: int
) -> MessageState:
    """What became of a message in a subscription."""
    failures = engine.history.failures_of(subscription.number, cursor.number, offset)
    state: MessageState = {
        "subscription": subscription.name,
        "topic": subscription.pattern,
        "state": "not delivered yet",
        "attempts": cursor.failures(offset),
        "member": None,
        "since": None,
        "due": None,
        "dead_letter": None,
        "dead_lettered": None,
        "redriven": None,
        "deliveries": [],
        "failures": [
            {"time": f.time_ms, "attempt": f.attempt, "member": f.member, "reason": f.reason}
            for f in failures
        ],
        "sinks": [],
    }
    if cursor.is_done(offset):
        state["state"] = "done"
    elif (cursor.number, offset) in subscription._burying:
        state["state"] = "being dead-lettered"
    elif (lease := _lease_of(subscription, cursor, offset)) is not None:
        index = lease.index(offset)
        about: Any = getattr(lease.member.sink, "about", dict)()
        state["state"] = "in flight"
        state["attempts"] = lease.attempt_at(index)
        state["member"] = about.get("client_id") or lease.member.name
        state["since"] = _ms(subscription, lease.since)
        state["due"] = _ms(subscription, lease.deadline)
    elif cursor.next > offset:
        # It was read, it is not out, and it is not done.
        state["state"] = "waiting for a retry"
        for due, _, where, at in islice(subscription._retries.later, LOOKED_AT):
            if where is cursor and at == offset:
                state["due"] = _ms(subscription, due)
                break
        else:
            held = subscription._order._held.get(cursor.number, {})
            if cursor.parked and offset not in held and not cursor.failures(offset):
                state["state"] = "waiting for its key"
    state["deliveries"] = _deliveries(engine, subscription, cursor, offset, failures)
    return state


def _deliveries(
    engine: Engine,
    subscription: Subscription,
    cursor: Cursor,
    offset: int,
    failures: list[Failure],
) -> list[MessageDelivery]:
    """The deliveries of a message that are known, oldest first."""
    failed = {(failure.attempt, failure.member) for failure in failures}
    found: list[MessageDelivery] = []

    def add(each: PastDelivery | Lease, index: int, member: str, until: int | None) -> None:
        attempts, is_back = each.attempts, bool(each.back >> index & 1)
        attempt = attempts if isinstance(attempts, int) else attempts[index]
        is_out = isinstance(each, Lease) and bool(each.mask >> index & 1)
        given_back: Any = "failed" if (attempt, member) in failed else "given back"
        found.append(
            {
                "since": _ms(subscription, each.since),
                "until": until,
                "attempt": attempt,
                "member": member,
                "outcome": "in flight" if is_out else given_back if is_back else "acknowledged",
            }
        )

    for past, index in engine.history.lives.deliveries_of(
        subscription.number, cursor.number, offset
    ):
        add(past, index, past.member, _ms(subscription, past.until))
    for lease in islice(subscription.leases.values(), LOOKED_AT):
        if lease.cursor is cursor and (index := lease.index(offset)) >= 0:
            add(lease, index, lease.member.name, None)
    return sorted(found, key=lambda each: each["since"])


def _lease_of(subscription: Subscription, cursor: Cursor, offset: int) -> Lease | None:
    for lease in islice(subscription.leases.values(), LOOKED_AT):
        if lease.cursor is cursor and lease.is_out(offset):
            return lease
    return None


def _age(subscription: Subscription, lease: Lease) -> float:
    return max(subscription._context.time() - lease.since, 0.0)


def _ms(subscription: Subscription, at: float) -> int:
    """A time of the loop as milliseconds since 1970."""
    context = subscription._context
    return max(int(context.now_ms() + 1000 * (at - context.time())), 0)


def _clock(subscription: Subscription, at: float) -> str:
    moment = datetime.fromtimestamp(_ms(subscription, at) / 1000, UTC)
    return moment.strftime("%H:%M:%S UTC")


def _messages(count: int, one: str, many: str) -> str:
    return f"1 message {one}" if count == 1 else f"{count:,} messages {many}"

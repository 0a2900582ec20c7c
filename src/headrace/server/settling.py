"""Ack, nack and extend as HTTP and WebSocket say them: JSON fields, one delivery or several.

A delivery is ``<lease>.<offset>``. Those that had ended are reported and are no error, unless all had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from headrace import limits
from headrace.broker.dead_letters import REASON_CHARS_MAX
from headrace.broker.delivery import Lease
from headrace.broker.permissions import Permissions
from headrace.broker.subscription import Subscription
from headrace.checking import check
from headrace.errors import InvalidArgument, StaleDelivery
from headrace.notation import SECONDS

Settle = Callable[[Subscription, int, int], object]
"""Called with (subscription, lease, offset)."""


def settling(verb: str, body: dict[str, Any]) -> Settle:
    """What ``ack``, ``nack`` or ``extend`` does to each delivery; takes its own fields of the body."""
    if verb == "nack":
        delay = seconds_in(body, "delay", limits.DELAY_S_MAX)
        reason = text_in(body, "reason", "nack")[:REASON_CHARS_MAX]
        return lambda subscription, lease, offset: subscription.nack(lease, offset, delay, reason)
    if verb == "extend":
        seconds = seconds_in(body, "seconds", limits.ACK_TIMEOUT_S_MAX)
        return lambda subscription, lease, offset: _extend(subscription, lease, offset, seconds)
    return lambda subscription, lease, offset: subscription.ack(lease, offset)


def _extend(subscription: Subscription, lease: int, offset: int, seconds: float | None) -> None:
    if not subscription.lease(lease).is_out(offset):
        raise _ended()
    subscription.extend(lease, seconds)


def deliveries_in(body: dict[str, Any]) -> list[tuple[int, int]]:
    """(lease, offset) of one delivery, or of each in a list."""
    single, several = body.pop("delivery", None), body.pop("deliveries", None)
    if single is not None and several is None:
        return [_parse(single)]
    if single is None and isinstance(several, list) and several:
        if len(several) > limits.SETTLED_AT_ONCE_MAX:
            raise InvalidArgument(
                f"{len(several)} deliveries are too many, the limit is "
                f"{limits.SETTLED_AT_ONCE_MAX}; settle them in several requests",
                code="too_many_deliveries",
            )
        return [_parse(delivery) for delivery in several]
    raise _no_delivery()


def _parse(delivery: object) -> tuple[int, int]:
    if isinstance(delivery, str):
        lease, dot, offset = delivery.partition(".")
        digits = lease + offset
        if dot and lease and offset and digits.isascii() and digits.isdigit() and len(digits) < 50:
            return int(lease), int(offset)
    raise _no_delivery()


def _no_delivery() -> InvalidArgument:
    return InvalidArgument(
        "give 'delivery', or a list 'deliveries', as it came with the message",
        code="invalid_delivery",
    )


def settle_each(
    deliveries: list[tuple[int, int]], settle: Settle, owner: Callable[[int], Subscription]
) -> list[str]:
    """Settle each delivery; returns those that had ended, unless all of them had."""
    stale = settle_those_out(deliveries, settle, owner)
    if len(stale) == len(deliveries):
        raise _ended()
    return stale


def settle_those_out(
    deliveries: list[tuple[int, int]], settle: Settle, owner: Callable[[int], Subscription]
) -> list[str]:
    """Settle each delivery; returns those that had ended. ``owner`` finds a lease's subscription."""
    stale = []
    for lease, offset in deliveries:
        try:
            settle(owner(lease), lease, offset)
        except StaleDelivery:
            stale.append(f"{lease}.{offset}")
    return stale


def owner_among(
    leases: Mapping[int, Lease], permissions: Permissions, topic: str | None
) -> Callable[[int], Subscription]:
    """Finds the subscription of a lease. One that the caller may not use has ended, as far as it knows."""
    allowed: dict[Subscription, bool] = {}

    def owner(lease_id: int) -> Subscription:
        lease = leases.get(lease_id)
        if lease is None:
            raise _ended()
        subscription = lease.subscription
        if subscription not in allowed:
            allowed[subscription] = permissions.may_use("consume", subscription)
        if not allowed[subscription]:
            raise _ended()
        if topic not in (None, subscription.pattern, lease.cursor.partition.topic):
            raise InvalidArgument(
                f"a delivery of {subscription.pattern!r} is not one of {topic!r}; a path without "
                "the topic settles deliveries of any topic",
                code="invalid_delivery",
            )
        return subscription

    return owner


def _ended() -> StaleDelivery:
    return StaleDelivery("the delivery has ended: it was settled already, or it timed out")


# --- fields of a JSON body ------------------------------------------------------------------------
def text_in(body: dict[str, Any], name: str, default: str) -> str:
    value = body.pop(name, None)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is a string")
    return value


def seconds_in(body: dict[str, Any], name: str, high: float) -> float | None:
    value = body.pop(name, None)
    if value is None:
        return None
    kind = Annotated[float, Meta(ge=0, le=int(high)), SECONDS]
    return float(check(name, value, kind, code=f"invalid_{name}"))

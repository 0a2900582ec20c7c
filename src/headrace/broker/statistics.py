"""What is said of a subscription when an operator asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.operations.results import SubscriptionStats

if TYPE_CHECKING:
    from headrace.broker.subscription import Subscription


def statistics_of(subscription: Subscription) -> SubscriptionStats:
    cursors = subscription.cursors
    places = sorted(cursors)  # there may be ten thousand: each is looked at once
    lags = [cursors[place].lag() for place in places]
    return {
        "name": subscription.name,
        "topic": subscription.pattern,
        "members": sum(not member.elsewhere for member in subscription.members),
        "lag": sum(lags),
        "in_flight": subscription.in_flight(),
        "waiting_for_retry": subscription.waiting_for_retry(),
        "paused": subscription.paused,
        "created": subscription.created_ms,
        "settings": subscription.settings.as_dict(),
        "partitions": [
            {
                "topic": place[0],
                "partition": place[1],
                "position": cursors[place].position,
                "end_offset": cursors[place].partition.log.end_offset,
                "lag": lag,
                "blocked": cursors[place].blocked,
            }
            for place, lag in zip(places, lags, strict=True)
        ],
        **subscription.tally.as_dict(),  # type: ignore[typeddict-item]
    }

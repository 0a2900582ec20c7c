"""What is said of a subscription when an operator asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.operations.results import SubscriptionStats

if TYPE_CHECKING:
    from headrace.broker.subscription import Subscription


def statistics_of(subscription: Subscription) -> SubscriptionStats:
    return {
        "name": subscription.name,
        "topic": subscription.pattern,
        "members": len(subscription.members),
        "lag": subscription.lag(),
        "in_flight": subscription.in_flight(),
        "waiting_for_retry": subscription.waiting_for_retry(),
        "paused": subscription.paused,
        "created": subscription.created_ms,
        "settings": subscription.settings.as_dict(),
        "partitions": [
            {
                "topic": topic,
                "partition": number,
                "position": cursor.position,
                "end_offset": cursor.partition.log.end_offset,
                "lag": cursor.lag(),
                "blocked": cursor.blocked,
            }
            for (topic, number), cursor in sorted(subscription.cursors.items())
        ],
        **subscription.tally.as_dict(),  # type: ignore[typeddict-item]
    }

"""The operations about delayed messages: a part of ``catalog.py``."""

from __future__ import annotations

from headrace.model import Scheduled
from headrace.operations.arguments import ExistingMessage, Limit, TopicFilter
from headrace.operations.declaring import deletion, operation, route


class DelayedOperations:
    """Messages that wait for their time."""

    @operation(permission="browse", about="topic", runs="leader")
    @route("GET", "/scheduled", "List delayed messages", tag="delayed messages")
    async def scheduled(
        self, topic: TopicFilter | None = None, *, limit: Limit = 1000
    ) -> list[Scheduled]:
        """Messages that wait for their time, soonest first.

        Example::

            for waiting in await client.scheduled("orders"):
                print(waiting.id, waiting.deliver_at)
        """

    @deletion(permission="manage", runs="leader", answer="cancelled")
    @route("DELETE", "/scheduled/{id}", "Cancel a delayed message", tag="delayed messages")
    async def cancel(self, id: ExistingMessage) -> None:
        """Cancel a delayed message: it is not published.

        Example::

            receipt = await client.publish("orders", b"later", delay=60)
            await client.cancel(receipt.id)
        """

    @operation(permission="manage", runs="leader", repeatable=False, answer="published")
    @route(
        "POST", "/scheduled/{id}/publish", "Publish a delayed message now", tag="delayed messages"
    )
    async def publish_now(self, id: ExistingMessage) -> None:
        """Publish a delayed message at once instead of at its time.

        Example::

            receipt = await client.publish("orders", b"later", delay=60)
            await client.publish_now(receipt.id)
        """

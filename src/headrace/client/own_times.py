"""The own times of messages that come from elsewhere, kept where the broker would change them.

Times never run backwards in a partition, and no message is from the future. The broker changes a time that breaks
this rule; the message then keeps its own time in the header ``headrace-time``, in milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.client.threads import BrokerClient
from headrace.clock import Clock
from headrace.log.columns import Headers

TIME_HEADER = "headrace-time"


class OwnTimes:
    """Knows the time of the last message in each partition, as far as it was written through this object."""

    def __init__(self, client: BrokerClient):
        self._client = client
        self._last: dict[tuple[str, int], int] = {}

    def kept(
        self, topic: str, partition: int, times: Sequence[int], headers: Sequence[Headers]
    ) -> list[Headers]:
        """The headers, with a message's own time where its time will change."""
        now = Clock().now_ms()
        last = self._last.get((topic, partition))
        if last is None:
            last = self._stored(topic, partition)
        found: list[Headers] = []
        for own, more in zip(times, headers, strict=True):
            if not last <= own <= now:
                more = {TIME_HEADER: str(own), **(more or {})}
            last = max(last, min(own, now))
            found.append(more)
        self._last[topic, partition] = last
        return found

    def _stored(self, topic: str, partition: int) -> int:
        place = self._client.positions([topic])[topic][partition]
        if place["end"] == place["start"]:
            return 0
        batches = self._client.fetch_batches(
            topic, place["end"] - 1, partition=partition, max_bytes=1
        )
        return batches[-1].max_timestamp if batches else 0

"""A subscription that has created its topic: perhaps the topic's name is misspelt.

Then nothing would ever arrive, without a word. A worker that starts before the first publish creates its
topic, too. So a warning is logged only if the topic is still empty after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from headrace.channels import Arrivals
from headrace.errors import HeadraceError

TopicStatsOf = Callable[[str], Awaitable[Mapping[str, Any]]]
logger = logging.getLogger("headrace.subscription")
EMPTY_S = 10.0
"""After this time an empty topic is worth a line."""
_tasks: set[asyncio.Task[None]] = set()
"""The event loop itself keeps no task alive."""


def watch(stats_of: TopicStatsOf, made: Mapping[str, Any], topic: str, consumer: Arrivals) -> None:
    """Called on the loop, by a member that has joined: look later, if the topic was created for it."""
    if made.get("topic_created"):
        loop = asyncio.get_running_loop()
        loop.call_later(EMPTY_S, lambda: _begin(loop, warn_if_empty(stats_of, topic, consumer)))


def _begin(loop: asyncio.AbstractEventLoop, looking: Coroutine[None, None, None]) -> None:
    task = loop.create_task(looking)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def warn_if_empty(stats_of: TopicStatsOf, topic: str, consumer: Arrivals) -> None:
    """Nothing was published so far, and the member still waits."""
    with contextlib.suppress(HeadraceError):
        partitions = [] if consumer.is_closed else (await stats_of(topic))["partitions"]
        if partitions and not any(part["end_offset"] for part in partitions):
            logger.warning(
                "%s waits for messages of %r, which did not exist and is still empty. Is the name right?",
                consumer.subscription_name,
                topic,
            )

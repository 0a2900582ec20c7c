"""What every test may use, and how random ones are run.

``make test`` tries the same examples each time, so that what fails there is what was changed.
``HYPOTHESIS_PROFILE=explore`` tries others, more of them, and prints what reproduces a failure
(``@reproduce_failure``, the smallest example); ``=thorough`` is for a night.
"""

import asyncio
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from headrace.server.watchdog import Watchdog
from headrace.testing import RunningServer

_COMMON = settings(
    deadline=None,  # a slow machine is not a bug
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("default", _COMMON, max_examples=60, derandomize=True)
settings.register_profile("explore", _COMMON, max_examples=200)
settings.register_profile("thorough", _COMMON, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

BLOCKED_S_MAX = 0.25
"""Processor time: the broker's own bound is 50 ms, and a test must not fail because a machine is slow."""


@pytest.fixture
def steady() -> Iterator[Callable[[RunningServer], None]]:
    """``steady(server)``: the test fails if something keeps the server's loop for too long."""
    watchdogs: list[Watchdog] = []

    def watch(server: RunningServer) -> None:
        def start() -> None:
            watchdog = Watchdog(asyncio.get_running_loop(), interval_s=0.005)
            watchdog.start()
            watchdogs.append(watchdog)

        server.call(start)

    yield watch
    found = [blocked for watchdog in watchdogs for blocked in watchdog.longest.values()]
    for watchdog in watchdogs:
        watchdog.stop()
    too_long = [blocked for blocked in found if blocked.processor_seconds > BLOCKED_S_MAX]
    assert not too_long, f"the loop was blocked: {too_long}"

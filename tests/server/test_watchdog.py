"""What kept the loop from everybody else, and for how long."""

import asyncio
import time

import pytest

from headrace.server.watchdog import BLOCKED_S, Watchdog
from headrace.testing import RunningServer, running_server, wait_until
from tests.fakes.steady import BLOCKED_S_MAX, Steadiness
from tests.server.http_rig import Http


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def blocked(server: RunningServer) -> Watchdog:
    """The server's own watchdog."""
    watchdog = server.server.hub.watchdog
    assert watchdog is not None
    return watchdog


def test_it_tells_who_blocked_the_loop_and_for_how_long(
    server: RunningServer,
    http: Http,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the log, and in the metrics."""
    watchdog, engine = blocked(server), server.engine
    original = engine.topics.find

    def slow(name: object) -> object:
        busy(6 * BLOCKED_S)
        return original(name)

    http.ask("POST", "/publish/orders", b"1")
    monkeypatch.setattr(engine.topics, "find", slow)
    while not watchdog.longest:  # it does not see each turn
        http.ask("GET", "/topics/orders/messages")
    (found,) = list(watchdog.longest.values())[:1]
    assert found.seconds > BLOCKED_S
    assert found.processor_seconds > BLOCKED_S
    assert "server.routes.on_fetch" in found.where
    assert "kept all clients waiting" in caplog.text
    monkeypatch.undo()
    text = http.ask("GET", "/metrics").body.decode()
    assert f'headrace_loop_blocked_seconds_count{{what="{found.what}"}}' in text
    assert f'headrace_loop_blocked_max_seconds{{what="{found.what}"}}' in text


def test_a_loop_that_only_waits_is_not_blocked() -> None:
    async def run() -> Watchdog:
        watchdog = Watchdog(asyncio.get_running_loop(), interval_s=0.001)
        watchdog.start()
        for _ in range(20):
            await asyncio.sleep(0.001)
        watchdog.stop()
        return watchdog

    found = asyncio.run(run()).longest
    assert not [each for each in found.values() if each.processor_seconds > BLOCKED_S]


def test_it_ends_with_its_loop() -> None:
    """A thread that asks a closed loop ends."""
    loop = asyncio.new_event_loop()
    watchdog = Watchdog(loop, interval_s=0.001)
    watchdog.start()
    thread = watchdog._thread
    loop.close()
    assert thread is not None
    wait_until(lambda: not thread.is_alive())


def test_a_server_that_stops_takes_its_watchdog_along(server: RunningServer) -> None:
    thread = blocked(server)._thread
    assert thread is not None
    server.stop()
    wait_until(lambda: not thread.is_alive())


def test_a_test_fails_when_the_loop_is_blocked() -> None:
    """In processor time: a loop that only waits for something is not blocked by its own work."""
    with running_server(memory=True) as server:
        good, bad = Steadiness(), Steadiness()
        good.watch(server)
        for _ in range(3):
            server.call(time.sleep, 2 * BLOCKED_S_MAX)
        good.check()
        bad.watch(server)
        for _ in range(3):
            server.call(busy, 3 * BLOCKED_S_MAX)
    with pytest.raises(AssertionError, match="the loop was blocked"):
        bad.check()

"""A subscription that has created its topic."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import AsyncClient, Broker, misspelt
from headrace.testing import RunningServer, running_server, wait_until

TOLD = "billing waits for messages of 'ordres', which did not exist and is still empty. Is the name right?"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misspelt, "EMPTY_S", 0.0)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said here. Other loggers have the levels that earlier tests have given them."""
    return [each.getMessage() for each in caplog.records if each.name == misspelt.logger.name]


def test_a_worker_says_that_its_topic_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    """It would wait for ever without a word, with a server and without one."""
    with running_server(memory=True) as server, server.client() as client:
        client.subscribe_to_subscription("billing", print, "ordres")
        wait_until(lambda: told(caplog) == [TOLD])
        caplog.clear()
        client.delete_topic("ordres")
        asyncio.run(_until_told(server, caplog))
    caplog.clear()
    with Broker.open() as broker:
        broker.subscription("billing", "ordres")
        wait_until(lambda: told(caplog) == [TOLD])


async def _until_told(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        AsyncClient(*server.address) as client,
        client.subscription("billing", "ordres"),
        asyncio.timeout(10),
    ):
        while TOLD not in told(caplog):
            await client.topics()


def test_nothing_is_said_of_a_topic_that_is_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It existed before, is not empty any more, or nobody waits: it was closed, or the topic was deleted."""
    looked: list[str] = []

    def looking(stats_of: Any, topic: str, consumer: Any) -> Any:
        looked.append(topic)
        return asyncio.sleep(0)

    with Broker.open() as broker:
        waiting, stats_of = (
            SimpleNamespace(is_closed=False, subscription_name="billing"),
            broker._core.topic_stats,
        )
        broker.publish("used", b"x")
        broker._run(misspelt.warn_if_empty(stats_of, "used", waiting))  # type: ignore[arg-type]
        broker._run(misspelt.warn_if_empty(stats_of, "deleted", waiting))  # type: ignore[arg-type]
        broker.create_topic("empty")
        waiting.is_closed = True
        broker._run(misspelt.warn_if_empty(stats_of, "empty", waiting))  # type: ignore[arg-type]
        monkeypatch.setattr(misspelt, "warn_if_empty", looking)
        for topic in ("empty", "orders.*", "new"):
            broker.subscription("billing", topic)
        wait_until(lambda: looked)
    assert (looked, told(caplog)) == (["new"], [])

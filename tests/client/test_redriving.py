"""Redrives with real clients: however long they take, and stopped when nobody waits any more."""

import asyncio
import threading
from typing import Any

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.client import remote
from headrace.errors import Closed, OutcomeUnknown
from headrace.testing import RunningServer, wait_until


def bury(client: BrokerClient, count: int) -> None:
    with client.subscription("email", "orders", max_deliveries=1) as messages:
        client.publish_many("orders", [b"x"] * count)
        for _ in range(count):
            messages.get(timeout=10).nack(reason="no")
    wait_until(lambda: client.subscription_stats("email")["dead_lettered"] == count)


def only(client: BrokerClient) -> dict[str, Any]:
    [found] = client.redrives("email")
    return dict(found)


def test_a_redrive_takes_longer_than_a_request(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again and again, and returns when the last letter is redriven."""
    monkeypatch.setattr(remote, "REDRIVE_WAIT_S", 0.05)
    bury(client, 8)
    with server.client(request_timeout=0.2) as hasty:
        result = hasty.redrive("email", rate=20)
    assert (result["state"], result["redriven"], result["left"]) == ("done", 8, 0)


def test_another_client_stops_it(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits gets what was done until then."""
    monkeypatch.setattr(remote, "REDRIVE_WAIT_S", 0.05)
    bury(client, 5)
    results: list[Any] = []
    with server.client() as waiting:
        thread = threading.Thread(
            target=lambda: results.append(waiting.redrive("email", rate=0.01))
        )
        thread.start()
        wait_until(lambda: client.redrives("email"))
        client.stop_redrive("email", only(client)["id"])
        thread.join()
    assert (results[0]["state"], results[0]["redriven"], results[0]["left"]) == ("stopped", 1, 4)
    assert len(client.dead_letters("email")) == 4


def test_a_cancelled_call_stops_it(server: RunningServer, client: BrokerClient) -> None:
    """As ``asyncio.timeout`` does it, and Ctrl-C during a call of a client with threads."""
    bury(client, 3)

    async def scenario() -> None:
        async with AsyncClient(*server.address) as other:
            task = asyncio.create_task(other.redrive("email", rate=0.01))
            await asyncio.to_thread(wait_until, lambda: client.redrives("email"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert (only(client)["state"], only(client)["redriven"]) == ("stopped", 1)


def test_a_client_that_is_gone_stops_it(server: RunningServer, client: BrokerClient) -> None:
    """When its lease ends; one with ``wait`` has none, and goes on."""
    bury(client, 4)
    with server.client() as gone:
        begun = gone.redrive("email", rate=0.01, wait=0, lease=1)
        free = gone.redrive("email", rate=0.01, wait=0)
    ended = client.redrive_progress("email", free["id"], wait=1.2)
    assert ended["state"] == "running"
    states = {each["id"]: each["state"] for each in client.redrives("email")}
    assert states == {begun["id"]: "stopped", free["id"]: "running"}


def test_a_broker_that_was_started_again_knows_nothing(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is unknown, and says what to do; no letter is redriven twice."""
    monkeypatch.setattr(remote, "REDRIVE_WAIT_S", 0.05)
    bury(client, 3)
    errors: list[Exception] = []

    def redrive() -> None:
        try:
            waiting.redrive("email", rate=0.01)
        except (OutcomeUnknown, Closed) as error:
            errors.append(error)

    with server.client() as waiting:
        thread = threading.Thread(target=redrive)
        thread.start()
        wait_until(lambda: client.redrives("email") and only(client)["redriven"] == 1)
        server.restart()
        thread.join()
    assert len(errors) == 1
    wait_until(lambda: client.is_connected)
    assert client.redrives("email") == []
    assert client.redrive("email")["redriven"] == 2

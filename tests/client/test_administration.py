"""Administration by name, with real clients against a real server."""

import asyncio
from typing import Any

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.errors import Conflict, InvalidArgument, NotFound
from headrace.testing import RunningServer

RUNNING: dict[str, Any] = {
    "state": "running",
    "run_id": "r1",
    "started_at": 1000,
    "queries": [{"name": "orders", "batch_id": 3, "input_rows": 10, "sink": "delta"}],
}


def test_a_pipeline_reports_and_is_stopped(client: BrokerClient) -> None:
    """What it says is shown to all; what others wish is in the next answer."""
    assert client.report_pipeline("daily", RUNNING) == {"stop": False}
    [shown] = client.pipelines()
    assert (shown["name"], shown["state"], shown["stale"]) == ("daily", "running", False)
    assert shown["queries"][0]["input_rows"] == 10
    client.stop_pipeline("daily")
    assert client.report_pipeline("daily", RUNNING) == {"stop": True}
    assert client.report_pipeline("daily", {**RUNNING, "state": "stopped"}) == {"stop": False}
    assert client.pipeline_stats("daily")["state"] == "stopped"


def test_mistakes_come_back_as_they_were_made(client: BrokerClient) -> None:
    """The classes and codes of the broker."""
    with pytest.raises(NotFound, match="pipeline_not_found"):
        _named(lambda: client.stop_pipeline("daily"))
    with pytest.raises(InvalidArgument, match="invalid_report"):
        _named(lambda: client.report_pipeline("daily", {"state": "running"}))
    client.report_pipeline("daily", {**RUNNING, "state": "failed"})
    with pytest.raises(Conflict, match="pipeline_not_running"):
        _named(lambda: client.stop_pipeline("daily"))


def _named(call: Any) -> None:
    """Raise what it raises, with the code in place of the sentence."""
    try:
        call()
    except (NotFound, InvalidArgument, Conflict) as error:
        raise type(error)(error.code) from error


def test_the_same_with_asyncio(server: RunningServer) -> None:
    """One implementation under both."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            assert await client.report_pipeline("daily", RUNNING) == {"stop": False}
            await client.stop_pipeline("daily")
            assert [shown["stopping"] for shown in await client.pipelines()] == [True]
            await client.report_pipeline("daily", {**RUNNING, "state": "finished"})
            assert (await client.pipeline_stats("daily"))["state"] == "finished"

    asyncio.run(main())

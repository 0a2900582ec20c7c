"""``headrace traffic``: told to topics and tables, shown from either."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import BrokerClient
from tests.cli.rig import Command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)


def test_run_and_show(
    spark: SparkSession, headrace: Command, client: BrokerClient, tmp_path: Path
) -> None:
    """One run into both, and what it told is shown; a second has nothing to tell."""
    client.publish_many("orders", [b"x" * 10] * 30, timestamps=[NOON + 100 * n for n in range(30)])
    for rows in ("2 rows", "0 rows"):
        ran = headrace("traffic", "run", "--once", "--to", tmp_path, "--to-topic", "watch")
        assert ran.code == 0, ran.err
        assert f"traffic finished: {rows} to table {tmp_path}/traffic" in ran.lines[-1]
    [reported] = client.pipelines()
    assert (reported["name"], reported["state"]) == ("traffic", "finished")
    for more in (["--prefix", "watch"], ["--from", tmp_path]):
        shown = headrace("traffic", "show", *more)
        assert shown.code == 0, shown.err
        assert " ".join(shown.rows[1]) == (
            "2026-01-31 12:00 orders 30 0.5 300 B 10 / 10 / 10 / 10 0 100 ms / 100 ms"
        )
    assert headrace("traffic", "show", "other", "--prefix", "watch").lines == [
        "There was no traffic."
    ]
    [row] = headrace("traffic", "show", "orders", "--from", tmp_path, "--json").json
    assert (row["minute"], row["messages"], row["keys"]) == ("2026-01-31T12:00:00Z", 30, 0)


def test_deliveries_are_shown(headrace: Command, client: BrokerClient) -> None:
    client.publish(
        "headrace.deliveries",
        b'{"minute":"2026-01-31T12:00:00Z","subscription":"email","topic":"orders","delivered":7,'
        b'"acked":5,"nacked":2,"redelivered":1,"latency_avg_ms":1.5,"latency_p99_ms":20,'
        b'"latency_max_ms":12000,"lag":3,"dead_letters":{"no stock":1}}',
    )
    shown = headrace("traffic", "show", "--deliveries")
    assert " ".join(shown.rows[1]) == (
        "2026-01-31 12:00 email 7 5 2 1 2 ms / 20 ms / 12.0 s 3 1 no stock"
    )


def test_mistakes(headrace: Command, client: BrokerClient, tmp_path: Path) -> None:
    """Each is a sentence, before Spark is started."""
    for arguments, message in (
        (["run", "nowhere"], "there is no topic 'nowhere'"),
        (["run", "--format", "delta"], "--format is for tables"),
        (["run", "--to-topic", "bad name"], "not a valid name"),
        (["run", "--since", "soon"], "--since"),
        (["show"], "nothing was told to headrace.traffic yet"),
        (["show", "--from", tmp_path], "there is no table"),
    ):
        ran = headrace("traffic", *arguments)
        assert (ran.code, ran.out) == (2, ""), (arguments, ran)
        assert message in ran.err

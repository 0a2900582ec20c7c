"""``headrace archive``: run, list, show, verify, compact, and what people get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import BrokerClient
from headrace.spark import lake
from headrace.spark.lake.tables import find_table
from tests.cli.rig import Command
from tests.spark.lake.rig import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


def test_from_topic_to_proof(
    spark: SparkSession, headrace: Command, client: BrokerClient, tmp_path: Path
) -> None:
    """What was archived is listed and verified; what is tampered with is found out."""
    client.publish_many("orders", [b"order %d" % number for number in range(100)])
    table = tmp_path / "lake" / "orders"
    ran = headrace("archive", "run", "orders", "--to", table, "--once", "--group", "keeper")
    assert ran.code == 0, ran.err
    assert ran.lines[-1] == "keeper finished: 100 rows"
    [group] = [each for each in client.subscriptions() if each["name"] == "keeper"]
    assert group["lag"] == 0
    [reported] = client.pipelines()
    assert (reported["name"], reported["state"]) == ("keeper", "finished")

    listed = headrace("archive", "list", tmp_path / "lake")
    assert listed.rows[1][1:4] == ["delta", "100", "1"]
    shown = headrace("archive", "show", table)
    assert "delta, version 1, 100 rows in 1 file" in shown.lines[0]
    assert shown.rows[-1] == ["orders", "0", "0", "100", "100", "0"]
    assert headrace("archive", "show", table, "--json").json["offsets"] == {
        "orders": {"0": [[0, 100]]}
    }

    client.publish("orders", b"one more")
    good = headrace("archive", "verify", table)
    assert good.code == 0
    assert good.lines == [
        "not archived yet: 1 record",
        f"{table} and the log hold the same: 100 records compared",
    ]
    [path] = find_table(str(table)).paths()
    rows = pq.read_table(path, partitioning=None).to_pylist()
    rows[17]["value"] = b"forged"
    changed = pa.Table.from_pylist(rows, schema=pq.read_schema(path))
    pq.write_table(changed, path)
    bad = headrace("archive", "verify", table, "orders")
    assert bad.code == 1
    assert "orders/0@17 is not the same in the table as in the log" in bad.lines
    found = headrace("archive", "verify", table, "--json")
    assert found.code == 1
    assert found.json["differences"] == [
        {"kind": "changed", "topic": "orders", "partition": 0, "start": 17, "end": 18}
    ]


def test_compact(headrace: Command, tmp_path: Path) -> None:
    for number in range(3):
        append(pa.table({"n": [number]}), path=str(tmp_path), app_id="x", number=number)
    ran = headrace("archive", "compact", tmp_path, "--vacuum")
    assert ran.lines == ["joined 3 files into 1", "deleted 0 files"]
    assert lake.describe(str(tmp_path)).files == 1


def test_mistakes(headrace: Command, client: BrokerClient, tmp_path: Path) -> None:
    """Each is a sentence, before Spark is started."""
    client.publish("orders", b"x")
    for arguments, message in (
        (["run", "nowhere", "--to", tmp_path / "t"], "there is no topic 'nowhere'"),
        (["run", "orders", "--to", "ftp://host/x"], "is not a directory"),
        (["run", "orders", "--to", tmp_path / "t", "--format", "parquet"], "use delta, or iceberg"),
        (["run", "orders", "--to", tmp_path / "t", "--format", "xls"], "one of delta, iceberg"),
        (["verify", tmp_path / "t"], "there is no table at"),
        (["show", tmp_path], "there is no table at"),
        (["list", tmp_path / "t"], "there is no directory"),
        (["compact", tmp_path], "there is no table at"),
    ):
        ran = headrace("archive", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert message in ran.err
    assert headrace("archive", "list", tmp_path).lines == ["No tables."]

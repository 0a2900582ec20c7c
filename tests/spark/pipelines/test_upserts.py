"""Pipelines that merge their rows into a table, from end to end."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.spark import lake
from headrace.spark.pipelines.declaration import Pipeline
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.planning import plan
from headrace.testing import RunningServer
from tests.spark.pipelines.rig import Bench

FILE = """
    [pipeline.accounts]
    from = "accounts"
    format = "json"
    schema = "op STRING, id BIGINT, owner STRING, at BIGINT"
    expect = ["op = 'd' OR owner <> 'nobody'"]
    sql = "SELECT id, owner, at, op = 'd' AS _deleted FROM accounts"
    to = { table = "lake/accounts", merge_on = ["id"], order_by = "at" }
    failed = true

    [pipeline.totals]
    from = "accounts"
    format = "json"
    schema = "owner STRING, at BIGINT"
    sql = "SELECT owner, count(*) AS changes FROM accounts WHERE owner IS NOT NULL GROUP BY owner"
    to = { table = "lake/totals", format = "iceberg", merge_on = "owner", delete = false }
    mode = "complete"
"""


def change(op: str, key: int | None, owner: str | None, at: int) -> dict[str, Any]:
    return {"op": op, "id": key, "owner": owner, "at": at}


@pytest.mark.xdist_group("spark")
def test_changes_become_a_table(spark: Any, server: RunningServer, tmp_path: Path) -> None:
    """The last row of each key, over two runs; deletions, late rows, rows without a key; groups as they are."""
    bench = Bench(spark, server, tmp_path)
    path = bench.write("changes.toml", FILE)
    bench.publish(
        "accounts",
        change("c", 1, "ann", 1), change("c", 2, "bob", 1), change("u", 1, "cid", 2),
        change("c", None, "dan", 1), change("c", 3, "eve", 5), change("c", 5, "nobody", 1),
    )  # fmt: skip

    def table(name: str) -> dict[Any, Any]:
        rows = lake.read(spark, str(tmp_path / "lake" / name)).collect()
        assert len({row[0] for row in rows}) == len(rows)
        return {row[0]: row[1] for row in rows}

    bench.run_once(path)
    assert table("accounts") == {1: "cid", 2: "bob", 3: "eve"}
    assert table("totals") == dict.fromkeys(["ann", "bob", "cid", "dan", "eve", "nobody"], 1)
    bench.publish(
        "accounts",
        change("d", 2, None, 3), change("u", 3, "late", 4), change("u", 1, "ann", 3), change("c", 4, "fay", 1),
    )  # fmt: skip
    bench.run_once(path)
    assert table("accounts") == {1: "ann", 3: "eve", 4: "fay"}
    assert table("totals")["ann"] == 2
    with server.client() as client:
        reasons = {letter.reason for letter in client.dead_letters("accounts")}
    assert reasons == {"the key id is null", "expected op = 'd' OR owner <> 'nobody'"}


def read(folder: Path, text: str) -> Pipeline:
    path = folder / "x.toml"
    path.write_text(text)
    (pipeline,) = load(path).pipelines
    return pipeline


JSON = '[pipeline.p]\nfrom = "a"\nformat = "json"\nschema = "id STRING, x DOUBLE"\n'


@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('to = { table = "t", merge_on = "nr" }', "to.merge_on: there is no column 'nr'; there are id, x"),
        ('to = { table = "t", merge_on = "x" }', "to.merge_on: column 'x' of type double cannot be a key"),
        ('to = { table = "t", merge_on = "id", order_by = "at" }', "to.order_by: there is no column 'at'"),
        ('sql = "SELECT id FROM input"\nto = { table = "t", merge_on = "id" }', "to.delete: say which rows delete"),
        ('to = { table = "t", merge_on = "id", delete = "op = 1" }', "to.delete: A column, variable"),
    ],
)  # fmt: skip
def test_mistakes(spark: Any, tmp_path: Path, text: str, complaint: str) -> None:
    """They are found before anything runs, with the key."""
    with pytest.raises(InvalidArgument) as caught:
        plan(read(tmp_path, JSON + text), spark, str(tmp_path / "ck"))
    assert complaint in caught.value.message


@pytest.mark.xdist_group("spark")
def test_tombstones_have_the_key_of_the_record(spark: Any, tmp_path: Path) -> None:
    """Without SQL, a record without a value deletes; its key fills the columns of the key."""
    from headrace.spark.pipelines.inputs import _with_keys_of_tombstones

    def filled(rows: str, merge_on: tuple[str, ...]) -> list[tuple[Any, ...]]:
        frame = spark.sql(f"SELECT * FROM VALUES {rows}").toDF("id", "day", "_key", "_value")
        frame = frame.selectExpr(
            "id", "day", "CAST(_key AS BINARY) _key", "CAST(_value AS BINARY) _value"
        )
        found = _with_keys_of_tombstones(frame, merge_on)
        return [tuple(row) for row in found.select("id", "day").collect()]

    rows = "(1, 'mon', '7', '{}'), (CAST(NULL AS INT), NULL, '8', NULL), (NULL, NULL, 'x', NULL)"
    assert filled(rows, ("id",)) == [(1, "mon"), (8, None), (None, None)]
    rows = """(1, 'mon', '7', '{}'), (CAST(NULL AS INT), NULL, '{"id": 8, "day": "tue"}', NULL)"""
    assert filled(rows, ("id", "day")) == [(1, "mon"), (8, "tue")]
    query = plan(
        read(tmp_path, JSON + 'to = { table = "t", merge_on = "id" }'), spark, str(tmp_path / "ck")
    )
    assert query.queries[0].rows.columns == ["id", "x", "_deleted"]

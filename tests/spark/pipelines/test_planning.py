"""What only Spark can tell is wrong with a pipeline, told before it is started."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.planning import plan
from headrace.spark.pipelines.sections import InvalidPipeline
from headrace.spark.source.rows import RECORD

pytestmark = pytest.mark.xdist_group("spark")

JSON = 'format = "json"\nschema = "id STRING, amount DOUBLE, at TIMESTAMP"'


def planned(spark: Any, folder: Path, text: str, name: str = "x.toml") -> Any:
    path = folder / name
    path.write_text(text)
    (pipeline,) = load(path).pipelines
    return plan(pipeline, spark, str(folder / "ck"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f'{JSON}\nsql = "SELECT amout FROM orders"\nto = "b"', "sql: A column, variable, or"),
        (f'{JSON}\nsql = "SELECT * FORM orders"\nto = "b"', "sql: Syntax error at or near"),
        (f'{JSON}\nsql = "SELECT * FROM nothing"\nto = "b"', "sql: The table or view `nothing`"),
        ('sql = "SELECT 1 AS value"\nto = "b"', "sql: it reads none of the topics"),
        (
            f'{JSON}\nsql = "SELECT id, sum(amount) AS s FROM orders GROUP BY id"\nto = "b"',
            "sql: Invalid streaming output mode: append",
        ),
        ('format = "json"\nschema = "id STRUNG"\nto = "b"', "schema: Unsupported data type"),
        ('format = "json"\nschema = "_key STRING"\nto = "b"', "schema: _key is a column of the"),
        (f'{JSON}\nwatermark = "id 1 hour"\nto = "b"', "watermark: "),
        (f'{JSON}\nwatermark = "at 1 hour"\ndeduplicate = "nr"\nto = "b"', "deduplicate: "),
        (f'{JSON}\nexpect = "amnt > 0"\nfailed = true\nto = "b"', "expect: A column, variable,"),
        (f'{JSON}\nexpect = "amount"\nfailed = true\nto = "b"', "expect: "),
        (f'{JSON}\nensure = "amnt > 0"\nfailed = true\nto = "b"', "ensure: A column, variable,"),
        (
            f'{JSON}\nsql = "SELECT id FROM input"\nto = {{ topic = "b", key = "nr" }}',
            "to.key: there is no column 'nr'; there are id",
        ),
        (
            f'{JSON}\nto = {{ table = "t", partition_by = "day" }}',
            "to.partition_by: there is no column 'day'; there are id, amount, at",
        ),
        (f'{JSON}\nsql = "SELECT _offset FROM input"\nto = "b"', "to: no column is left"),
        (
            f'{JSON}\nsql = "SELECT id, id AS _failed FROM input"\nto = "b"',
            "failed: the rows have a column _failed",
        ),
        ('function = "nowhere:f"\nto = "b"', "function: No module named 'nowhere'"),
        ('function = "os:getcwd_"\nto = "b"', "function: module 'os' has no attribute"),
        ('function = "os:getcwd"\nto = "b"', "function os:getcwd: "),
        ('spark = { "sql.shuffle.partitions" = "x" }\nto = "b"', "spark: "),
        (
            'options = { startingOfsets = "x" }\nto = "b"',
            "options: there is no option startingofsets",
        ),
        ('starting = "soon"\nto = "b"', "starting: option startingOffsets: it is earliest,"),
        ('to = { topic = "b", options = { appid = "a b" } }', "to.options: "),
        ('to = { table = "b", options = { compresion = "x" } }', "to.options: "),
    ],
)
def test_a_mistake_is_named(spark: Any, tmp_path: Path, text: str, complaint: str) -> None:
    """With its place; nothing was started, and no broker was asked."""
    with pytest.raises(InvalidPipeline) as caught:
        planned(spark, tmp_path, f'[pipeline.p]\nfrom = "orders"\n{text}\n')
    assert re.search(rf"x\.toml(:\d+)?, pipeline p: {re.escape(complaint)}", caught.value.message)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "ck").exists()


def test_what_comes_out(spark: Any, tmp_path: Path) -> None:
    """The columns of a message, or those of a table; two queries where they must be two."""
    (query,) = planned(
        spark, tmp_path, f'[pipeline.p]\nfrom = "orders"\n{JSON}\nto = "b"\nfailed = true'
    ).queries
    assert query.rows.columns == ["key", "value", "headers", "topic"]
    main, failed = planned(
        spark,
        tmp_path,
        f'[pipeline.p]\nfrom = "orders"\n{JSON}\nto = {{ table = "t" }}\nfailed = true',
    ).queries
    assert main.rows.columns == ["id", "amount", "at"]
    assert failed.rows.columns == ["key", "value", "headers", "topic"]
    assert (failed.name, failed.checkpoint) == ("p.failed", f"{tmp_path}/ck.failed")
    complete, rest = planned(
        spark,
        tmp_path,
        f'[pipeline.p]\nfrom = "orders"\n{JSON}\nmode = "complete"\nto = "b"\nfailed = true\n'
        'sql = "SELECT id, count(*) AS n FROM input GROUP BY id"',
    ).queries
    assert (complete.mode, rest.mode) == ("complete", "append")


def test_functions_get_what_they_ask_for(spark: Any, tmp_path: Path) -> None:
    """Several inputs by name, and the session; each pipeline has a session of its own."""
    text = """
from headrace.spark.pipelines import pipeline

@pipeline(
    to="b",
    inputs={"one": {"from": "a"}, "two": {"table": "t.json", "format": "json", "schema": "k STRING"}},
    spark={"sql.ansi.enabled": False},
)
def joined(two, spark, one):
    assert spark.conf.get("spark.sql.ansi.enabled") == "false"
    one.createOrReplaceTempView("mine")
    return spark.table("mine").join(two, one.key == two.k).select("value")
"""
    (tmp_path / "t.json").write_text(json.dumps({"k": "x"}))
    (query,) = planned(spark, tmp_path, text, "joins.py").queries
    assert sorted(query.rows.columns) == ["headers", "key", "topic", "value"]
    assert not spark.catalog.tableExists("mine")
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


@pytest.mark.parametrize(
    ("text", "asked_for"),
    [
        (f'{JSON}\nsql = "SELECT id, _key IS NULL AS k FROM input"\nto = "b"', ["_key"]),
        (f'{JSON}\nsql = "SELECT id, _key FROM input WHERE amount > 0"\nto = "b"', ["_key"]),
        (f'{JSON}\nwatermark = "_timestamp 1 hour"\ndeduplicate = "_id"\nto = "b"\n'
         'sql = "SELECT id FROM input"', ["_timestamp", "_id"]),
        (f'{JSON}\nto = "b"', ["_key", "_value", "_headers"]),
        (f'{JSON}\nsql = "SELECT id FROM input UNION ALL SELECT _topic FROM input"\nto = "b"',
         ["_topic"]),
        (f'{JSON}\nsql = "SELECT a.id FROM input a JOIN input b ON a.id = b._id"\nto = "b"', ["_id"]),
        ('sql = "WITH x AS (SELECT value FROM input) SELECT value FROM x"\nto = "b"', ["value"]),
        (f'{JSON}\nsql = "SELECT * FROM input"\nto = "b"', [f"_{name}" for name in RECORD]),
        ('sql = "SELECT 1 AS one FROM input"\nto = "b"', ["offset"]),
    ],
)  # fmt: skip
def test_only_what_is_used_is_read(
    spark: Any, tmp_path: Path, text: str, asked_for: list[str]
) -> None:
    """Columns of a record that the text does not mention are not asked of the source."""
    (query,) = planned(spark, tmp_path, f'[pipeline.p]\nfrom = "orders"\n{text}\n').queries
    plan_text = query.rows._jdf.queryExecution().analyzed().toString()
    leaves = [line for line in plan_text.splitlines() if "StreamingRelationV2" in line]
    assert leaves
    for leaf in leaves:
        names = [name.split("#")[0] for name in leaf.split("], [")[1].split("]")[0].split(", ")]
        assert [
            name for name in names if name not in ("id", "amount", "at", "_corrupt")
        ] == asked_for

"""The checkpoint knows its query: which changes go on, and which are refused."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.spark.pipelines import identity
from headrace.spark.pipelines.declaration import Pipeline
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.identity import (
    QueryChanged,
    QueryIdentity,
    check_continues,
    source_topics,
    state_of,
)
from headrace.spark.pipelines.planning import plan
from headrace.spark.pipelines.restarting import beginning_at, set_aside

WINDOWS = """
    [pipeline.p]
    from = "orders"
    format = "json"
    schema = "id STRING, customer STRING, amount DOUBLE, at TIMESTAMP"
    watermark = "at 10 minutes"
    sql = '''
      SELECT customer, window(at, '10 seconds').start AS start, sum(amount) AS total
      FROM orders GROUP BY customer, window(at, '10 seconds')
    '''
    to = { topic = "out", key = "customer" }
"""
COPY = """
    [pipeline.p]
    from = ["orders", "returns"]
    format = "json"
    schema = "id STRING, amount DOUBLE"
    sql = "SELECT id, amount FROM input"
    to = "out"
"""
JOIN = """
    [pipeline.p]
    sql = "SELECT o.id, s.at FROM o JOIN s ON o.id = s.id AND s.at BETWEEN o.at AND o.at + INTERVAL 1 HOUR"
    to = "out"
    [pipeline.p.inputs.o]
    from = "orders"
    format = "json"
    schema = "id STRING, at TIMESTAMP"
    watermark = "at 1 hour"
    [pipeline.p.inputs.s]
    from = "shipments"
    format = "json"
    schema = "id STRING, at TIMESTAMP"
    watermark = "at 1 hour"
"""
UNIQUE = """
    [pipeline.p]
    from = "orders"
    format = "json"
    schema = "id STRING, other STRING, amount DOUBLE"
    watermark = "_timestamp 1 hour"
    deduplicate = "id"
    to = "out"
"""
FUNCTION = """
    from pyspark.sql import functions as F
    from headrace.spark.pipelines import pipeline

    @pipeline(from_="orders", to="out", mode="complete")
    def p(rows):
        # 1
        return rows.groupBy("key").agg(F.count("*").alias("n"))
"""


def written(folder: Path, text: str) -> Pipeline:
    suffix = "py" if "import" in text else "toml"
    path = folder / f"file.{suffix}"
    path.write_text(textwrap.dedent(text))
    (pipeline,) = load(path).pipelines
    return pipeline


def compared(spark: Any, folder: Path, text: str, *changes: tuple[str, str]) -> list[str]:
    """Plan a file, change it, plan it again, and compare the two."""
    before = plan(written(folder, text), spark, str(folder / "ck")).queries[0].identity
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    pipeline = written(folder, text)
    after = plan(pipeline, spark, str(folder / "ck")).queries[0].identity
    assert before is not None
    assert after is not None
    stored = QueryIdentity.of_bytes(before.as_bytes())
    assert stored == before
    return check_continues(pipeline, "ck", before, after)


@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize(
    ("text", "changes", "keys"),
    [
        (WINDOWS, [], []),
        (WINDOWS, [("SELECT customer,", "SELECT  customer ,")], ["sql"]),
        (WINDOWS, [("AS total", "AS sum_of_all")], ["sql"]),
        (WINDOWS, [("'10 seconds')\n    '''", "'10 seconds')\n      HAVING sum(amount) > 5\n    '''")], ["sql"]),
        (WINDOWS, [("at TIMESTAMP", "at TIMESTAMP, more STRING")], ["schema"]),
        (WINDOWS, [("10 minutes", "1 hour"), ('key = "customer"', 'key = "start"')], []),
        (WINDOWS, [("    to =", "    trigger = '5 s'\n    options = { maxOffsetsPerTrigger = 5 }\n    to =")], []),
        (COPY, [("SELECT id, amount", "SELECT id"), ("FROM input", "FROM input WHERE amount > 3")], ["sql"]),
        (COPY, [("amount DOUBLE", "amount INT, more STRING")], ["schema"]),
        (COPY, [('["orders", "returns"]', '["orders", "returns", "more.*"]')], ["from"]),
        (COPY, [('["orders", "returns"]', '">"'), ('"out"', '{ topic = "out", key = "id" }')], None),
        (COPY, [('to = "out"', 'to = "out"\n    failed = true\n    expect = "amount > 0"')], ["expect"]),
        (JOIN, [("    watermark = \"at 1 hour\"", "    watermark = \"at 2 hours\"")], []),
        (UNIQUE, [("other STRING", "other INT")], ["schema"]),
        (FUNCTION, [("# 1", "# 2")], []),
    ],
)  # fmt: skip
def test_what_goes_on(
    spark: Any, tmp_path: Path, text: str, changes: list[tuple[str, str]], keys: list[str] | None
) -> None:
    """Rates, messages, and whatever does not touch the state; the changed keys are known."""
    if keys is None:  # a wildcard would read the output
        with pytest.raises(InvalidArgument, match="it would never end"):
            compared(spark, tmp_path, text, *changes)
        return
    assert compared(spark, tmp_path, text, *changes) == keys


@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize(
    ("text", "changes", "complaint"),
    [
        (WINDOWS, [("10 seconds", "20 seconds")], "sql: it has changed (it was '10 seconds').start"),
        (WINDOWS, [("sum(amount)", "max(amount)")], "(it was sum(amount), it is max(amount))"),
        (WINDOWS, [("FROM orders GROUP", "FROM orders WHERE amount > 1 GROUP")], "it was absent, it is WHERE"),
        (WINDOWS, [("amount DOUBLE", "amount INT")], "schema: it has changed"),
        (WINDOWS, [("GROUP BY customer, window", "GROUP BY window"), ("SELECT customer,", "SELECT 'x' AS customer,")],
         "holds state that the old query made"),
        (WINDOWS, [("sum(amount) AS total\n      FROM orders GROUP BY customer, window(at, '10 seconds')", "1 AS n FROM orders")],
         "holds state of groups or rows that would never be written"),
        (WINDOWS, [('from = "orders"', 'from = "orders2"'), ("FROM orders", "FROM orders2")],
         "from: it has changed (it was orders, it is orders2), and the checkpoint ck holds positions of orders"),
        (COPY, [('"returns"]', '"other"]')], "holds positions of returns for this input"),
        (COPY, [('to = "out"', 'to = "elsewhere"')], "to: it has changed (it was out, it is elsewhere)"),
        (COPY, [('schema = "id STRING, amount DOUBLE"', 'schema = "id STRING, amount DOUBLE"\n    '
                 'watermark = "_timestamp 1 hour"\n    deduplicate = "id"')],
         "is of a query without state, which this one needs"),
        (JOIN, [("INTERVAL 1 HOUR", "INTERVAL 2 HOURS")], "holds state that the old query made"),
        (JOIN, [("FROM o JOIN s", "FROM s JOIN o")], "holds positions of orders for this input (source 0)"),
        (UNIQUE, [('deduplicate = "id"', 'deduplicate = ["id", "other"]')], "deduplicate: it has changed"),
        (FUNCTION, [('F.count("*")', 'F.max("offset")')], "function: it has changed, and"),
    ],
)  # fmt: skip
def test_what_is_refused(
    spark: Any, tmp_path: Path, text: str, changes: list[tuple[str, str]], complaint: str
) -> None:
    """With the key, what it was and is, why it cannot go on, and what to do."""
    with pytest.raises(QueryChanged) as caught:
        compared(spark, tmp_path, text, *changes)
    assert complaint in caught.value.message
    assert "--reset" in caught.value.message
    assert caught.value.code == "query_changed"


def test_another_version_of_spark(tmp_path: Path) -> None:
    """Plans of two versions are not compared: the same file goes on, a changed one does not."""
    pipeline = written(tmp_path, WINDOWS)
    old = QueryIdentity({"sql": "a"}, state=("x",), spark="4.0")
    assert check_continues(pipeline, "ck", old, QueryIdentity({"sql": "a"}, state=("y",))) == []
    with pytest.raises(QueryChanged, match="one after the other"):
        check_continues(pipeline, "ck", old, QueryIdentity({"sql": "b"}, state=("y",)))
    stateless = QueryIdentity({"sql": "a"}, spark="4.0")
    assert check_continues(pipeline, "ck", stateless, QueryIdentity({"sql": "b"})) == ["sql"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version": 9}', b"\xff"])
def test_a_file_that_is_none(content: bytes) -> None:
    """It is as if it were not there: the checkpoint is accepted, as those of older versions."""
    assert QueryIdentity.of_bytes(content) is None


LEAF = "StreamingRelationV2 a.B@1a2b3c, headrace, c.D@ffff, [topic=a,b, group=g], [key#1, at#2, value#3]"
PLAN = """
*(3) Project [n#9L]
+- *(3) HashAggregate(keys=[key#1], functions=[count(1)], output=[n#9L])
   +- StateStoreSave [key#1], state info [ checkpoint = <unknown>, runId = 8c9f2f25, opId = 0, ver = 0], Append
      +- *(2) HashAggregate(keys=[key#1], functions=[merge_count(1)], output=[key#1, count#19L])
         +- Exchange hashpartitioning(key#1, 2), REQUIRED_BY_STATEFUL_OPERATOR, [plan_id=21]
            +- EventTimeWatermark 8c9f2f25-3f0c-4b2e-9d57-3fd1a6b0f7f1, at#2: timestamp, 10 minutes
               :- StreamingRelation headrace, [key#1, at#2-T600000ms, value#3]
               +- FileScan parquet [id#7]
"""


def test_plans_are_compared_without_what_changes_from_run_to_run() -> None:
    """Numbers of columns, identities of objects, columns that are not used, delays, what comes after."""

    def state(plan: str, leaf: str = LEAF, **types: str) -> tuple[str, ...]:
        known = {"a,b": {"key": "binary", "at": "timestamp"} | types}
        return state_of(
            {"Analyzed Logical Plan": f"n: bigint\n{leaf}", "Physical Plan": plan}, known
        )

    def renumbered(text: str) -> str:
        text = (
            text.replace("#1,", "#11,")
            .replace("#1]", "#11]")
            .replace("#2", "#22")
            .replace("#9", "#99")
        )
        return text.replace("value#3", "x#3, y#4").replace("ffff", "eeee")

    other = (
        renumbered(PLAN)
        .replace("8c9f2f25", "00000000")
        .replace("10 m", "5 m")
        .replace("n#", "total#")
    )
    other = (
        other.replace("600000", "300000").replace("=21", "=99").replace("key#11, 2)", "key#11, 8)")
    )
    assert state(PLAN) == state(
        other.replace("Project [", "Project [1 AS one#77, "), renumbered(LEAF)
    )
    assert state(PLAN) != state(PLAN.replace("merge_count(1)", "merge_sum(1)"))
    assert state(PLAN) != state(PLAN, key="string")
    assert len(state(PLAN)) == 1
    assert source_topics(LEAF) == ["a,b"]


# --- beginning anew -------------------------------------------------------------------------------
def checkpoint(folder: Path, *, unconfirmed: bool = False) -> Path:
    """A checkpoint with one finished batch, as Spark writes it."""
    home = folder / "ck"
    for name in ("offsets", "commits"):
        (home / name).mkdir(parents=True)
    end = {"@topics": {"orders": 1, "gone": 2}, "orders": {"0": 5, "1": 7}, "gone": {"0": 1}}
    (home / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(end)}")
    (home / "commits" / "0").write_text("v1\n{}")
    if unconfirmed:
        (home / "offsets" / "1").write_text("v1\n{}\n{}")
    known = QueryIdentity({}, (identity.SourceIdentity("input", ("orders", "gone")),))
    (home / identity.FILE).write_bytes(known.as_bytes())
    return home


def test_beginning_where_the_old_query_stopped(tmp_path: Path) -> None:
    """The positions of the last finished batch, of topics that are still read."""
    home = checkpoint(tmp_path)
    pipeline, is_unconfirmed = beginning_at(written(tmp_path, WINDOWS), str(home), "checkpoint")
    assert json.loads(pipeline.topics[0].starting) == {"orders": {"0": 5, "1": 7}}
    assert not is_unconfirmed
    moved = set_aside(str(home))
    assert moved is not None
    assert moved.name.startswith("ck.before-")
    assert not home.exists()
    assert set_aside(str(home)) is None


def test_a_batch_that_was_not_confirmed(tmp_path: Path) -> None:
    """Its rows may be in the sink, and would be written again: that is said."""
    home = checkpoint(tmp_path, unconfirmed=True)
    assert beginning_at(written(tmp_path, WINDOWS), str(home), "checkpoint")[1]


def test_beginning_elsewhere(tmp_path: Path) -> None:
    """A place instead of a checkpoint; a checkpoint that is not there, or far away, is an error."""
    pipeline = written(tmp_path, WINDOWS)
    assert beginning_at(pipeline, "ck", None)[0] is pipeline
    assert beginning_at(pipeline, "ck", "latest")[0].topics[0].starting == "latest"
    with pytest.raises(InvalidArgument, match="has no finished batch"):
        beginning_at(pipeline, str(tmp_path / "nothing"), "checkpoint")
    with pytest.raises(InvalidArgument, match="is not on this machine"):
        beginning_at(pipeline, "s3://bucket/ck", "checkpoint")

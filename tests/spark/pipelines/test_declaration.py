"""What a pipeline is: read from tables, with every mistake named by its place."""

from pathlib import Path
from typing import Any

import pytest

from headrace.spark.pipelines.declaration import (
    Pipeline,
    TableInput,
    TableOutput,
    TopicInput,
    TopicOutput,
    Watermark,
    read_pipeline,
)
from headrace.spark.pipelines.sections import InvalidPipeline, Section

HERE = Path("/somewhere")
JSON = {"format": "json", "schema": "id STRING, at TIMESTAMP"}


def declared(name: str = "p", /, **values: Any) -> Pipeline:
    values = {key.rstrip("_"): value for key, value in values.items()}
    return read_pipeline(name, Section(values, f"x.toml, pipeline {name}"), HERE)


def test_the_least() -> None:
    """Where from and where to: everything else has a default."""
    pipeline = declared(from_="orders", to="copy")
    (given,) = pipeline.inputs
    assert isinstance(given, TopicInput)
    assert given.topics == ("orders",)
    assert (given.format, given.starting, given.group) == ("binary", "earliest", "p")
    assert isinstance(pipeline.to, TopicOutput)
    assert (pipeline.to.topic, pipeline.failed, pipeline.mode) == ("copy", None, "append")
    assert (dict(pipeline.trigger), pipeline.trigger_text, pipeline.way) == (
        {},
        "at once",
        "as it is",
    )


def test_everything() -> None:
    """Every key of a pipeline with one input."""
    pipeline = declared(
        **JSON, from_=["orders.>", "returns"], starting="2026-01-01T00:00:00Z", watermark="at 10 m",
        deduplicate=["id"], expect="id IS NOT NULL", group="me", options={"maxOffsetsPerTrigger": 5},
        sql="SELECT 1", to={"topic": "out", "key": "id", "options": {"timeout": 5}},
        failed=True, ensure=["true"], trigger="500 ms", checkpoint="/ck", restarts=0,
        spark={"sql": {"ansi.enabled": False}},
    )  # fmt: skip
    (given,) = pipeline.topics
    assert given.topics == ("orders.>", "returns")
    assert given.watermark == Watermark("at", "10 minutes")
    assert (given.deduplicate, given.expect) == (("id",), ("id IS NOT NULL",))
    assert (given.group, given.options) == ("me", {"maxOffsetsPerTrigger": "5"})
    assert isinstance(pipeline.to, TopicOutput)
    assert (pipeline.to.columns, pipeline.to.options) == ({"key": "id"}, {"timeout": "5"})
    assert pipeline.failed == "p.dlq"
    assert pipeline.trigger == {"processingTime": "500 milliseconds"}
    assert pipeline.spark == {"spark.sql.ansi.enabled": "false"}
    assert (pipeline.restarts, pipeline.checkpoint, pipeline.way) == (0, "/ck", "sql")


def test_several_inputs() -> None:
    """Topics and tables by name; paths are meant from the file, addresses as they are."""
    pipeline = declared(
        sql="SELECT 1",
        to={"table": "lake/out", "format": "delta", "partition_by": "day"},
        inputs={
            "orders": {"from": "orders", **JSON},
            "customers": {"table": "customers.csv", "format": "csv", "options": {"header": True}},
            "rates": {"table": "s3://bucket/rates"},
        },
    )
    orders, customers, rates = pipeline.inputs
    assert isinstance(orders, TopicInput)
    assert orders.group == "p.orders"
    assert isinstance(customers, TableInput)
    assert (customers.path, customers.options) == ("/somewhere/customers.csv", {"header": "true"})
    assert isinstance(rates, TableInput)
    assert (rates.path, rates.format) == ("s3://bucket/rates", "parquet")
    assert isinstance(pipeline.to, TableOutput)
    assert (pipeline.to.path, pipeline.to.partition_by) == ("/somewhere/lake/out", ("day",))


@pytest.mark.parametrize(
    ("topics", "views"),
    [
        ("orders", ("input", "orders")),
        ("my-orders", ("input", "my-orders")),
        ("orders.eu", ("input",)),
        ("orders.*", ("input",)),
        (["a", "b"], ("input",)),
    ],
)
def test_views_of_a_single_input(topics: Any, views: tuple[str, ...]) -> None:
    """It is always 'input', and has its topic's name where that can be a view's."""
    assert declared(from_=topics, to="out").inputs[0].views == views


@pytest.mark.parametrize("trigger", ["once", "available-now"])
def test_once(trigger: str) -> None:
    assert declared(from_="a", to="b", trigger=trigger).is_once


def test_a_group_can_be_done_without() -> None:
    assert declared(from_="a", to="b", group=False).topics[0].group is None


def test_a_watermark_as_a_table() -> None:
    """For columns with a space in their name."""
    pipeline = declared(from_="a", to="b", watermark={"column": "the time", "delay": "1 day"})
    assert pipeline.topics[0].watermark == Watermark("the time", "1 day")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"to": "b"}, "from: say which topics"),
        ({"from": "a"}, "to: say where the rows go"),
        ({"from": "a", "to": "b", "tigger": "1 s"}, "tigger: there is no such key; is it trigger?"),
        ({"from": "a", "to": "b", "xyzzy": 1}, "xyzzy: there is no such key; there are"),
        (
            {"from": 3, "to": "b"},
            "from: it must be a string or a list in which each item is a string, not 3",
        ),
        ({"from": "a b", "to": "b"}, "from: topic 'a b' is not a valid name"),
        ({"from": "a.>.b", "to": "b"}, "from: pattern 'a.>.b' is not valid"),
        ({"from": "a", "to": "no/slash"}, "to: topic 'no/slash' is not a valid name"),
        ({"from": "a", "to": {}}, "to: it has a topic, a topic_from (a column), or a table"),
        ({"from": "a", "to": {"topic": "b", "table": "c"}}, "to: it has a topic"),
        (
            {"from": "a", "to": {"topic": "b", "kee": "c"}},
            "to.kee: there is no such key; is it key?",
        ),
        ({"from": "a", "to": {"table": "c", "key": "x"}}, "to.key: there is no such key"),
        (
            {"from": "a", "to": {"table": "c", "format": "xls"}},
            "to.format: the format of a table is one of delta, iceberg, not 'xls'",
        ),
        (
            {"from": "a", "to": {"table": "c", "format": "parquet"}},
            "to.format: Headrace does not write bare Parquet files",
        ),
        ({"from": "a", "to": "b", "format": "json"}, "schema: JSON needs one"),
        ({"from": "a", "to": "b", "schema": "id INT"}, "schema: it is for format = 'json'"),
        ({"from": "a", "to": "b", "trigger": "soon"}, "trigger: 'soon' is not a duration"),
        ({"from": "a", "to": "b", "watermark": "at"}, "watermark: it is a column and a duration"),
        ({"from": "a", "to": "b", "watermark": "at x"}, "watermark: 'x' is not a duration"),
        ({"from": "a", "to": "b", "deduplicate": "id"}, "watermark = 'timestamp 1 hour'"),
        ({"from": "a", "to": "b", "expect": "x"}, "expect: say where rows go that fail it"),
        ({"from": "a", "to": "b", "ensure": "x"}, "ensure: say where rows go that fail it"),
        ({"from": "a", "to": "b", "sql": "x", "function": "m:f"}, "sql: give sql or a function"),
        ({"from": "a", "to": "b", "function": "f"}, "function: it is 'module:function', not 'f'"),
        ({"from": "a", "to": "a"}, "to: 'a' is read by this pipeline (a): it would never end"),
        ({"from": "a.>", "to": "a.b"}, "to: 'a.b' is read by this pipeline (a.>)"),
        ({"from": "a.>", "to": "b", "failed": "a.b"}, "failed: 'a.b' is read by this pipeline"),
        ({"from": "a", "to": "b", "failed": "b"}, "failed: rows that failed need a topic of"),
        ({"from": "a", "to": {"table": "b"}, "mode": "complete"}, "mode: a table is only ever"),
        ({"from": "a", "to": "b", "mode": "update"}, "mode: it must be one of append, complete"),
        (
            {"from": "a", "to": "b", "restarts": -1},
            "restarts: it must be a whole number, at least 0",
        ),
        ({"from": "a", "to": "b", "spark": {"x": []}}, "spark.x: it is a text, a number"),
        ({"from": "a", "to": "b", "group": "__x"}, "group: subscription '__x'"),
        ({"inputs": {"x": {"from": "a"}}, "from": "b", "to": "c"}, "from: with 'inputs', this"),
        ({"inputs": {"x": {}}, "to": "c"}, "inputs.x.from: an input reads topics ('from') or"),
        ({"inputs": {"x-y": {"from": "a"}}, "to": "c"}, "'x-y' becomes the name of a view"),
        (
            {"inputs": {"x": {"table": "a"}}, "to": "c"},
            "inputs: at least one of them reads a topic",
        ),
        (
            {"inputs": {"x": {"from": "a"}, "y": {"from": "b"}}, "to": "c"},
            "several inputs need sql",
        ),
        (
            {"inputs": {"x": {"from": "a", "fromat": "json"}}, "sql": "x", "to": "c"},
            "inputs.x.fromat: there is no such key; is it format?",
        ),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], complaint: str) -> None:
    """With the file, the pipeline, and the key."""
    with pytest.raises(InvalidPipeline) as caught:
        read_pipeline("p", Section(values, "x.toml, pipeline p"), HERE)
    assert caught.value.message.startswith("x.toml, pipeline p: ")
    assert complaint in caught.value.message
    assert caught.value.code == "invalid_pipeline"


def test_dead_letters_are_no_loop() -> None:
    """A wildcard does not read dead letters, so they may lie below it."""
    assert declared(from_=">", to="b.dlq").topics[0].topics == (">",)


def test_a_name_is_one_that_the_broker_takes() -> None:
    with pytest.raises(InvalidPipeline, match="not a valid name"):
        declared("a b", from_="a", to="b")

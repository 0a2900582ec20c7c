"""Dead letters as a table: triage, correct, redrive, each letter exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from headrace import BrokerClient
from headrace.errors import Conflict, HeadraceError, InvalidArgument, SubscriptionNotFound
from headrace.spark import letters
from headrace.spark.letters import LETTER, LetterOptions, LetterReader, redrive_writer
from headrace.spark.source.data_source import HeadraceDataSource
from headrace.spark.source.options import SourceOptions
from headrace.spark.versions import to_utc_schema
from headrace.testing import RunningServer
from tests.cli.test_dead_letters import bury

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUES = [b'{"n": %d, "currency": "EURO"}' % n for n in range(5)]


def where(server: RunningServer, **more: Any) -> dict[str, Any]:
    return {"servers": f"{server.host}:{server.port}", "timeout": "10", **more}


def read(server: RunningServer, name: str = "email", **more: Any) -> list[dict[str, Any]]:
    """The table's rows, read as a task does it."""
    options = LetterOptions.of(where(server, deadLetters=name, **more))
    reader = LetterReader(options, options.schema())
    tasks = reader.partitions()
    return [row for task in tasks for each in reader.read(task) for row in each.to_pylist()]


def redrive(
    server: RunningServer, rows: list[dict[str, Any]], commits: bool = True, **more: Any
) -> None:
    """Write rows as one task and the driver do it."""
    schema = StructType()
    for name in rows[0]:
        schema.add(name, LETTER[name])
    sink = redrive_writer(where(server, redrive="email", **more), schema, False)
    options = LetterOptions.of(where(server, deadLetters="email", columns=",".join(rows[0])))
    arrow = to_utc_schema(options.schema())
    done = sink.write(iter([pa.RecordBatch.from_pylist(rows, schema=arrow)]))
    if commits:
        sink.commit([done])


def test_the_columns(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is known of a letter and of the message that died, over several pages."""
    monkeypatch.setattr(letters, "PAGE", 2)
    bury(client, "email", *VALUES, reason="unknown currency")
    rows = read(server)
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4]
    for row, message, letter in zip(
        rows, client.fetch("email"), client.dead_letters("email"), strict=True
    ):
        assert row["reason"] == "unknown currency"
        assert (row["attempts"], row["subscription"]) == (1, "email")
        assert (row["key"], row["value"]) == (b"k", message.value)
        assert row["headers"] == [{"key": "source", "value": b"shop"}]
        assert round(row["died_at"].timestamp() * 1000) == letter.timestamp
        origin = row["origin"]
        assert (origin["topic"], origin["partition"], origin["offset"], origin["id"]) == (
            "email", 0, message.offset, str(message.id),
        )  # fmt: skip
        assert round(origin["timestamp"].timestamp() * 1000) == message.timestamp
    client.purge_dead_letters("email", [3])
    some = read(server, columns="offset,value", valueFormat="text")
    assert [row["offset"] for row in some] == [0, 1, 2, 4]
    assert some[0]["value"] == VALUES[0].decode()


def test_redriven_once(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is killed in the middle, its repetition, and a late copy of it redrive each letter once."""
    monkeypatch.setattr(letters, "CHUNK_ROWS", 2)
    bury(client, "email", *VALUES)
    rows = [
        {"offset": row["offset"], "value": row["value"].replace(b"EURO", b"EUR")}
        for row in read(server)
    ]
    sent = letters.RedriveSink._send

    def killed(self: Any, client: Any, chunk: Any, done: Any) -> None:
        sent(self, client, chunk, done)
        raise HeadraceError("the task was killed")

    with monkeypatch.context() as broken:
        broken.setattr(letters.RedriveSink, "_send", killed)
        with pytest.raises(HeadraceError, match="killed"):
            redrive(server, rows)
    assert [row["offset"] for row in read(server)] == [2, 3, 4]
    redrive(server, rows)
    redrive(server, rows)
    assert read(server) == []
    values = [message.value for message in client.fetch("email")]
    assert values == VALUES + [value.replace(b"EURO", b"EUR") for value in VALUES]
    [again] = client.fetch("email", 9)
    assert (again.key, again.headers["source"]) == (b"k", "shop")


def test_what_cannot_be_redriven(server: RunningServer, client: BrokerClient) -> None:
    """The others are, and the error says what was not and why."""
    bury(client, "email", *VALUES[:3])
    rows = [{"offset": n, "value": b"fixed"} for n in range(3)]
    rows[1]["value"] = b"x" * (client.info()["max_message_size"] + 1)
    with pytest.raises(Conflict, match="2 dead letters of email were redriven, and 1 cannot be"):
        redrive(server, rows)
    assert [row["offset"] for row in read(server)] == [1]


def test_mistakes(server: RunningServer, client: BrokerClient) -> None:
    """A name that nobody has, columns and options that do not fit, and rows without a value."""
    with pytest.raises(SubscriptionNotFound):
        read(server, "nobody")
    client.create_subscription("quiet", "email")
    assert read(server, "quiet") == []
    for options, said in (
        ({"deadLetters": "email", "topic": "email"}, "give one of the two"),
        ({"deadLetters": "email", "valueFormat": "json"}, "from_json"),
        ({"deadLetters": "email", "columns": "payload"}, "there is no 'payload'"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            LetterOptions.of(where(server, **options)).schema()
    with pytest.raises(InvalidArgument, match="a stream reads topics"):
        SourceOptions.of(where(server, deadLetters="email"))
    with pytest.raises(InvalidArgument, match="in a stream use foreachBatch"):
        HeadraceDataSource({"redrive": "email", **where(server)}).streamWriter(StructType(), False)
    value = StructType().add("value", "binary")
    for schema, said in (
        (value, "needs the column offset"),
        (
            StructType().add("offset", "long").add("note", "string"),
            "'note' is none of a dead letter",
        ),
        (StructType().add("offset", "long").add("value", "integer"), "string or binary"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            redrive_writer(where(server, redrive="email"), schema, False)
    with pytest.raises(InvalidArgument, match=r"no value \(letter 0\)"):
        redrive(server, [{"offset": 0, "value": None}])
    with pytest.raises(InvalidArgument, match="two rows"):
        redrive(server, [{"offset": 0, "value": b"a"}, {"offset": 0, "value": b"b"}])


@pytest.mark.xdist_group("spark")
def test_triage_in_sql(spark: SparkSession, server: RunningServer, client: BrokerClient) -> None:
    """As a user does it: count by reason, correct with a DataFrame, redrive, and again."""
    bury(client, "email", *VALUES, reason="unknown currency")
    found = spark.read.format("headrace").options(**where(server, deadLetters="email"))
    frame = found.option("valueFormat", "text").load()
    counted = frame.groupBy("reason", "origin.topic").count().collect()
    assert [tuple(row) for row in counted] == [("unknown currency", "email", 5)]
    fixed = frame.where("get_json_object(value, '$.n') > 1").selectExpr(
        "offset", "replace(value, 'EURO', 'EUR') AS value"
    )
    for _ in range(2):
        writer = fixed.write.format("headrace").options(**where(server, redrive="email"))
        writer.mode("append").save()
    assert frame.count() == 2
    assert [m.value for m in client.fetch("email", 5)] == [
        value.replace(b"EURO", b"EUR") for value in VALUES[2:]
    ]
    with pytest.raises(PySparkException, match="no dead letters of 'nobody'"):
        spark.read.format("headrace").options(**where(server, deadLetters="nobody")).load().count()

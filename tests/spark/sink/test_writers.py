"""The writers: nothing is seen before its commit, and everything once, whatever is repeated or lost."""

import logging
import pickle
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T

from headrace import BrokerClient
from headrace.errors import HeadraceError, InvalidArgument, RequestTimeout, TooLarge
from headrace.spark.sink import writers as sink
from headrace.spark.sink.writers import BatchSink, StreamSink, Written
from headrace.testing import RunningServer, running_server

VALUES = T.StructType([T.StructField("value", T.BinaryType())])
KEYED = T.StructType([*VALUES.fields, T.StructField("key", T.StringType())])
QUERY = "f3b1c6a2-0000-4000-8000-000000000001"


def options(server: RunningServer, **more: Any) -> dict[str, str]:
    given = {"servers": f"127.0.0.1:{server.port}", "topic": "out", "timeout": "20", **more}
    return {name: str(value) for name, value in given.items() if value is not None}


def batches(*parts: list[bytes]) -> Iterator[pa.RecordBatch]:
    return iter([pa.record_batch({"value": pa.array(part, pa.binary())}) for part in parts])


def batch_sink(server: RunningServer, schema: T.StructType = VALUES, **more: Any) -> BatchSink:
    """As Spark hands it to a task: pickled."""
    made = sink.batch_writer(options(server, **more), schema, False)
    return pickle.loads(pickle.dumps(made))


def stream_sink(server: RunningServer, **more: Any) -> StreamSink:
    """Made anew for each batch, as Spark does. An older Spark hands it rows, so here it gets rows of the batches."""
    made = sink.stream_writer(options(server, **more), VALUES, False)
    if hasattr(type(made).write, "takes_rows"):
        write: Any = made.write

        def write_rows(found: Iterator[pa.RecordBatch]) -> Any:
            return write(Row(**row) for batch in found for row in batch.to_pylist())

        made.write = write_rows  # type: ignore[method-assign]
    return made


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What Spark says to a task of a query: change the batch's number here."""
    said = {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": "0"}
    monkeypatch.setattr(sink, "_local_property", said.get)
    return said


def content(client: BrokerClient, topic: str = "out", partition: int = 0) -> list[bytes]:
    """All values that can be seen."""
    if topic not in client.topics():
        return []
    found: list[bytes] = []
    while more := client.fetch_values(topic, len(found), partition=partition, max_bytes=1 << 24):
        found += more
    return found


# --- batch writes -----------------------------------------------------------------------------------
def test_a_write_is_seen_when_it_is_committed(server: RunningServer, client: BrokerClient) -> None:
    """Each task stages; the commit shows all of it, in the order of the tasks."""
    writer = batch_sink(server)
    first = writer.write(batches([b"1", b"2"], [b"3"]))
    second = writer.write(batches([b"4"]))
    assert content(client) == []
    assert (first.rows, first.bytes) == (3, 3)
    writer.commit(pickle.loads(pickle.dumps([first, Written(), second])))
    assert content(client) == [b"1", b"2", b"3", b"4"]


def test_a_repeated_commit_changes_nothing(server: RunningServer, client: BrokerClient) -> None:
    """Also the commit of another write does not touch it."""
    writer, other = batch_sink(server), batch_sink(server)
    messages: list[Any] = [writer.write(batches([b"once"]))]
    writer.commit(messages)
    writer.commit(messages)
    other.commit([other.write(batches([b"another"]))])
    assert content(client) == [b"once", b"another"]


def test_an_abort_gives_up_and_does_not_undo(server: RunningServer, client: BrokerClient) -> None:
    """What was aborted cannot be committed; what was committed stays when Spark aborts it."""
    writer = batch_sink(server)
    messages: list[Any] = [writer.write(batches([b"gone"])), None]
    writer.abort(messages)
    with pytest.raises(HeadraceError) as refused:
        writer.commit(messages)
    assert refused.value.code == "piece_gone"
    writer = batch_sink(server)
    messages = [writer.write(batches([b"kept"]))]
    writer.commit(messages)
    writer.abort(messages)
    assert content(client) == [b"kept"]


def test_nothing_to_write_needs_no_broker() -> None:
    """Many tasks of a small batch have no rows."""
    with running_server() as server:
        writer = batch_sink(server, timeout=0.2)
        server.stop()
        assert writer.write(batches()) == Written()
        assert writer.write(batches([])) == Written()
        writer.commit([Written(), None])
        writer.abort([Written(), None])


def test_inside_of_foreach_batch_a_repetition_is_known(
    server: RunningServer, client: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """appId and batchId name the write; the second time its rows are dropped, and that is said."""
    for number in (0, 0, 1):
        writer = batch_sink(server, appId="orders-job", batchId=number)
        with caplog.at_level(logging.WARNING, "headrace.spark"):
            writer.commit([writer.write(batches([b"%d" % number]))])
    assert content(client) == [b"0", b"1"]
    assert "batch 0 of orders-job was committed before: its 1 rows" in caplog.text


def test_keys_go_where_clients_put_them(server: RunningServer, client: BrokerClient) -> None:
    """The number of partitions is the broker's, and the same key is in the same one."""
    client.create_topic("out", partitions=3)
    writer = batch_sink(server, KEYED)
    keys = [f"key-{number % 20}" for number in range(200)]
    rows = pa.record_batch(
        {"value": pa.array([key.encode() for key in keys]), "key": pa.array(keys)}
    )
    writer.commit([writer.write(iter([rows]))])
    for number, key in enumerate(keys[:20]):
        partition = client.publish("out", key, key=key).partition
        found = content(client, partition=partition)
        assert found.count(key.encode()) == 11, number


def test_rows_without_keys_are_spread_by_pieces(
    server: RunningServer, client: BrokerClient
) -> None:
    """The broker takes its partitions in turn."""
    client.create_topic("out", partitions=2)
    for _ in range(4):
        writer = batch_sink(server)
        writer.commit([writer.write(batches([b"x"]))])
    assert [len(content(client, partition=number)) for number in range(2)] == [2, 2]


def test_much_is_written_in_many_pieces(server: RunningServer, client: BrokerClient) -> None:
    """More than may be under way at once."""
    writer = batch_sink(server)
    rows = [b"%07d" % number * 100 for number in range(40_000)]
    written = writer.write(batches(*[rows[n : n + 10_000] for n in range(0, 40_000, 10_000)]))
    assert written.rows == 40_000
    assert len(written.pieces) >= 14
    writer.commit([written])
    assert content(client) == rows


# --- streams ----------------------------------------------------------------------------------------
def test_a_stream_commits_under_its_query(
    server: RunningServer, client: BrokerClient, query: dict[str, str]
) -> None:
    """The query's id comes with the messages; a batch that is repeated is not written twice."""
    for number in (0, 1, 1, 2):
        query["streaming.sql.batchId"] = str(number)
        written = stream_sink(server).write(batches([b"%d" % number]))
        assert written.query_id == QUERY
        stream_sink(server).commit([written, None], number)
    assert content(client) == [b"0", b"1", b"2"]


def test_another_query_has_its_own_numbers(
    server: RunningServer, client: BrokerClient, query: dict[str, str]
) -> None:
    """A new checkpoint is a new query, unless appId says that it is the old one."""
    for name in ("a", "b"):
        query["sql.streaming.queryId"] = f"{QUERY}-{name}"
        stream_sink(server).commit([stream_sink(server).write(batches([b"x"]))], 0)
        written = stream_sink(server, appId="job").write(batches([b"y"]))
        stream_sink(server, appId="job").commit([written], 0)
    assert content(client) == [b"x", b"y", b"x"]


def test_a_lost_answer_does_not_double(
    server: RunningServer, client: BrokerClient, query: dict[str, str]
) -> None:
    """The commit happened, Spark believes it did not: it aborts, and the query begins again."""
    written = stream_sink(server).write(batches([b"a"]))
    stream_sink(server).commit([written], 0)
    stream_sink(server).abort([written], 0)
    again = stream_sink(server).write(batches([b"a"]))
    stream_sink(server).commit([again], 0)
    assert content(client) == [b"a"]


def test_a_stream_without_a_query_needs_a_name(server: RunningServer) -> None:
    """Nothing is committed under no name."""
    written = stream_sink(server).write(batches([b"a"]))
    with pytest.raises(InvalidArgument) as refused:
        stream_sink(server).commit([written], 0)
    assert refused.value.code == "unknown_query"


def test_the_checkpoint_is_synced_before_the_commit(
    server: RunningServer,
    client: BrokerClient,
    query: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a power cut could make Spark plan the batch anew, and the broker would drop it."""
    seen: list[Any] = []
    monkeypatch.setattr(sink, "sync_offsets", lambda *given: seen.append((*given, content(client))))
    writer = stream_sink(server, checkpointLocation="/some/where")
    writer.commit([writer.write(batches([b"a"]))], 3)
    assert seen == [("/some/where", 3, [])]
    assert content(client) == [b"a"]


# --- delayed ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_rows_wait_for_their_time(
    server: RunningServer, client: BrokerClient, guarantee: str
) -> None:
    """With deliver_at they are scheduled by the commit, or at once; the others are published."""
    schema = T.StructType([*KEYED.fields, T.StructField("deliver_at", T.TimestampType())])
    due = time.time_ns() // 1000 + 3_600_000_000
    rows = pa.record_batch(
        {
            "value": pa.array([b"now", b"later", b"later too"]),
            "key": pa.array([None, "k", None]),
            "deliver_at": pa.array([None, due, due + 1_000_000]).cast(pa.timestamp("us", "UTC")),
        }
    )
    writer = batch_sink(server, schema, deliveryGuarantee=guarantee)
    written = writer.write(iter([rows]))
    assert len(client.scheduled("out")) == (0 if written.pieces else 2)
    writer.commit([written])
    writer.commit([written])
    assert content(client) == [b"now"]
    assert [each.deliver_at for each in client.scheduled("out")] == [
        due // 1000,
        due // 1000 + 1000,
    ]


# --- at least once ----------------------------------------------------------------------------------
def test_at_least_once_publishes_from_the_task(
    server: RunningServer, client: BrokerClient, query: dict[str, str]
) -> None:
    """It is there when the task has ended; commit and abort have nothing to do."""
    for make in (batch_sink, stream_sink):
        writer: Any = make(server, deliveryGuarantee="at-least-once")
        written = writer.write(batches([b"1", b"2"], [b"3"]))
        assert written.pieces == []
        assert written.rows == 3
    assert content(client) == [b"1", b"2", b"3"] * 2
    writer.commit([written], 0)
    writer.abort([written], 0)
    assert content(client) == [b"1", b"2", b"3"] * 2


# --- what goes wrong --------------------------------------------------------------------------------
def test_a_message_that_is_too_large_is_named(server: RunningServer, client: BrokerClient) -> None:
    """With its topic, its size, the limit and the setting; what the task had staged is given up."""
    for guarantee in ("exactly-once", "at-least-once"):
        writer = batch_sink(server, deliveryGuarantee=guarantee)
        with pytest.raises(
            TooLarge, match=r"topic 'out'.*2000000 bytes.*max_message_size"
        ) as refused:
            writer.write(batches([b"fine" * 200_000], [bytes(2_000_000)]))
        assert refused.value.code == "message_too_large"


def test_a_failing_task_gives_up_what_it_has_staged(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the rows themselves, after some of them were staged."""
    aborted: list[list[str]] = []
    monkeypatch.setattr(sink, "_abort", lambda options, pieces: aborted.append(pieces))

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches([bytes(1 << 20)] * 20)
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        batch_sink(server, timeout=5).write(rows())
    assert len(aborted) == 1
    assert aborted[0]


@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_a_broker_that_restarts_is_waited_for(guarantee: str) -> None:
    """While a task writes, and before the commit; each row is there, once if that was promised."""
    with running_server() as server:
        writer = batch_sink(server, deliveryGuarantee=guarantee)

        def rows() -> Iterator[pa.RecordBatch]:
            for number in range(6):
                if number % 2:
                    server.kill()
                    server.start()
                yield from batches([b"%d-%d" % (number, n) + bytes(200_000) for n in range(10)])

        written = writer.write(rows())
        server.restart()
        writer.commit([written])
        expected = [b"%d-%d" % (number, n) for number in range(6) for n in range(10)]
        with server.client() as client:
            found = [value.rstrip(b"\0") for value in content(client)]
        if guarantee == "exactly-once":
            assert found == expected
        else:
            assert set(found) == set(expected)


def test_a_broker_that_stays_away_is_an_error() -> None:
    """After the timeout that was asked for, and not before the connection was tried."""
    with running_server() as server:
        writer = batch_sink(server, timeout=0.5)
        written = writer.write(batches([b"x"]))
        server.kill()
        with pytest.raises(HeadraceError, match="is it running"):
            writer.write(batches([b"y"]))
        with pytest.raises(HeadraceError, match="is it running"):
            writer.commit([written])
        writer.abort([written])  # the pieces expire; that is no error

        def rows() -> Iterator[pa.RecordBatch]:
            yield from batches([bytes(1 << 20)])
            server.kill()
            yield from batches([bytes(1 << 20)])

        server.start()
        with pytest.raises(RequestTimeout, match="topic 'out'"):
            writer.write(rows())


def test_tokens_are_sent() -> None:
    """The sink is let in with the option token, and refused without."""
    with running_server(token="secret") as server, server.client() as client:
        writer = batch_sink(server, token="secret")
        writer.commit([writer.write(batches([b"x"]))])
        assert content(client) == [b"x"]
        with pytest.raises(HeadraceError) as refused:
            batch_sink(server, token="wrong").write(batches([b"x"]))
        assert refused.value.code == "unauthenticated"


def test_a_broker_behind_tls(tmp_path: Path) -> None:
    """The certificate travels as text, so an executor needs no file."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    secure = {"tls_cert": str(certificate), "tls_key": str(key)}
    with running_server(**secure) as server, server.client(ca=str(certificate)) as client:
        writer = batch_sink(server, ca=str(certificate))
        certificate.unlink()
        writer.commit([writer.write(batches([b"x"]))])
        assert content(client) == [b"x"]


# --- planning ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        ({"topci": "x"}, "unknown_option", "topic"),
        ({"topic": "a b"}, "invalid_topic", "a b"),
        ({"topic": None}, "missing_topic", "topic"),
        ({"deliveryGuarantee": "often"}, "invalid_option", "at-least-once, exactly-once"),
        ({"valueFormat": "xml"}, "invalid_option", "valueFormat"),
        ({"appId": "job"}, "invalid_option", "appId and batchId"),
        ({"batchId": "3"}, "invalid_option", "appId and batchId"),
        ({"appId": "a/b", "batchId": "3"}, "invalid_subscription", "a/b"),
        ({"appId": "a", "batchId": "-3"}, "invalid_option", "batchId"),
        ({"keyColumn": "user"}, "unknown_column", "user"),
        ({"servers": "host:port"}, "invalid_option", "servers"),
        ({"path": "/tmp/x"}, "invalid_option", "topic has no path"),
    ],
)
def test_a_wrong_option_is_named_before_anything_runs(
    given: dict[str, Any], code: str, word: str
) -> None:
    """With what it can be, and without asking a broker."""
    chosen = {"servers": "127.0.0.1:1", "topic": "out", **given}
    with pytest.raises(InvalidArgument) as refused:
        sink.batch_writer({n: v for n, v in chosen.items() if v is not None}, VALUES, False)
    assert refused.value.code == code
    assert word in refused.value.message


def test_a_topic_is_not_overwritten() -> None:
    """It is a log. In a stream, complete mode appends the whole result each time."""
    with pytest.raises(InvalidArgument, match="append") as refused:
        sink.batch_writer({"topic": "out"}, VALUES, True)
    assert refused.value.code == "overwrite_refused"
    sink.stream_writer({"topic": "out", "checkpointLocation": "/x", "queryName": "q"}, VALUES, True)
    with pytest.raises(InvalidArgument, match="batchId"):
        sink.stream_writer({"topic": "out", "batchId": "1"}, VALUES, False)


def test_options_survive_pickling() -> None:
    """They are all that an executor gets."""
    made = sink.batch_writer({"topic": "out", "token": "t", "servers": "a:1,b:2"}, VALUES, False)
    same = pickle.loads(pickle.dumps(made))
    assert same._options == made._options
    assert replace(same._options, topic=None) != made._options

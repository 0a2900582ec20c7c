"""``headrace export`` and ``import``: nothing is lost on the way, and nothing is published twice."""

import gzip
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import transfer
from headrace.client.reader import BatchReader
from headrace.client.threads import BrokerClient
from headrace.log.batch import Batch, encode
from headrace.testing import RunningServer
from tests.backup.rig import messages
from tests.cli.rig import Command

BINARY = bytes(range(256))
OWN = uuid.UUID("12345678-1234-4234-8234-123456789abc")


def fill(client: BrokerClient, topic: str) -> None:
    """Messages with everything that a message can have."""
    client.create_topic(topic, partitions=3)
    client.publish(topic, BINARY, {"näme": "wört", "b": ""}, key=BINARY, ttl=10_000, to="email")
    client.publish(topic, "text\u202e\x07", key="")
    client.publish(topic, b"", id=OWN, partition=2)
    for number in range(20):
        client.publish(topic, b"%d" % number, key=b"%d" % number)


def records(client: BrokerClient, topic: str) -> list[list[Any]]:
    """Every record of every partition, as the log has it."""
    return [found for _, _, found in messages(client, topic)]


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_a_topic_goes_out_and_comes_back(
    tmp_path: Path, client: BrokerClient, headrace: Command, name: str
) -> None:
    """Binary keys and values, headers, own ids, times, targets and expiry: all the same."""
    topic, copy, file = f"out-{name}", f"back-{name}", str(tmp_path / name)
    fill(client, topic)
    ran = headrace("export", topic, file)
    assert ran.out == f"Exported 23 messages of {topic} to {file}.\n"
    client.create_topic(copy, partitions=3)
    assert headrace("import", copy, file).out == f"Imported 23 messages into {copy}.\n"
    assert records(client, copy) == records(client, topic)
    raw = Path(file).read_bytes()
    text = gzip.decompress(raw) if name.endswith(".gz") else raw
    assert headrace("export", topic).out == text.decode()


def test_the_shape_of_a_line(client: BrokerClient, headrace: Command) -> None:
    """Text and base64 for values, milliseconds for times, and what only a log knows besides."""
    receipt = client.publish("shape", b'"1"', {"a": "b"}, key=b"\xfe", to="email", timestamp=7)
    [line] = headrace("export", "shape").json_lines
    assert line == {
        **{"id": str(receipt.id), "topic": "shape", "partition": 0, "offset": 0, "timestamp": 7},
        **{"key": {"data": "/g==", "encoding": "base64"}, "headers": {"a": "b"}, "attempt": 1},
        **{"data": '"1"', "to": "email"},
    }


def test_a_part_of_a_topic(client: BrokerClient, headrace: Command) -> None:
    """By offset, by time, by partition; ranges that are too large are cut."""
    client.create_topic("part", partitions=2)
    for number in range(10):
        client.publish("part", b"%d" % number, partition=0)
    client.publish("part", b"other", partition=1)

    def values(*options: str) -> list[str]:
        return [line["data"] for line in headrace("export", "part", *options).json_lines]

    assert values("--partition", "1") == ["other"]
    assert values("--from", "8", "--partition", "0") == ["8", "9"]
    assert values("--from", "2", "--to", "4", "--partition", "0") == ["2", "3"]
    assert values("--from", "50") == []
    assert len(values("--from", "2020-01-01T00:00:00Z")) == 11
    assert values("--to", "2020-01-01T00:00:00Z") == []
    assert headrace("export", "part", "--partition", "7").code == 2


def test_batches_that_the_broker_joins_meanwhile_are_exported_once(
    client: BrokerClient, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later answer may begin with messages that an earlier one has brought."""
    client.publish_many("joined", [b"%d" % number for number in range(10)])
    whole = BatchReader.read

    def read(self: BatchReader, *where: Any) -> Iterator[list[Batch]]:
        for [batch] in whole(self, *where):
            first = encode(batch.columns(range(4)))
            first.base_timestamp = first.max_timestamp = batch.base_timestamp
            yield [first]
            yield [batch]

    monkeypatch.setattr(BatchReader, "read", read)
    lines = headrace("export", "joined").json_lines
    assert [line["offset"] for line in lines] == list(range(10))


def test_an_import_that_was_killed_continues(
    tmp_path: Path, client: BrokerClient, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any chunk, before or after its commit: each message is there once."""
    monkeypatch.setattr(transfer, "CHUNK_LINES", 10)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"data": str(n)}) + "\n" for n in range(95)))
    commit = BrokerClient.commit_staged

    for killed_at in (2, 5):
        calls = 0

        def dying(self: Any, name: str, number: int, pieces: list[str]) -> bool:
            nonlocal calls
            calls += 1
            if calls == killed_at:  # noqa: B023
                if killed_at == 5:  # noqa: B023
                    commit(self, name, number, pieces)  # the answer is lost
                raise KeyboardInterrupt
            return commit(self, name, number, pieces)

        monkeypatch.setattr(BrokerClient, "commit_staged", dying)
        assert headrace("import", "killed", path).code == 130
    monkeypatch.setattr(BrokerClient, "commit_staged", commit)
    ran = headrace("import", "killed", path, "--json")
    assert ran.json == {"imported": 35, "skipped": 60, "topic": "killed"}
    assert headrace("import", "killed", path, "--json").json["imported"] == 0
    [found] = records(client, "killed")
    assert [record[0] for record in found] == [b"%d" % n for n in range(95)]


def test_another_name_or_another_content_is_another_import(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """The same file is imported again on purpose, and a longer file is not taken for the old one."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"data": "1"}\n')
    headrace("import", "named", path)
    assert headrace("import", "named", path, "--producer", "again", "--json").json["imported"] == 1
    assert headrace("import", "named-2", path, "--json").json["imported"] == 1
    path.write_text('{"data": "1"}\n{"data": "2"}\n')
    assert headrace("import", "named", path, "--json").json["imported"] == 2
    assert client.topic_stats("named")["messages"] == 4


def test_standard_input_needs_a_name(client: BrokerClient, headrace: Command) -> None:
    """Under it, a repetition is recognized."""
    lines = '{"data": "1"}\n\n{"data": "2", "key": "k", "headers": {"a": "b"}}\n'
    assert "--producer" in headrace("import", "piped", "-", input=lines).err
    for imported in (2, 0):
        ran = headrace("import", "piped", "-", "--producer", "p", "--json", input=lines)
        assert ran.json["imported"] == imported
    assert [m.headers for m in client.fetch("piped")] == [{}, {"a": "b"}]


def test_a_time_that_cannot_be_kept_is_a_header(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """Times never run backwards in a partition, nor ahead of the clock."""
    path = tmp_path / "lines.jsonl"
    times = [1_000, 2_000, 1_500, 1 << 50]
    path.write_text("".join(json.dumps({"data": "x", "timestamp": t}) + "\n" for t in times))
    headrace("import", "times", path)
    found = client.fetch("times", 0, 10)
    assert [m.timestamp for m in found[:3]] == [1_000, 2_000, 2_000]
    own = [m.headers.get("headrace-time") for m in found]
    assert own == [None, None, "1500", str(1 << 50)]


def test_partitions_are_kept_or_chosen_again(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """A partition that does not exist is an error that says what to do."""
    path = tmp_path / "lines.jsonl"
    fill(client, "wide")
    headrace("export", "wide", str(path))
    ran = headrace("import", "narrow", path)
    assert ran.code == 2
    assert "partition 2 does not exist: narrow has 0 to 0" in ran.err
    assert client.topic_stats("narrow")["messages"] == 0
    assert headrace("import", "narrow", path, "--repartition").code == 0
    client.create_topic("by-key", partitions=5)
    headrace("import", "by-key", path, "--repartition")
    places = {m.key: n for n in range(5) for m in client.fetch("by-key", 0, 99, partition=n)}
    receipt = client.publish("by-key", b"x", key=b"7")
    assert places[b"7"] == receipt.partition


def test_without_a_topic_it_is_that_of_the_lines(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """A file of several topics is refused, unless a topic is named."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"data": "1", "topic": "mine"}\n{"data": "2", "topic": "mine"}\n')
    assert headrace("import", path, "--json").json["topic"] == "mine"
    path.write_text('{"data": "1", "topic": "mine"}\n{"data": "2", "topic": "yours"}\n')
    assert f"{path}:2: it is a message of yours" in headrace("import", path).err
    assert headrace("import", "both", path, "--json").json["imported"] == 2


def test_what_other_commands_print_can_be_imported(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """The JSON of ``fetch --json`` and of HTTP: JSON values keep every byte, times and keys are read."""
    values = [b'{"a":  1.0, "b": 123456789012345678901234567890}', b"[]", b"null", b"text", BINARY]
    for value in values:
        client.publish("shown", value, key=value[:9])
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(line + "\n" for line in headrace("fetch", "shown", "--json").lines))
    assert headrace("import", "again", path).code == 0
    original, again = client.fetch("shown"), client.fetch("again")
    assert [each.value for each in again] == values
    assert [(m.key, m.timestamp) for m in again] == [(m.key, m.timestamp) for m in original]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ("{}", 'the message has no "data"'),
        ('{"data": 3, "encoding": "hex"}', "the encoding is base64"),
        ('{"data": "%", "encoding": "base64"}', 'the message has no "data"'),
        ('{"data": "x", "encoding": "hex"}', "the encoding is base64"),
        ('{"data": "x", "key": 3}', 'key has no "data"'),
        ('{"data": "x", "headers": {"a": 1}}', "header"),
        ('{"data": "x", "timestamp": "now"}', "timestamp: 'now' is not a time"),
        ('{"data": "x", "timestamp": 1.5}', "timestamp is a whole number"),
        ('{"data": "x", "key64": "%"}', 'key has no "data"'),
        ('{"data": "x", "partition": -1}', "partition is a whole number"),
        ('{"data": "x", "id": "seven"}', "id is a UUID"),
        ('{"data": "x", "to": "a b"}', "subscription"),
        ('{"data": "x", "value": 1}', "value is not known"),
        ('{"data": "' + "x" * (1 << 20) + 'y"}', "the broker takes 1,048,576"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_published(
    tmp_path: Path, server: RunningServer, headrace: Command, line: str, why: str
) -> None:
    """File and line, and what is wrong; the topic is not even created."""
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"data": "good"}}\n\n{line}\n')
    ran = headrace("import", "bad-lines", path)
    assert ran.code == 2
    assert ran.err.startswith(f"headrace: {path}:3: ")
    assert why in ran.err
    assert server.call(lambda: server.engine.topics.get("bad-lines")) is None


def test_files_that_cannot_be_read(tmp_path: Path, headrace: Command) -> None:
    """A missing file, one that is no gzip, and one that is cut short."""
    assert "No such file" in headrace("import", "t", tmp_path / "nothing").err
    path = tmp_path / "lines.jsonl.gz"
    path.write_bytes(b'{"data": "x"}\n')
    assert "cannot be unpacked" in headrace("import", "t", path).err
    path.write_bytes(gzip.compress(b'{"data": "x"}\n' * 1000)[:-20])
    assert "cannot be unpacked" in headrace("import", "t", path).err
    assert headrace("export", "nothing").code == 2


def test_an_export_that_fails_leaves_no_file(
    tmp_path: Path, client: BrokerClient, headrace: Command
) -> None:
    """Neither a half one, nor in the place of an earlier one."""
    path = tmp_path / "lines.jsonl"
    path.write_text("earlier")
    assert headrace("export", "nothing-here", path).code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["lines.jsonl"]
    assert path.read_text() == "earlier"

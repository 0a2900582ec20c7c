"""``headrace pipeline run --once`` and ``validate``, in this process and its Spark session.

That the commands work as processes, and what they do without Spark, is in tests/cli/test_pipeline.py.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer
from tests.cli.conftest import command
from tests.cli.rig import Command

__all__ = ["command"]
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.usefixtures("spark")]

FILE = """
    [pipeline.large]
    from = "orders"
    format = "json"
    schema = "id STRING, amount DOUBLE"
    sql = "SELECT id, amount FROM orders WHERE amount > 100"
    to = { topic = "large", key = "id" }
    failed = true

    [pipeline.copy]
    from = "returns"
    to = { table = "lake/all", format = "delta" }
"""


@pytest.fixture
def file(tmp_path: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shop.toml"
    path.write_text(textwrap.dedent(FILE))
    return path


@pytest.fixture
def headrace(server: RunningServer, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
    return command


def test_once(headrace: Command, client: BrokerClient, file: Path, spark: Any) -> None:
    """What is there is done, told and reported; a pipeline that fails is exit code 1."""
    orders = [{"id": str(number), "amount": 60.0 * number} for number in range(4)]
    client.publish_many("orders", [json.dumps(order).encode() for order in orders] + [b"rubbish"])
    ran = headrace("pipeline", "run", file, "--once", "--checkpoint-dir", file.parent / "state")
    assert ran.code == 1
    assert ran.lines[:2] == [
        "large: orders to large",
        f"copy: returns to {file.parent}/lake/all (delta)",
    ]
    assert ran.lines[-2:] == ["large finished: 5 rows, 1 dead letter", "copy failed: 0 rows"]
    assert "headrace: pipeline copy failed: there is no topic 'returns'" in ran.err
    assert sorted(message.key or b"" for message in client.fetch("large")) == [b"2", b"3"]
    assert client.topic_stats("large.dlq")["settings"]["retention_hours"] is None
    states = {each["name"]: each["state"] for each in client.pipelines()}
    assert states == {"large": "finished", "copy": "failed"}
    assert (file.parent / "state" / "large" / "offsets").is_dir()
    assert [each.name for each in (file.parent / "shop.toml.state").iterdir()] == ["spark.log"]
    spark.sql("SELECT 1").collect()  # a session that was there before is left alone


def test_validate(headrace: Command, client: BrokerClient, file: Path) -> None:
    """What can be run, with what comes out of it; and every mistake, not only the first."""
    text = file.read_text().replace("SELECT id, amount", "SELECT id, amuont")
    file.write_text(text + '[pipeline.good]\nfrom = "present"\nto = "copy"\n')
    client.create_topic("present")
    client.create_topic("orders")
    ran = headrace("pipeline", "validate", file)
    assert ran.code == 1
    assert ran.lines == [
        f"copy: returns to {file.parent}/lake/all (delta)",
        "  columns: key:binary, value:binary, topic:string, partition:int, offset:bigint, "
        "timestamp:timestamp, headers:array<struct<key:string,value:binary>>, id:string",
        "good: present to copy",
        "  key: column key (binary)",
        "  value: column value (binary)",
        "  headers: column headers (array<struct<key:string,value:binary>>)",
    ]
    wrong = ran.err.splitlines()
    assert len(wrong) == 2
    assert "shop.toml:6, pipeline large: sql: A column" in wrong[0]
    assert "Did you mean one of the following? [`amount`" in wrong[0]
    assert "shop.toml:11, pipeline copy: from: there is no topic 'returns'" in wrong[1]
    assert wrong[1].endswith("[topic_not_found]")
    assert not (file.parent / "lake").exists()
    assert not (file.parent / "shop.toml.state").exists()
    assert headrace("pipeline", "validate", file, "good").code == 0


def test_a_query_that_has_changed(headrace: Command, client: BrokerClient, file: Path) -> None:
    """It goes on, or is refused with what to do; it can begin anew, and the old checkpoint is kept."""

    def run(*options: str) -> Any:
        return headrace("pipeline", "run", file, "large", "--once", *options)

    def ids() -> list[bytes]:
        return sorted(message.key or b"" for message in client.fetch("large"))

    def publish(number: int) -> None:
        order = {"id": str(number), "amount": 200.0}
        client.publish("orders", json.dumps(order).encode())

    publish(1)
    assert run().code == 0
    publish(2)
    file.write_text(file.read_text().replace("amount > 100", "amount > 150"))
    ran = run()
    assert "  continues from its checkpoint, with changes: sql" in ran.lines
    assert ids() == [b"1", b"2"]
    file.write_text(file.read_text().replace('topic = "large"', 'topic = "big"'))
    for verb in ("run", "validate"):
        ran = headrace("pipeline", verb, file, "large")
        assert ran.code == (2 if verb == "run" else 1)
        assert (
            "shop.toml:7, pipeline large: to: it has changed (it was large, it is big)" in ran.err
        )
        assert "--from checkpoint" in ran.err
        assert "[query_changed]" in ran.err
    publish(3)
    assert run("--from", "checkpoint").code == 0
    assert [message.key for message in client.fetch("big")] == [b"3"]
    [old] = (file.parent / "shop.toml.state").glob("large.before-*")
    assert (old / "offsets").is_dir()
    assert client.subscription_stats("large", "orders")["lag"] == 0
    assert run("--reset").code == 0
    assert sorted(message.key or b"" for message in client.fetch("big")) == [b"1", b"2", b"3", b"3"]
    ran = headrace("pipeline", "run", file, "--reset")
    assert ran.code == 2
    assert "name the pipelines, for example 'shop.toml large'" in ran.err
    assert "not both" in run("--reset", "--from", "latest").err


def test_the_fields_of_messages(headrace: Command, client: BrokerClient, file: Path) -> None:
    """What a consumer will find, before anything runs."""
    client.create_topic("orders")
    sql = (
        "SELECT id, amount, current_date() AS day, named_struct('a', array(1)) AS more, "
        "CAST(id AS BINARY) AS raw, map(id, true) AS flags FROM orders"
    )
    text = file.read_text()
    file.write_text(text.replace("SELECT id, amount FROM orders WHERE amount > 100", sql))
    ran = headrace("pipeline", "validate", file, "large")
    assert ran.code == 0
    assert ran.lines[1:] == [
        "  key: column id (string)",
        '  value: JSON {"id": string, "amount": number (double), "day": string (date), "more": {"a": '
        '[number (int), …]}, "raw": string (base64), "flags": {string: boolean, …}}',
    ]


def test_validate_without_a_broker(command: Command, file: Path) -> None:
    """Plans need none; that topics were not looked at is said."""
    ran = command("pipeline", "validate", file, "copy", "--server", "127.0.0.1:1")
    assert ran.code == 0
    assert "could not check that the topics exist: no broker answers" in ran.lines[-1]


def test_settings_of_spark(command: Command, file: Path) -> None:
    ran = command("pipeline", "validate", file, "--conf", "spark.sql.ansi.enabled")
    assert ran.code == 2
    assert "--conf takes spark.NAME=VALUE" in ran.err
    ran = command("pipeline", "validate", file, "--conf", "sparc.x=1")
    assert ran.code == 2
    assert "--conf takes spark.NAME=VALUE, not 'sparc.x=1'" in ran.err

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
    assert not (file.parent / "shop.toml.state").exists()
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
        "  key:binary, value:binary, topic:string, partition:int, offset:bigint, "
        "timestamp:timestamp, headers:array<struct<key:string,value:binary>>, id:string",
        "good: present to copy",
        "  key:binary, value:binary, headers:array<struct<key:string,value:binary>>, topic:string",
    ]
    wrong = ran.err.splitlines()
    assert len(wrong) == 2
    assert "pipeline large: sql: A column" in wrong[0]
    assert "Did you mean one of the following? [`amount`" in wrong[0]
    assert "pipeline copy: from: there is no topic 'returns' [topic_not_found]" in wrong[1]
    assert not (file.parent / "lake").exists()
    assert not (file.parent / "shop.toml.state").exists()
    assert headrace("pipeline", "validate", file, "good").code == 0


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

"""``headrace replay``: what it says, how it goes on, and what people get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import BrokerClient
from tests.cli.rig import Command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_replay_and_the_same_again(
    spark: SparkSession, headrace: Command, client: BrokerClient, tmp_path: Path
) -> None:
    client.publish_many("orders", [b"order %d" % number for number in range(10)])
    command = ["replay", "--from", "orders", "--to", "copy", "--where", "offset % 2 = 0"]
    ran = headrace(*command, "--rate", "1000", "--name", "once")
    assert ran.code == 0, ran.err
    assert ran.lines[-1] == "replay once is done: 5 records written to copy"
    again = headrace(*command, "--name", "once")
    assert again.lines[-1] == ran.lines[-1]
    found = client.fetch("copy", 0, 100)
    assert [m.value for m in found] == [b"order %d" % number for number in range(0, 10, 2)]
    assert (tmp_path / "state" / "headrace" / "replays" / "once.json").is_file()
    other = headrace("replay", "--from", "orders", "--to", "elsewhere", "--name", "once")
    assert other.code == 2
    assert "began with --to 'copy', not 'elsewhere'" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "nowhere", "--to", "copy"], "there is no topic 'nowhere'"),
        (["--from", "nowhere.>", "--to", "copy"], "no topic matches nowhere.>"),
        (["--from", "/no/table", "--to", "copy"], "/no/table"),
        (["--from", ">", "--to", "copy", "--rate", "fast"], "Invalid value for '--rate'"),
        (["--from", "orders", "--to", "copy", "--since", "noon"], "--since: 'noon' is neither"),
        (["--from", ">", "--to", "copy", "--name", "a/b"], "not a valid name"),
    ],
)
def test_mistakes(headrace: Command, arguments: list[str], message: str) -> None:
    """Each is a sentence, before Spark is started."""
    ran = headrace("replay", *arguments)
    assert ran.code == 2
    assert message in ran.err

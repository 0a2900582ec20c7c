"""Damage in a backup is named, down to the offsets, and what is left of it can be restored."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backup.manifest import BackupDirectory, parse
from headrace.backup.restoring import restore
from headrace.backup.verifying import verify
from headrace.errors import DataCorrupt, InvalidArgument, NotFound, StorageFailed, TopicNotFound
from headrace.log.sealed import seal, unseal
from headrace.testing import running_server
from tests.backup.rig import QUIET, backed_up, restored, restored_to, source_of
from tests.backup.test_copying import flip


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """Two generations: orders with 50 and then 100 messages in batches of 10, and a subscription."""
    with running_server(**QUIET) as server, server.client() as client:
        client.create_subscription("email", "orders")
        client.create_subscription("jobs", "jobs")
        for generation in range(2):
            for number in range(5):
                at = generation * 50 + number * 10
                client.publish_many("orders", [b"%03d" % n * 800 for n in range(at, at + 10)])
            client.publish("jobs", b"x")
            backed_up(tmp_path / "b", server)
    return tmp_path / "b"


def log_of(backup: Path, topic: str = "orders") -> Path:
    [path] = backup.glob(f"topics/{topic}@*/0/*.log")
    return path


def changed(backup: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, with a right checksum."""
    path = BackupDirectory(backup).folder(number) / "manifest.json"
    document = unseal(path.read_bytes())
    change(document)
    path.write_bytes(seal(document))


# --- verifying ------------------------------------------------------------------------------------
def test_a_good_backup_is_good(backup: Path) -> None:
    """Every byte of every generation was read."""
    verdict = verify(BackupDirectory(backup))
    assert verdict.flaws == []
    assert verdict.generations == [1, 2]
    assert verdict.bytes > log_of(backup).stat().st_size


def test_damage_is_named_by_its_offsets(backup: Path) -> None:
    """Only the generations that need the damaged part are concerned."""
    path = log_of(backup)
    flip(path, path.stat().st_size * 7 // 10)
    [flaw] = verify(BackupDirectory(backup)).flaws
    assert (flaw.topic, flaw.partition) == ("orders", 0)
    assert (flaw.first, flaw.end) == (70, 80)
    assert flaw.generations == [2]
    assert verify(BackupDirectory(backup), 1).is_good
    flip(path, path.stat().st_size // 4)
    flaws = verify(BackupDirectory(backup)).flaws
    assert [(flaw.first, flaw.end) for flaw in flaws] == [(20, 30), (70, 80)]
    assert flaws[0].generations == [1, 2]


@pytest.mark.parametrize("how", ["missing", "short", "replaced"])
def test_a_file_that_is_not_the_right_one(backup: Path, how: str) -> None:
    """Missing, cut short, or replaced by another valid file."""
    path = log_of(backup)
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        raw = path.read_bytes()
        with running_server(**QUIET) as server, server.client() as client:
            for number in range(10):
                at = number * 10
                client.publish_many("orders", [b"%03d" % n * 800 for n in range(at, at + 10)])
            other = next(server.data_dir.glob("orders/0/*.log")).read_bytes()
        path.write_bytes(other[: len(raw)])
    flaws = verify(BackupDirectory(backup)).flaws
    assert {(flaw.topic, flaw.partition) for flaw in flaws} == {("orders", 0)}
    expected = {"missing": (0, 100), "short": (90, 100), "replaced": (0, 100)}[how]
    assert (flaws[0].first, flaws[0].end) == expected


def test_small_files_and_manifests_count_too(backup: Path) -> None:
    """The journal of subscriptions, and the manifest itself."""
    flip(backup / "generations/000001/journal", 40)
    flip(backup / "generations/000002/manifest.json", 100)
    flaws = verify(BackupDirectory(backup)).flaws
    assert [(flaw.generations, flaw.file) for flaw in flaws] == [
        ([1], "generations/000001/journal"),
        ([2], "generations/000002"),
    ]


def test_other_directories_are_no_backups(tmp_path: Path, backup: Path) -> None:
    """Nor is a generation that does not exist a generation."""
    (tmp_path / "empty").mkdir()
    for path, error in ((tmp_path / "empty", InvalidArgument), (tmp_path / "nothing", NotFound)):
        with pytest.raises(error):
            verify(BackupDirectory(path))
        with pytest.raises(error):
            restored_to(path, tmp_path / "data")
    with pytest.raises(NotFound, match="it has 1, 2"):
        verify(BackupDirectory(backup), 3)


# --- restoring ------------------------------------------------------------------------------------
def test_damage_stops_a_restore(tmp_path: Path, backup: Path) -> None:
    """It says where and what to do, and no broker starts on what was copied."""
    path = log_of(backup)
    flip(path, path.stat().st_size * 7 // 10)
    with pytest.raises(DataCorrupt, match=r"orders/0: offsets 70 to 79 .*--salvage"):
        restored_to(backup, tmp_path / "data")
    with pytest.raises(StorageFailed, match="interrupted"), running_server(tmp_path / "data"):
        pass
    with restored(backup, tmp_path / "one", generation=1) as server, server.client() as client:
        assert client.topic_stats("orders")["messages"] == 50


def test_what_is_left_can_be_salvaged(tmp_path: Path, backup: Path) -> None:
    """Damaged records are lost, explicitly; all others are there, and subscriptions go on."""
    path = log_of(backup)
    flip(path, path.stat().st_size * 7 // 10)
    log_of(backup, "jobs").unlink()
    done = restore(BackupDirectory(backup), tmp_path / "data", salvage=True)
    assert sorted(done.lost) == [("jobs", 0, 0, 2), ("orders", 0, 70, 80)]
    with running_server(data_dir=tmp_path / "data", **QUIET) as server, server.client() as client:
        with client.subscription("email", "orders") as channel:
            got = [channel.get(5) for _ in range(90)]
            assert [m.offset for m in got] == [*range(70), *range(80, 100)]
        assert client.publish("jobs", b"new").offset == 2


def test_only_an_empty_directory_is_filled(tmp_path: Path, backup: Path) -> None:
    """An empty one and the root of a file system are fine."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for target in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(InvalidArgument, match="not empty"):
            restored_to(backup, target)
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    with restored(backup, tmp_path / "data") as server, server.client() as client:
        assert client.topics() == ["jobs", "orders"]


def test_some_topics_can_be_restored(tmp_path: Path, backup: Path) -> None:
    """With their subscriptions, and without those of others."""
    started = restored(backup, tmp_path / "data", topics=["orders"])
    with started as server, server.client() as client:
        assert client.topics() == ["orders"]
        assert [each["name"] for each in client.subscriptions()] == ["email"]
    with restored(backup, tmp_path / "all", topics=["*"]) as server, server.client() as client:
        assert client.topics() == ["jobs", "orders"]


@pytest.mark.parametrize("name", ["nothing", "some.*", "ord*"])
def test_each_topic_to_restore_must_exist(tmp_path: Path, backup: Path, name: str) -> None:
    """A misspelt one is named, also beside one that exists."""
    with pytest.raises(TopicNotFound, match=rf"no topic {re.escape(name)}; it has orders, jobs"):
        restored_to(backup, tmp_path / "none", topics=["orders", name])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d["topics"][0].update(topic="../../outside"), "not a valid name"),
        (lambda d: d["topics"][0].update(topic=".."), "not a valid name"),
        (lambda d: file_of(d).__setitem__(0, "../../../outside.log"), "has a file"),
        (lambda d: file_of(d).__setitem__(0, "/etc/passwd"), "has a file"),
        (lambda d: d["journal"].__setitem__(0, "../journal"), "has a file"),
        (lambda d: file_of(d).__setitem__(2, 7), "ends at"),
        (lambda d: file_of(d).__setitem__(1, -1), "Expected `int`"),
        (lambda d: d["topics"][0].update(incarnation="x"), "Expected `int`"),
        (lambda d: d["topics"].append(d["topics"][0]), "cannot be so"),
        (lambda d: d.update(format=2), "its format is 2"),
    ],
)
def test_a_manifest_leads_nowhere_else(
    tmp_path: Path, backup: Path, change: Callable[[Any], Any], why: str
) -> None:
    """Names become paths only if a backup could have written them; types and ranges are checked."""
    changed(backup, 2, change)
    before = {path for path in tmp_path.rglob("*") if "generations" not in path.parts}
    with pytest.raises(DataCorrupt, match=why):
        restored_to(backup, tmp_path / "data")
    assert not verify(BackupDirectory(backup)).is_good
    after = {path for path in tmp_path.rglob("*") if "generations" not in path.parts}
    assert after == before


def file_of(document: dict[str, Any]) -> list[Any]:
    [topic] = [t for t in document["topics"] if t["topic"] == "orders"]
    found: list[Any] = topic["partitions"][0]["files"][0]
    return found


def test_a_damaged_manifest_keeps_its_files(tmp_path: Path, backup: Path) -> None:
    """The next backup does not remove or change what a generation may need that nobody can read."""
    manifest = backup / "generations/000002/manifest.json"
    good, log = manifest.read_bytes(), log_of(backup)
    before = log.read_bytes()
    flip(manifest, 100)
    with running_server(**QUIET) as server, server.client() as client:
        client.publish("other", b"x")
        with source_of(server):
            backed_up(backup, server, keep=9)
    assert log.read_bytes() == before
    assert parse(good).generation == 2
    manifest.write_bytes(good)
    assert verify(BackupDirectory(backup)).is_good

"""A whole broker goes into a cluster over a real Kafka and back, and clients see no difference."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.backup.copying import take
from headrace.backup.generation import GenerationSource
from headrace.backup.manifest import BackupDirectory
from headrace.backup.sources import BackupSource, DirectorySource
from headrace.cluster.founding import Founding
from headrace.engine.kafka import make_storage
from headrace.errors import Conflict, HeadraceError
from headrace.moving.importing import Imported, import_broker
from headrace.settings import load
from headrace.testing import RunningServer, running_server
from tests.cli.rig import run_script
from tests.fixtures.three_nodes import ThreeNodes
from tests.moving.rig import fill, seen

pytestmark = pytest.mark.xdist_group("kafka")
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Settings]:
    """The directory of a stopped broker, and what it had."""
    directory = tmp_path_factory.mktemp("broker") / "data"
    return directory, fill(directory)


def imported(source: BackupSource, cluster: Settings, **more: Any) -> Imported:
    make = make_storage(load({**cluster, "advertise": "importer"}))
    session_s = more.pop("session_s", 30.0)

    async def run() -> Imported:
        return await import_broker(source, lambda: Founding(make, session_s), **more)

    return asyncio.run(run())


def compare(found: Settings, wanted: Settings) -> None:
    """Piece by piece, so that a difference can be read."""
    assert found["topics"].keys() == wanted["topics"].keys()
    for name, topic in wanted["topics"].items():
        for what, value in topic.items():
            assert found["topics"][name][what] == value, (name, what)
    for what in ("subscriptions", "dead letters", "scheduled", "commit"):
        assert found[what] == wanted[what], what


def test_a_broker_moves_in_and_out(
    broker: tuple[Path, Settings], kafka: str, cluster: Settings, tmp_path: Path
) -> None:
    """Messages, offsets, ids, times, positions, dead letters and delayed messages are the same, in six slots of three nodes and back."""
    directory, wanted = broker
    done = imported(DirectorySource(directory), {**cluster, "slots": 6})
    assert (done.subscriptions, done.producers, done.damaged) == (2, 1, [])
    out = tmp_path / "out"
    with closing(ThreeNodes(kafka, tmp_path / "nodes", cluster=cluster["cluster"])) as nodes:
        with nodes.client() as client:
            compare(seen(client), wanted)
            # The named producer is known: its last publish is recognized, and a new holder fences it off.
            again = client.publish("old", b"19" * 500, producer=(*wanted["producer"], 19))
            assert again.duplicate
            assert client.producer("importer").epoch == wanted["producer"].epoch + 1
            # What comes next goes on where the broker ended.
            end = wanted["topics"]["packed"]["places"][0][1]
            assert client.publish("packed", b"next").offset == end
        last, *others = nodes.nodes
        for node in others:
            node.stop()
        last.wait_until(lambda: len(set(last.engine.state)) == 6, 30)
        with last.client() as client:
            before = seen(client)
        ran = run_script("cluster", "export", str(out), HEADRACE_SERVER=f"{last.host}:{last.port}")
        assert ran.code == 0, ran
        assert not (tmp_path / "out.export").exists()
    with running_server(out) as server, server.client() as client:
        compare(seen(client), before)


def deliveries(server: RunningServer) -> set[tuple[int, int, int]]:
    """(partition, offset, attempt) of everything that the subscription has not finished."""
    with server.client() as client:
        left = client.subscription_stats("email", "orders")["lag"]
        with client.subscription("email", "orders", prefetch=left) as consumer:
            some = [message for _, message in zip(range(left), consumer, strict=False)]
    return {(message.partition, message.offset, message.attempt) for message in some}


def test_failed_deliveries_go_on(
    broker: tuple[Path, Settings], cluster: Settings, tmp_path: Path
) -> None:
    """What is delivered next, and for the how-manieth time, is what the broker itself would deliver."""
    shutil.copytree(broker[0], tmp_path / "copy")
    imported(DirectorySource(broker[0]), cluster)
    with running_server(tmp_path / "copy") as alone, running_server(**cluster) as node:
        wanted, found = deliveries(alone), deliveries(node)
    assert {(partition, offset) for partition, offset, _ in found} == {
        (partition, offset) for partition, offset, _ in wanted
    }
    assert {each for each in found if each[2] > 1} >= {each for each in wanted if each[2] > 1}
    assert any(attempt > 1 for *_, attempt in wanted)


def test_an_import_that_was_killed_continues(
    broker: tuple[Path, Settings], cluster: Settings
) -> None:
    """No broker starts on half an import; the same import again makes it whole."""
    directory, wanted = broker

    class Killed(Exception):
        pass

    def progress(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise Killed

    with pytest.raises(Killed):
        imported(DirectorySource(directory), cluster, progress=progress)
    with pytest.raises(HeadraceError) as refused, running_server(**cluster):
        pass
    assert refused.value.code == "import_unfinished"
    done = imported(DirectorySource(directory), cluster)
    assert done.continued > 0
    with running_server(**cluster) as server, server.client() as client:
        compare(seen(client), wanted)


def test_a_backup_can_be_imported(
    broker: tuple[Path, Settings], cluster: Settings, tmp_path: Path
) -> None:
    """A generation of a backup is as good as the directory."""
    directory, wanted = broker
    backup = BackupDirectory(tmp_path / "backup")
    take(backup, DirectorySource(directory), keep=1)
    imported(GenerationSource(backup), cluster)
    with running_server(**cluster) as server, server.client() as client:
        compare(seen(client), wanted)


def test_only_an_empty_cluster_is_filled(broker: tuple[Path, Settings], cluster: Settings) -> None:
    """A cluster that has topics, and one that a node serves, are refused and stay as they are."""
    with running_server(**cluster) as server, server.client() as client:
        client.publish("mine", b"1")
        with pytest.raises(Conflict) as refused:
            imported(DirectorySource(broker[0]), cluster, session_s=0.5)
        assert refused.value.code == "cluster_in_use"
    with pytest.raises(Conflict) as refused:
        imported(DirectorySource(broker[0]), cluster)
    assert refused.value.code == "cluster_not_empty"
    with running_server(**cluster) as server, server.client() as client:
        assert client.topics() == ["mine"]

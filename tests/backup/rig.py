"""Backups of real servers, and everything that a broker knows, for comparing two of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.backup.copying import Taken, take
from headrace.backup.manifest import BackupDirectory
from headrace.backup.restoring import Restored, restore
from headrace.backup.sources import BrokerSource, DirectorySource
from headrace.client.reader import BatchReader
from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, running_server
from headrace.testing.servers import ServerProcess

AnyServer = RunningServer | ServerProcess
QUIET: dict[str, Any] = {"events_interval": 0}
"""Nothing happens in it by itself."""


@contextmanager
def source_of(server: AnyServer, *, direct: bool = False, **options: Any) -> Iterator[BrokerSource]:
    """Over the socket, unless ``direct``: most tests are about what travels."""
    token = server._settings.get("token")
    reader = BatchReader([server.address], token=token, direct=direct, fetch_bytes=64 << 10)
    with server.client() as client, reader:
        yield BrokerSource("test", client, reader, **options)


def backed_up(path: Path, server: AnyServer, **options: Any) -> Taken:
    with source_of(server) as source:
        return take(BackupDirectory(path), source, **options)


def copied_from(path: Path, data_dir: Path) -> Taken:
    return take(BackupDirectory(path), DirectorySource(data_dir))


def restored_to(path: Path, target: Path, **options: Any) -> Restored:
    return restore(BackupDirectory(path), target, **options)


@contextmanager
def restored(path: Path, target: Path, **options: Any) -> Iterator[RunningServer]:
    """A server on the restored directory."""
    restored_to(path, target, **options)
    with running_server(data_dir=target, **QUIET) as server:
        yield server


def messages(client: BrokerClient, topic: str) -> list[list[Any]]:
    """Every message of every partition, with all that it has."""
    found = []
    for place in client.positions([topic])[topic]:
        number, at, some = place["partition"], place["start"], []
        while at < place["end"]:
            for batch in client.fetch_batches(topic, at, partition=number):
                columns = batch.columns()
                some.append((batch.base_offset, batch.raw()))
                assert len(columns.values) == batch.count
                at = batch.end_offset
        found.append([place["start"], place["end"], some])
    return found


def values_of(client: BrokerClient, topic: str) -> list[bytes]:
    """The values of a topic's first partition."""
    found: list[bytes] = []
    place = client.positions([topic])[topic][0]
    while len(found) < place["end"] - place["start"]:
        at = place["start"] + len(found)
        found += [m.value for m in client.fetch(topic, at, 1000, partition=0)]
    return found


def everything(server: RunningServer) -> dict[str, Any]:
    """All that a client can see, and the journal as it would be written now."""

    def inside() -> dict[str, Any]:
        engine = server.engine
        return {
            "topics": {
                topic.name: (topic.incarnation, topic.created_ms, topic.settings)
                for topic in engine.topics
            },
            "subscriptions": {
                (s.pattern, s.name): (
                    s.number,
                    s.settings,
                    s.created_ms,
                    {place: (c.position, c.runs(), c.attempts) for place, c in s.cursors.items()},
                )
                for s in engine.all_subscriptions()
            },
            "producers": engine.publishing.producers,
            "commits": {d.name: d.number for d in engine.staging.decisions.values()},
        }

    with server.client() as client:
        known: dict[str, Any] = server.call(inside)
        known["messages"] = {
            name: messages(client, name)
            for name, (_, _, settings) in known["topics"].items()
            if settings.durable
        }
        known["letters"] = {
            each["topic"]: client.dead_letters(each["topic"].removesuffix(".dlq"))
            for each in client.dead_letter_topics()
        }
        known["scheduled"] = client.scheduled()
        known["users"] = client.users()
    return known


def files_of(path: Path) -> dict[str, tuple[int, int]]:
    """(inode, bytes) of every file with messages."""
    return {
        str(each.relative_to(path)): (each.stat().st_ino, each.stat().st_size)
        for each in sorted(path.glob("topics/*/*/*.log"))
    }

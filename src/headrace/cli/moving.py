"""``headrace cluster import`` and ``export``: a whole broker into a cluster over Kafka, and back."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.backup.copying import take
from headrace.backup.generation import GenerationSource
from headrace.backup.manifest import MARK, BackupDirectory, foreign_names
from headrace.backup.restoring import restore
from headrace.backup.sources import BackupSource, BrokerSource, DirectorySource
from headrace.cli.backup import SHOWN_MAX, Generation, batch_reader, disk_errors
from headrace.cli.connecting import (
    BrokerPlace,
    connected,
    given_as,
    with_broker_place,
    with_options,
)
from headrace.cli.printing import (
    AsJson,
    Bar,
    complain,
    count_of,
    print_json,
    progress_bar,
    say,
    size,
    when,
)
from headrace.cli.serve import setting_flag
from headrace.client.address import find_brokers
from headrace.errors import DataCorrupt, InvalidArgument
from headrace.files import Files
from headrace.moving.digest import MessageDigest
from headrace.settings import load

_FLAGS = ("kafka_servers", "cluster", "slots", "kafka_config", "kafka_timeout", "kafka_unsafe")
NODE = "headrace-import"
"""The name of the node that the import is."""
SPARE_S = 15.0
"""For Kafka's group protocol, besides the session of a node that was stopped."""


def register(cluster: typer.Typer) -> None:
    """Make these commands of ``headrace cluster``."""
    cluster.command("import")(import_broker)
    cluster.command("export")(export_cluster)


@with_options("flags", {name: setting_flag(name) for name in _FLAGS}, given_as(dict))
def import_broker(
    flags: dict[str, Any],
    data_dir: Annotated[
        Path,
        typer.Argument(metavar="DATA_DIR", help="The directory of a stopped broker, or a backup."),
    ],
    generation: Generation = None,
    as_json: AsJson = False,
) -> None:
    """Import a single broker into a new cluster over Kafka.

    Everything stays the same: offsets, ids, times, subscriptions and their positions, delayed
    messages, dead letters, named producers. The command only reads DATA_DIR. The cluster must be
    new, and no node of it may run. At the end, the command reads all messages back and compares
    them. If the import is killed, run it again: it continues. No node starts before it is complete.

    \b
    Examples:
      headrace cluster import /var/lib/headrace --kafka-servers k1:9092,k2:9092 --cluster shop
      headrace cluster import /backup/headrace --generation 3 --kafka-servers k1:9092 --cluster test

    \b
    Exit codes:
      0  everything is in the cluster
      1  the same, but some records of the source are damaged; they are marked as lost in the cluster
      2  not imported
    """
    from headrace.clock import new_loop
    from headrace.engine.kafka import make_storage
    from headrace.moving.importing import import_broker as run

    settings = load({**flags, "engine": "kafka", "advertise": NODE}, os.environ)
    make = make_storage(settings)
    from headrace.cluster.founding import (
        Founding,
    )  # now that confluent-kafka is known to be installed

    source: BackupSource
    if (data_dir / MARK).exists():
        source = GenerationSource(BackupDirectory(data_dir), generation)
    else:
        source = DirectorySource(data_dir)
    with (
        disk_errors(),
        progress_bar("importing", hidden=as_json) as bar,
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        done = runner.run(
            run(
                source,
                lambda: Founding(make, 2 * settings.kafka_session + SPARE_S),
                progress=lambda what, done, total: bar.show_step(what, done, total, "message"),
            )
        )
    damaged: list[dict[str, Any]] = [
        {"topic": topic, "partition": number, "first": first, "end": end}
        for topic, number, first, end in done.damaged
    ]
    if as_json:
        document = {name: getattr(done, name) for name in done.__dataclass_fields__}
        print_json({**document, "cluster": settings.cluster, "damaged": damaged})
    else:
        for each in damaged[:SHOWN_MAX]:
            complain(
                f"{each['topic']}/{each['partition']}: offsets {each['first']} to {each['end'] - 1} are damaged in "
                f"{data_dir}, and marked as lost in the cluster"
            )
        say(
            f"Imported {count_of(done.messages, 'message')} of {count_of(done.topics, 'topic')} into cluster "
            f"{settings.cluster}, with {count_of(done.subscriptions, 'subscription')} and "
            f"{count_of(done.producers, 'named producer')}; all messages were read back and are the same. "
            "Users and tokens are in @access.json: copy it to the data directory of one node."
        )
    if damaged:
        raise typer.Exit(1)


@with_broker_place
def export_cluster(
    place: BrokerPlace,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new or empty directory for a broker.")
    ],
    as_json: AsJson = False,
) -> None:
    """Export a running cluster into a data directory for a single broker.

    The directory holds one point in time of everything. Stop the publishers first: messages that
    are published later are not in it. The cluster does not change. At the end, the command compares
    all messages with those of the cluster. If the export is killed, run it again: it continues with
    DIR.export. You need the right admin over everything.

    \b
    Examples:
      headrace cluster export /var/lib/headrace --server node1:9999
      headrace serve --data-dir /var/lib/headrace

    \b
    Exit codes:
      0  DIR is complete
      1  the same, but some records of the cluster are damaged; they are marked as lost in DIR
      2  not exported
    """
    if directory.exists() and (not directory.is_dir() or foreign_names(Files(), directory)):
        raise InvalidArgument(
            f"{directory} is not empty; export into a new directory", code="target_not_empty"
        )
    work = directory.with_name(f"{directory.name}.export")
    host, port, _ = find_brokers(place.server)[0]
    with (
        disk_errors(),
        progress_bar("exporting", hidden=as_json) as bar,
        connected(place) as client,
        batch_reader(place) as reader,
    ):
        taken = take(
            BackupDirectory(work),
            BrokerSource(f"{host}:{port}", client, reader),
            keep=1,
            progress=lambda done, total: bar.show_step("copying", done, total, "message"),
        )
        done = restore(
            BackupDirectory(work),
            directory,
            progress=lambda done, total: bar.show_step("writing", done, total, "byte"),
        )
        compared = _compare(directory, reader, bar)
        shutil.rmtree(work)
    if as_json:
        print_json(
            {
                "topics": done.topics,
                "messages": done.records,
                "bytes": done.bytes,
                "time": done.manifest.time,
                "compared": compared,
            }
        )
    else:
        say(
            f"Exported {count_of(done.records, 'message')} of {count_of(done.topics, 'topic')} "
            f"({size(done.bytes)}, {when(done.manifest.time)} UTC) into {directory}; all messages were compared and are "
            f"the same. Start the broker: headrace serve --data-dir {directory}"
        )
    if taken.damaged:
        raise typer.Exit(1)


def _compare(directory: Path, reader: Any, bar: Bar) -> int:
    """Read everything once more, there and here; how many messages are the same."""
    source = DirectorySource(directory, access=False)
    point = source.begin()
    try:
        total = sum(end - start for topic in point.topics for start, end in topic.extents)
        compared = 0
        for topic, extents in point.topics:
            for number, (start, end) in enumerate(extents):
                here, there = MessageDigest(), MessageDigest()
                for found in source.read(topic, number, start, end):
                    for batch in found:
                        here.add(batch, max(start - batch.base_offset, 0))
                at = start
                for found in reader.read(topic.name, number, start, end):
                    for batch in found:
                        there.add(batch, max(at - batch.base_offset, 0))
                        at = batch.end_offset
                if here != there:
                    raise DataCorrupt(
                        f"{topic.name}/{number} is not the same in {directory}: {here.records} messages with checksum "
                        f"{here.checksum:08x}, not {there.records} with {there.checksum:08x}; remove {directory}, and "
                        "export again",
                        code="export_differs",
                    )
                compared += here.records
                bar.show_step("comparing", compared, total, "message")
        return compared
    finally:
        source.end()

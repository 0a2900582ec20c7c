"""Topics into a lake table, exactly once, with a manifest of what it holds.

::

    topics ──▶ spans ──▶ tasks: records + date ──▶ files ──▶ one commit ──▶ topic=…/date=…/…
                 ▲                                               │ with them: ranges of offsets, number
                 └── position of the group ◀─────────────────────┘

- Every record becomes a row, unchanged: ``key, value, topic, partition, offset, timestamp, headers, id``,
  and ``date``, the day (UTC) of its timestamp.
- The records do not pass through Spark's rows (``archive_source`` says why).
- The table records which offsets it holds, per topic and partition, in the same commit as the rows, and
  refuses an offset twice. So a lost checkpoint loses and doubles nothing: a new query begins where the
  table ends (:func:`starting_offsets`).
- The source moves the subscription ``group`` after each commit, never before. Retention with
  ``retain_unread`` (the default of a topic) therefore deletes no record that is not in the table, and
  every tool shows the archive's lag. The subscription is created before the first record is read.
- A batch takes at most ``BATCH_BYTES`` of the log, so a long backlog is archived in steps that each are
  committed, and a crash repeats one of them.

Rejected: to begin at the group's position (anyone may move or delete it; the table knows which offsets it
holds); records of a topic that was deleted and created again (their offsets begin anew: the source
reports it, and such a topic is archived to another path).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headrace.errors import Conflict, InvalidArgument
from headrace.spark import lake
from headrace.spark.builtin.archive_source import ARCHIVE, FORMAT
from headrace.spark.checkpoints import committed_offsets, has_begun, local_path
from headrace.spark.history.archives import SINK
from headrace.spark.lake.stores import TablePlace, place_of
from headrace.spark.lake.tables import open_table
from headrace.spark.sessions.active_session import active, start_query
from headrace.spark.source.chosen import topics_of
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known, Positions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.spark.pipelines.reporting import Watch

GROUP = "archive"
PARTITION_BY = ("topic", "date")
TRIGGER = "10 seconds"
BATCH_BYTES = "512MB"


def start(
    spark: SparkSession,
    topics: Sequence[str],
    *,
    path: str,
    kind: str = lake.KINDS[0],
    partition_by: Sequence[str] = PARTITION_BY,
    group: str = GROUP,
    source: Mapping[str, Any] | None = None,
    trigger: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> StreamingQuery:
    """Start archiving topics (names, wildcards) into the table at ``path``.

    ``source`` are options of ``format("headrace")``: ``servers``, ``token``, ``maxBytesPerTrigger``…
    ``options`` are those of :class:`headrace.spark.lake.Options`. By default the checkpoint lies in the
    table's directory; for a table in an object store it must be given.
    """
    checkpoint = checkpoint or default_checkpoint(path, group)
    given: dict[str, Any] = {
        "topic": ",".join(topics),
        "group": group,
        "maxBytesPerTrigger": BATCH_BYTES,
        **(source or {}),
    }
    table = {**(options or {}), "path": path, "kind": kind, "partition_by": ",".join(partition_by)}
    chosen = lake.Options.of({"offsets": True, **table})
    given["startingOffsets"] = starting_offsets(given, chosen, checkpoint)
    open_table(chosen).prepare(ARCHIVE)
    with active(spark):
        options = chosen.as_options() | {"source": orjson.dumps(given).decode()}
        records = spark.readStream.format(FORMAT).option("source", options["source"]).load()
    name = f"{group}-{chosen.place.name}"
    trigger = trigger or {"processingTime": TRIGGER}
    return start_query(records, FORMAT, options, checkpoint, name=name, trigger=trigger)


def default_checkpoint(path: str, group: str) -> str:
    """In the table's directory. Spark cannot write a checkpoint into an object store without jars of its own."""
    place = place_of(path)
    if not isinstance(place, Path):
        raise InvalidArgument(
            f"{path} is in an object store: give the checkpoint a directory of its own",
            code="invalid_option",
        )
    return str(place / "_headrace" / "checkpoints" / group)


def starting_offsets(source: Mapping[str, Any], table: lake.Options, checkpoint: str) -> str:
    """Where a query without a checkpoint begins: after the table's offsets, else at the earliest.

    A query with a checkpoint continues there, whatever this returns.
    """
    directory = table.place
    held = lake.Offsets()
    found = open_table(table)
    if found.exists():
        held = found.describe().offsets
    home = local_path(checkpoint)  # elsewhere, only Spark can look
    if home is not None and has_begun(home):
        if not held and _has_read(home):
            raise Conflict(
                f"the checkpoint {checkpoint} is of a table that held records, and {directory} holds "
                "none: the records archived before would be missing. Restore the table, or remove the "
                "checkpoint to archive everything again",
                code="checkpoint_ahead",
            )
        return "earliest"
    if not held:
        return "earliest"
    known = topics_of(SourceOptions.of(source))
    return orjson.dumps(_ends(held, known, directory)).decode()


def _has_read(checkpoint: Path) -> bool:
    """Whether a batch with records was committed, according to Spark's last commit."""
    try:
        sources, _ = committed_offsets(checkpoint)
        positions = Positions.of(sources[0])
    except (IndexError, InvalidArgument):
        return False
    return positions.since(positions.begin or {}) > 0


def _ends(held: lake.Offsets, known: Known, directory: TablePlace) -> dict[str, dict[str, int]]:
    """The end of the table's offsets, for each partition that exists; others begin at their earliest."""
    found: dict[str, dict[str, int]] = {}
    for topic, ends in held.ends().items():
        if topic not in known:
            continue
        for number, end in ends.items():
            extent = known[topic].partitions.get(number)
            if extent is None or extent.end < end:
                state = "has no such partition" if extent is None else f"ends at {extent.end}"
                raise Conflict(
                    f"{directory} holds {topic}/{number} up to offset {end - 1}, and the log {state}: "
                    "the topic was deleted and created again, or this is another broker. Archive it "
                    "to another path",
                    code="offsets_overlap",
                )
            found.setdefault(topic, {})[str(number)] = end
    return found


class ArchiveJob:
    """An archive as a job of a :class:`~headrace.spark.pipelines.running.Runner`."""

    restarts = 3

    def __init__(self, spark: SparkSession, name: str, topics: Sequence[str], **arguments: Any):
        self._spark = spark
        self.name = name
        self._topics = tuple(topics)
        self._arguments = arguments

    def start(self, once: bool) -> list[Watch]:
        from headrace.spark.pipelines.reporting import Watch

        arguments = dict(self._arguments)
        if once:
            arguments["trigger"] = {"availableNow": True}
        query = start(self._spark, self._topics, **arguments)
        group = arguments.get("group", GROUP)
        interval = (arguments.get("trigger") or {"processingTime": TRIGGER}).get("processingTime")
        return [
            Watch(
                query,
                # Whoever reads log and archive as one finds the table by this report, from wherever it is.
                SINK + str(place_of(arguments["path"])),
                self._topics,
                interval=interval,
                groups=[(group, topic) for topic in self._topics],
            )
        ]

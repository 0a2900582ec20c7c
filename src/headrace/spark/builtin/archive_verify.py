"""Whether an archive and the log hold the same records.

::

    log    ──▶ (topic, partition, bucket of 10,000 offsets): count, two sums over each record's hash ─┐
    table  ──▶ the same, and what the manifest says of the bucket                                    ─┴▶ compared
    buckets that differ ──▶ offset by offset

A record's hash is over everything that an archive keeps of it: offset, timestamp, key, value, headers, id.
The sums (exclusive or, and modulo 2^64 of its halves) do not depend on the order of records, so neither
side is sorted; that a changed, missing or doubled record leaves all three numbers as they were has a
chance of 2^-90.

Per partition, the records from the first offset in the log to the last one in the table are compared.
Retention has deleted the records before these from the log: of those the count and the offsets are
checked against the manifest. Records after these are not archived yet: that is the lag, not a difference.

A file of the table that is missing or damaged is named with the offsets that it held: those that the manifest lists,
that its statistics allow, and that no other file has. The rest of the table is compared without it. The footers of all
files are looked at before; damage behind a footer is looked for when Spark cannot read the table.

Rejected: comparing with the checksums of batches in the log (they are over bytes as stored, which another
compression changes); a hash in the table itself (a person who can change a row can change that, too).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F

from headrace.errors import HeadraceError, InvalidArgument
from headrace.spark import lake
from headrace.spark.builtin.offset_ranges import is_within, topic_rows
from headrace.spark.error_sentences import error_of
from headrace.spark.history.archives import offsets_of
from headrace.spark.history.files import why_unreadable
from headrace.spark.lake import Offsets, Span
from headrace.spark.lake.table import Table, TableSnapshot
from headrace.spark.lake.tables import find_table, open_table
from headrace.spark.sessions.connect import cores_of
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known
from headrace.spark.source.stores import existing_topics, open_store

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BUCKET = 10_000
LOOKED_INTO_MAX = 50
"""Buckets that are looked into offset by offset; of the others it is said that they differ."""
HASHED = ("offset", "timestamp", "key", "value", "headers", "id")


class Difference(NamedTuple):
    """A difference, and the offsets that have it."""

    kind: str
    span: Span

    def __str__(self) -> str:
        return f"{self.span} {KINDS[self.kind]}"


KINDS = {
    "missing": "is in the log and not in the table",
    "extra": "is in the table and not in the log",
    "doubled": "is in the table more than once",
    "changed": "is not the same in the table as in the log",
    "unlisted": "is in the table and not in its manifest",
    "lost": "is in the manifest and not in the table",
    "differs": "differs somewhere (not looked into: there are too many differences)",
}


class LostFile(NamedTuple):
    """A file of the table that cannot be read."""

    path: str
    why: str
    offsets: Offsets
    """What it held."""

    def __str__(self) -> str:
        spans = list(self.offsets)
        more = f" and {len(spans) - 20} more ranges" if len(spans) > 20 else ""
        return (
            f"{self.path} {self.why}; it held {', '.join(map(str, spans[:20])) or 'nothing'}{more}"
        )


@dataclass
class Verdict:
    """The result of a comparison."""

    compared: Offsets = field(default_factory=Offsets)
    """Of these, log and table were compared record by record."""
    records: int = 0
    """How many records that were."""
    only_in_table: Offsets = field(default_factory=Offsets)
    """Deleted in the log by now."""
    waiting: Offsets = field(default_factory=Offsets)
    """In the log and not archived yet."""
    gone: list[str] = field(default_factory=list)
    """Topics of the table that the log does not have any more."""
    offsets: dict[str, Offsets] = field(default_factory=dict)
    """The offsets that differ, by the kind of difference."""
    files: list[LostFile] = field(default_factory=list)
    """The files that cannot be read."""

    def add(self, kind: str, spans: Iterable[Span]) -> None:
        for span in spans:
            self.offsets.setdefault(kind, Offsets()).add(*span)

    @property
    def differences(self) -> list[Difference]:
        return [Difference(kind, span) for kind, spans in self.offsets.items() for span in spans]

    @property
    def is_good(self) -> bool:
        return not self.offsets and not self.files

    def as_document(self) -> dict[str, Any]:
        return {
            "good": self.is_good,
            "records": self.records,
            "compared": self.compared.as_document(),
            "only_in_table": self.only_in_table.as_document(),
            "waiting": self.waiting.as_document(),
            "gone": self.gone,
            "differences": [{"kind": kind, **span._asdict()} for kind, span in self.differences],
            "files": [
                {"path": each.path, "why": each.why, "offsets": each.offsets.as_document()}
                for each in self.files
            ],
        }


def verify(
    spark: SparkSession,
    path: str,
    source: Mapping[str, Any],
    *,
    kind: str | None = None,
    topics: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Verdict:
    """Compare the table at ``path`` with the log.

    ``source`` says where the log is: ``servers`` (and ``token``, ``ca``), or ``path`` for a data
    directory. ``topics`` (names): only these of the table. ``options``: those of :class:`lake.Options`.
    """
    table = find_table(path, kind, **(options or {}))
    snapshot, store = table.snapshot(), table.store()
    _only(snapshot.offsets, topics, path)
    broken = {
        file.name: why
        for file in snapshot.files
        if (why := why_unreadable(store, file.name, footer=True)) is not None
    }
    try:
        return _verify(spark, table, source, topics, snapshot, broken)
    except HeadraceError:
        raise
    except Exception as error:  # of Spark
        left = [file.name for file in snapshot.files if file.name not in broken]
        damaged = _unreadable(spark, table.options, left)
        if not damaged:
            raise error_of(error) from error
    return _verify(spark, table, source, topics, snapshot, broken | damaged)


def _unreadable(spark: SparkSession, options: lake.Options, names: Sequence[str]) -> dict[str, str]:
    """The files that cannot be read to their end, and why."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_table(options).store()
        for batch in batches:
            found = [(name, why_unreadable(store, name)) for name in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pylist(
                [{"name": name, "why": why} for name, why in found if why is not None],
                schema=pa.schema([("name", pa.string()), ("why", pa.string())]),
            )

    files = spark.createDataFrame([(name,) for name in names], "name string")
    found = files.repartition(max(1, min(len(names), 100))).mapInArrow(
        look, "name string, why string"
    )
    return {row["name"]: row["why"] for row in found.collect()}


def _verify(
    spark: SparkSession,
    table: Table,
    source: Mapping[str, Any],
    topics: Sequence[str] | None,
    snapshot: TableSnapshot,
    broken: Mapping[str, str],
) -> Verdict:
    held = _only(snapshot.offsets, topics, str(table.path))
    names = sorted({topic for topic, _ in held.partitions()})
    known = _known(source, names)
    verdict = Verdict(gone=[name for name in names if name not in known])
    lost = [file for file in snapshot.files if file.name in broken]
    verdict.files = [
        LostFile(f"{table.files_root}/{file.name}", broken[file.name], found)
        for file, found in zip(lost, offsets_of(lost, snapshot, table.store()), strict=True)
    ]
    absent = Offsets(span for each in verdict.files for span in each.offsets)
    windows = _windows(held, known, verdict)
    verdict.compared = verdict.compared.without(absent)
    verdict.only_in_table = verdict.only_in_table.without(absent)
    held = held.without(absent)
    rows = lake.read(spark, without=broken, **table.options.as_options())
    if topics is not None:
        rows = rows.where(rows.topic.isin(names))
    in_table = _buckets(rows, windows)
    in_log = {}
    if windows:
        in_log = _buckets(_records(spark, source, windows, absent), windows)
        verdict.records = sum(bucket.inside for bucket in in_log.values())
    unclear = _compare(in_table, in_log, held, verdict)
    if unclear:
        asked = Offsets(key.span for key in unclear[:LOOKED_INTO_MAX])
        _look_into(spark, rows, source, windows, absent, asked, held, verdict)
        verdict.add("differs", [key.span for key in unclear[LOOKED_INTO_MAX:]])
    return verdict


def _only(offsets: Offsets, topics: Sequence[str] | None, path: str) -> Offsets:
    if not offsets:
        raise InvalidArgument(
            f"{path} keeps no offset ranges: it is not an archive, or nothing was archived yet",
            code="not_an_archive",
        )
    if topics is None:
        return offsets
    archived = {topic for topic, _ in offsets.partitions()}
    for topic in topics:
        if topic not in archived:
            raise InvalidArgument(
                f"{path} holds nothing of {topic!r}; it has {', '.join(sorted(archived))}",
                code="not_archived",
            )
    return Offsets(span for span in offsets if span.topic in topics)


def _known(source: Mapping[str, Any], names: Sequence[str]) -> Known:
    """The topics in the log; those that were deleted are left out."""
    with closing(open_store(SourceOptions.of({**source, "topic": ",".join(names)}))) as store:
        return existing_topics(store, names)


# --- windows -------------------------------------------------------------------------------------
def _windows(held: Offsets, known: Known, verdict: Verdict) -> Offsets:
    """What both sides must have: one range for each partition."""
    windows = Offsets()
    for topic, state in known.items():
        for number, extent in state.partitions.items():
            ranges = held.of(topic, number)
            end = ranges[-1][1] if ranges else 0
            # Rows after the log's end never existed there: they are compared, and found to be extra.
            windows.add(topic, number, extent.start, end)
            verdict.compared.add(topic, number, extent.start, min(end, extent.end))
            verdict.waiting.add(topic, number, max(end, extent.start), extent.end)
            for start, stop in ranges:
                verdict.only_in_table.add(topic, number, start, min(stop, extent.start))
    return windows


def _records(
    spark: SparkSession, source: Mapping[str, Any], windows: Offsets, absent: Offsets
) -> DataFrame:
    """The log's records in the windows, but not those of files that cannot be read."""
    known = _known(source, sorted({topic for topic, _ in windows.partitions()}))
    stored = Offsets(  # retention may have deleted more since
        Span(topic, number, extent.start, extent.end)
        for topic, state in known.items()
        for number, extent in state.partitions.items()
    )
    tasks = {"minPartitions": cores_of(spark)}
    rows = topic_rows(spark, {**source, **tasks}, known, windows.common(stored))
    return rows.where(~is_within(absent)) if absent else rows


# --- buckets --------------------------------------------------------------------------------------
class Key(NamedTuple):
    topic: str
    partition: int
    bucket: int

    @property
    def span(self) -> Span:
        start = self.bucket * BUCKET
        return Span(self.topic, self.partition, start, start + BUCKET)


class Bucket(NamedTuple):
    """The records of one side at some offsets."""

    inside: int
    """Rows inside the window, as are the sums."""
    sums: tuple[int, int, int]
    rows: int
    """Wherever they are."""
    lowest: int
    highest: int


NOTHING = Bucket(0, (0, 0, 0), 0, 0, 0)


def _buckets(rows: DataFrame, windows: Offsets) -> dict[Key, Bucket]:
    half = F.lit(0xFFFFFFFF)
    bounds = rows.sparkSession.createDataFrame(
        list(windows), "topic string, partition int, first bigint, end bigint"
    )
    inside = (F.col("offset") >= F.col("first")) & (F.col("offset") < F.col("end"))
    found = (
        rows.join(F.broadcast(bounds), ["topic", "partition"], "left")
        .withColumn("hash", F.when(inside, _hash()))
        .groupBy("topic", "partition", F.expr(f"offset div {BUCKET}").alias("bucket"))
        .agg(
            F.count("hash").alias("inside"),
            F.coalesce(F.bit_xor("hash"), F.lit(0)).alias("mixed"),
            F.coalesce(F.sum(F.col("hash").bitwiseAND(half)), F.lit(0)).alias("low"),
            F.coalesce(F.sum(F.shiftrightunsigned("hash", 32)), F.lit(0)).alias("high"),
            F.count("*").alias("rows"),
            F.min("offset").alias("lowest"),
            F.max("offset").alias("highest"),
        )
    )
    return {
        Key(*row[:3]): Bucket(row["inside"], tuple(row[4:7]), *row[7:])
        for row in found.toLocalIterator()
    }


def _compare(
    in_table: Mapping[Key, Bucket], in_log: Mapping[Key, Bucket], held: Offsets, verdict: Verdict
) -> list[Key]:
    """The buckets that must be looked into; clear differences go into the verdict at once."""
    unclear = []
    listed = _listed(held)
    for key in sorted({*in_table, *in_log, *listed}):
        mine, theirs = in_table.get(key, NOTHING), in_log.get(key, NOTHING)
        if mine.rows:
            same = (mine.inside, mine.sums) == (theirs.inside, theirs.sums)
            if not same or mine.rows != listed.get(key, 0):
                unclear.append(key)
            continue
        # Nothing of it is in the table: all that the log has of it is missing.
        missing = Offsets()
        if theirs.rows:
            missing.add(key.topic, key.partition, theirs.lowest, theirs.highest + 1)
        if missing.count != theirs.inside:
            unclear.append(key)
            continue
        verdict.add("missing", missing)
        verdict.add("lost", Offsets([key.span]).common(held).without(missing))
    return unclear


def _listed(held: Offsets) -> dict[Key, int]:
    """How many offsets of each bucket the manifest has."""
    found: dict[Key, int] = {}
    for topic, partition, start, end in held:
        for bucket in range(start // BUCKET, (end - 1) // BUCKET + 1):
            key = Key(topic, partition, bucket)
            count = min(end, key.span.end) - max(start, key.span.start)
            found[key] = found.get(key, 0) + count
    return found


# --- offset by offset -----------------------------------------------------------------------------
def _look_into(
    spark: SparkSession,
    rows: DataFrame,
    source: Mapping[str, Any],
    windows: Offsets,
    absent: Offsets,
    asked: Offsets,
    held: Offsets,
    verdict: Verdict,
) -> None:
    mine = _hashes(rows, asked)
    shared = asked.hull().common(windows)
    theirs = _hashes(_records(spark, source, shared, absent), asked) if shared else {}
    in_table, in_log = _places(mine), _places(theirs)
    verdict.add("doubled", _places(place for place, hashes in mine.items() if len(hashes) > 1))
    verdict.add("unlisted", in_table.without(held))
    verdict.add("missing", in_log.without(in_table))
    verdict.add("extra", in_table.common(windows).without(in_log))
    both = mine.keys() & theirs.keys()
    verdict.add("changed", _places(each for each in both if {*mine[each]} != {theirs[each][0]}))
    verdict.add("lost", asked.common(held).without(in_table).without(in_log))


def _hash() -> Column:
    """Older archives hold an empty value for a null one; the headers tell them apart."""
    columns = (F.coalesce(name, F.lit(b"")) if name == "value" else F.col(name) for name in HASHED)
    return F.xxhash64(*columns)


def _hashes(rows: DataFrame, asked: Offsets) -> dict[tuple[str, int, int], list[int]]:
    """The hashes of the records at these offsets."""
    found: dict[tuple[str, int, int], list[int]] = {}
    columns = ("topic", "partition", "offset", _hash())
    for *place, hashed in rows.where(is_within(asked)).select(*columns).toLocalIterator():
        found.setdefault(tuple(place), []).append(hashed)
    return found


def _places(places: Iterable[tuple[str, int, int]]) -> Offsets:
    return Offsets(Span(*place, place[-1] + 1) for place in sorted(places))

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

Rejected: comparing with the checksums of batches in the log (they are over bytes as stored, which another
compression changes); a hash in the table itself (a person who can change a row can change that, too).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from headrace.errors import InvalidArgument, NotFound
from headrace.spark import lake
from headrace.spark.lake import Offsets, Span
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known
from headrace.spark.source.stores import open_store

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
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.differences

    def as_document(self) -> dict[str, Any]:
        return {
            "good": self.is_good,
            "records": self.records,
            "compared": self.compared.as_document(),
            "only_in_table": self.only_in_table.as_document(),
            "waiting": self.waiting.as_document(),
            "gone": self.gone,
            "differences": [{"kind": kind, **span._asdict()} for kind, span in self.differences],
        }


def verify(
    spark: SparkSession,
    path: str,
    source: Mapping[str, Any],
    *,
    kind: str | None = None,
    topics: Sequence[str] | None = None,
) -> Verdict:
    """Compare the table at ``path`` with the log.

    ``source`` says where the log is: ``servers`` (and ``token``, ``ca``), or ``path`` for a data
    directory. ``topics`` (names): only these of the table.
    """
    table = lake.describe(path, kind)
    held = _only(table.offsets, topics, path)
    names = sorted({topic for topic, _ in held.partitions()})
    known = _known(source, names)
    verdict = Verdict(gone=[name for name in names if name not in known])
    windows = _windows(held, known, verdict)
    rows = lake.read(spark, path, kind)
    if topics is not None:
        rows = rows.where(rows.topic.isin(names))
    in_table = _buckets(rows, windows)
    in_log = {}
    if windows:
        in_log = _buckets(_records(spark, source, windows), windows)
        verdict.records = sum(bucket.inside for bucket in in_log.values())
    open_questions = _compare(in_table, in_log, held, windows, verdict)
    if open_questions:
        _look_into(spark, rows, source, windows, open_questions[:LOOKED_INTO_MAX], held, verdict)
        for key in open_questions[LOOKED_INTO_MAX:]:
            verdict.differences.append(Difference("differs", key.span))
    verdict.differences = _joined(verdict.differences)
    return verdict


def _only(offsets: Offsets, topics: Sequence[str] | None, path: str) -> Offsets:
    if not offsets:
        raise InvalidArgument(
            f"{path} keeps no offset ranges: it is not an archive, or nothing was archived yet",
            code="not_an_archive",
        )
    if topics is None:
        return offsets
    there = {topic for topic, _ in offsets.partitions()}
    for topic in topics:
        if topic not in there:
            raise InvalidArgument(
                f"{path} holds nothing of {topic!r}; it has {', '.join(sorted(there))}",
                code="not_archived",
            )
    return Offsets(span for span in offsets if span.topic in topics)


def _known(source: Mapping[str, Any], names: Sequence[str]) -> Known:
    """The topics in the log; those that were deleted are left out."""
    found: dict[str, Any] = {}
    try:
        return _ask(source, names)
    except NotFound:
        for name in names:
            with suppress(NotFound):
                found |= _ask(source, [name])
    return found


def _ask(source: Mapping[str, Any], names: Sequence[str]) -> Known:
    store = open_store(SourceOptions.of({**source, "topic": ",".join(names)}))
    try:
        return store.topics(names)
    finally:
        store.close()


# --- windows -------------------------------------------------------------------------------------
Windows = dict[tuple[str, int], tuple[int, int]]
"""The first offset and the end of what both sides must have, by topic and partition."""


def _windows(held: Offsets, known: Known, verdict: Verdict) -> Windows:
    windows: Windows = {}
    there = Offsets()
    for topic, state in known.items():
        for number, extent in state.partitions.items():
            there.add(topic, number, extent.start, extent.end)
    ends = held.ends()
    for topic, number in held.partitions():
        if topic not in known or number not in known[topic].partitions:
            continue
        extent = known[topic].partitions[number]
        # Rows after the log's end never existed there: they are compared, and found to be extra.
        end = ends[topic][number]
        if extent.start < end:
            windows[topic, number] = (extent.start, end)
            verdict.compared.add(topic, number, extent.start, min(end, extent.end))
        verdict.only_in_table.add_all(
            Offsets(
                Span(topic, number, start, min(stop, extent.start))
                for start, stop in held.of(topic, number)
            )
        )
        verdict.waiting.add(topic, number, max(end, extent.start), extent.end)
    for topic, number in there.partitions():
        if not held.of(topic, number):
            verdict.waiting.add_all(
                Offsets(Span(topic, number, *r) for r in there.of(topic, number))
            )
    return windows


def _records(spark: SparkSession, source: Mapping[str, Any], windows: Windows) -> DataFrame:
    """The log's records in the windows."""
    names = sorted({topic for topic, _ in windows})
    known = _known(source, names)
    starting: dict[str, dict[str, int]] = {}
    ending: dict[str, dict[str, int]] = {}
    for topic in names:
        for number, extent in known[topic].partitions.items():
            start, end = windows.get((topic, number), (extent.start, extent.start))
            start = max(start, extent.start)  # retention may have deleted more since
            starting.setdefault(topic, {})[str(number)] = min(start, extent.end)
            ending.setdefault(topic, {})[str(number)] = max(min(end, extent.end), start)
    return (
        spark.read.format("headrace")
        .options(**source)
        .option("topic", ",".join(names))
        .option("startingOffsets", orjson.dumps(starting).decode())
        .option("endingOffsets", orjson.dumps(ending).decode())
        .option("minPartitions", spark.sparkContext.defaultParallelism)
        .load()
    )


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


def _hash() -> Column:
    from pyspark.sql import functions as F

    return F.xxhash64(*HASHED)


def _buckets(rows: DataFrame, windows: Windows) -> dict[Key, Bucket]:
    from pyspark.sql import functions as F

    half = F.lit(0xFFFFFFFF)
    table = [(*place, *window) for place, window in sorted(windows.items())]
    bounds = rows.sparkSession.createDataFrame(
        table, "topic string, partition int, first bigint, end bigint"
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
        Key(row["topic"], row["partition"], row["bucket"]): Bucket(
            row["inside"],
            (row["mixed"], row["low"], row["high"]),
            row["rows"],
            row["lowest"],
            row["highest"],
        )
        for row in found.toLocalIterator()
    }


def _compare(
    in_table: Mapping[Key, Bucket],
    in_log: Mapping[Key, Bucket],
    held: Offsets,
    windows: Windows,
    verdict: Verdict,
) -> list[Key]:
    """The buckets that must be looked into; clear differences go into the verdict at once."""
    open_questions = []
    listed = _listed(held)
    for key in sorted({*in_table, *in_log, *listed}):
        mine, theirs = in_table.get(key), in_log.get(key)
        if mine is None:
            # Nothing of it is in the table: all that the log has of it is missing.
            if theirs is not None and theirs.highest - theirs.lowest + 1 == theirs.inside:
                span = Span(key.topic, key.partition, theirs.lowest, theirs.highest + 1)
                verdict.differences.append(Difference("missing", span))
            elif theirs is not None:
                open_questions.append(key)
                continue
            rest = Offsets([key.span]).common(held)
            if theirs is not None:
                rest = rest.without(
                    Offsets([Span(key.topic, key.partition, theirs.lowest, theirs.highest + 1)])
                )
            verdict.differences += [Difference("lost", span) for span in rest]
            continue
        same = (
            mine.inside == theirs.inside and mine.sums == theirs.sums
            if theirs is not None
            else mine.inside == 0
        )
        if not same or mine.rows != listed.get(key, 0):
            open_questions.append(key)
    return open_questions


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
    windows: Windows,
    keys: Sequence[Key],
    held: Offsets,
    verdict: Verdict,
) -> None:
    wanted = {
        place: (
            min(key.span.start for key in keys if key[:2] == place),
            max(key.span.end for key in keys if key[:2] == place),
        )
        for place in {key[:2] for key in keys}
    }
    mine = _hashes(rows, keys)
    narrowed = {
        place: (max(start, wanted[place][0]), min(end, wanted[place][1]))
        for place, (start, end) in windows.items()
        if place in wanted
    }
    narrowed = {place: window for place, window in narrowed.items() if window[0] < window[1]}
    theirs = _hashes(_records(spark, source, narrowed), keys) if narrowed else {}
    for place in sorted({*mine, *theirs}):
        topic, partition, offset = place
        span = Span(topic, partition, offset, offset + 1)
        start, end = windows.get((topic, partition), (0, 0))
        hashes, other = mine.get(place, []), theirs.get(place, [])
        listed = bool(Offsets([span]).common(held))
        if len(hashes) > 1:
            verdict.differences.append(Difference("doubled", span))
        if hashes and not listed:
            verdict.differences.append(Difference("unlisted", span))
        if start <= offset < end:
            if not hashes:
                verdict.differences.append(Difference("missing", span))
            elif not other:
                verdict.differences.append(Difference("extra", span))
            elif any(each != other[0] for each in hashes):
                verdict.differences.append(Difference("changed", span))
    there = Offsets(Span(t, p, o, o + 1) for t, p, o in sorted({*mine, *theirs}))
    for key in keys:
        lost = Offsets([key.span]).common(held).without(there)
        verdict.differences += [Difference("lost", span) for span in lost]


def _hashes(rows: DataFrame, keys: Sequence[Key]) -> dict[tuple[str, int, int], list[int]]:
    """Each record of these buckets."""
    from pyspark.sql import functions as F

    wanted = F.lit(False)
    for key in keys:
        wanted = wanted | (
            (F.col("topic") == key.topic)
            & (F.col("partition") == key.partition)
            & (F.col("offset") >= key.span.start)
            & (F.col("offset") < key.span.end)
        )
    found: dict[tuple[str, int, int], list[int]] = {}
    chosen = rows.where(wanted).select("topic", "partition", "offset", _hash().alias("hash"))
    for row in chosen.toLocalIterator():
        found.setdefault((row["topic"], row["partition"], row["offset"]), []).append(row["hash"])
    return found


def _joined(differences: Iterable[Difference]) -> list[Difference]:
    """Neighbours of the same kind as one."""
    by_kind: dict[str, Offsets] = {}
    for kind, span in differences:
        by_kind.setdefault(kind, Offsets()).add(*span)
    return [Difference(kind, span) for kind, offsets in by_kind.items() for span in offsets]

"""``headrace archive``: write topics into a lake table, and prove that it holds them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.connecting import connected
from headrace.cli.printing import AsJson, count_of, print_json, print_listing, print_rows, say, size
from headrace.cli.spark_work import (
    DataDir,
    Format,
    Log,
    Once,
    SparkPlace,
    TableOptions,
    check_installed,
    run_job,
    sparkling,
    state_directory,
    table_options,
    watched,
    with_place,
)
from headrace.cli.values import size_option
from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.builtin.archive import ArchiveJob
    from headrace.spark.builtin.archive_verify import Verdict
    from headrace.spark.lake import Description

archive = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Table = Annotated[str, typer.Argument(metavar="PATH", help="The table: a directory, or s3://…")]
SHOWN_MAX = 50
"""Differences that are printed; all of them are in --json."""


@archive.command()
@with_place
def run(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="Topics and wildcards.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PATH", help="The table; created if it does not exist.")
    ],
    format_: Format = None,
    group: Annotated[
        str, typer.Option(help="The subscription that keeps records until they are archived.")
    ] = "archive",
    name: Annotated[
        str | None, typer.Option(help="The archive's name as a pipeline; default: the group.")
    ] = None,
    partition_by: Annotated[
        str, typer.Option(metavar="COLUMNS", help="Columns that partition the table.")
    ] = "topic,date",
    once: Once = False,
    trigger: Annotated[
        str, typer.Option(metavar="TIME", help="How often rows are committed.")
    ] = "10 seconds",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The checkpoint; default: in TABLE/_headrace, or ~/.local/state for a store.",
        ),
    ] = None,
    compact_every: Annotated[
        int,
        typer.Option(min=0, help="Commits between compactions of small files; 0: never compact."),
    ] = 20,
    option: TableOptions = None,
    log: Log = None,
    *,
    place: SparkPlace,
) -> None:
    """Write topics into a lake table until stopped.

    Every record is written exactly once. The table records which offsets it holds, so nothing is lost
    or written twice if the checkpoint is lost. The broker keeps records that are not archived yet
    (retain_unread) and shows them as the group's lag.

    \b
    Examples:
      headrace archive run orders --to /lake/orders
      headrace archive run 'shop.>' --to /lake/shop --format iceberg --once
      headrace archive run orders --to s3://lake/orders
      headrace archive run orders --to s3://lake/orders -o catalog=prod -o table=shop.orders
    """
    check_installed()
    from headrace.spark.lake.stores import place_of
    from headrace.spark.lake.table import KINDS, Options, check_kind
    from headrace.spark.lake.tables import kind_of, open_table

    options, target = table_options(option), place_of(to)
    kind = "iceberg" if "catalog" in options else KINDS[0]
    kind = check_kind(format_ or kind_of(target, **options) or kind)
    options = {"compact_every": str(compact_every), **options}
    open_table(
        Options.of({**options, "path": to, "kind": kind})
    )  # mistakes are said before Spark starts
    if checkpoint is None and not isinstance(target, Path):
        named = f"{group}-{sha256(str(target).encode()).hexdigest()[:12]}"
        checkpoint = str(state_directory() / "archives" / named)
    source = place.source()
    with connected(place.broker) as client:
        client.positions(
            list(topics)
        )  # a topic that does not exist is an error before Spark starts

    def job(spark: SparkSession) -> ArchiveJob:
        from headrace.spark.builtin.archive import ArchiveJob
        from headrace.spark.notation import spark_duration

        return ArchiveJob(
            spark,
            name or group,
            topics,
            path=to,
            kind=kind,
            partition_by=[each.strip() for each in partition_by.split(",") if each.strip()],
            group=group,
            source=source,
            trigger={"processingTime": spark_duration(trigger)},
            checkpoint=checkpoint,
            options=options,
        )

    run_job(job, name="archive", place=place, once=once, log=log)


@archive.command()
@with_place
def verify(
    path: Table,
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="Only these topics; default: all."),
    ] = None,
    data_dir: DataDir = None,
    option: TableOptions = None,
    as_json: AsJson = False,
    log: Log = None,
    *,
    place: SparkPlace,
) -> None:
    """Compare a table with the log, record by record.

    Exit code 0: they hold the same records. 1: they differ, and the output says where.

    \b
    Examples:
      headrace archive verify /lake/orders
      headrace archive verify /lake/orders --path /backup/data --json
    """
    check_installed()
    from headrace.spark.builtin.archive_verify import verify as compare
    from headrace.spark.lake import describe

    source = place.source(data_dir)
    options = table_options(option)
    describe(path, **options)  # a table that does not exist is an error before Spark starts
    if data_dir is None:
        with connected(place.broker):
            pass
    with sparkling("archive verify", place, log) as spark:
        verdict = watched(
            spark,
            "comparing",
            lambda: compare(spark, path, source, topics=topics or None, options=options),
        )
    if as_json:
        print_json(verdict.as_document())
    else:
        _print_verdict(path, verdict)
    raise typer.Exit(0 if verdict.is_good else 1)


def _print_verdict(path: str, verdict: Verdict) -> None:
    if verdict.only_in_table:
        count = count_of(verdict.only_in_table.count, "record")
        say(f"the log has deleted {count} of the table: counted, not compared")
    for topic in verdict.gone:
        say(f"the log has no topic {topic} any more: counted, not compared")
    if verdict.waiting:
        say(f"not archived yet: {count_of(verdict.waiting.count, 'record')}")
    for file in verdict.files[:SHOWN_MAX]:
        say(str(file))
    if len(verdict.files) > SHOWN_MAX:
        say(f"and {count_of(len(verdict.files) - SHOWN_MAX, 'file')} more; --json has all of them")
    for difference in verdict.differences[:SHOWN_MAX]:
        say(str(difference))
    more = len(verdict.differences) - SHOWN_MAX
    if more > 0:
        say(f"and {count_of(more, 'difference')} more; --json has all of them")
    records = count_of(verdict.records, "record")
    if verdict.is_good:
        say(f"{path} and the log hold the same: {records} compared")
    else:
        say(f"{path} and the log differ; {records} compared")


@archive.command("list")
def list_tables(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Tables, or directories of tables.")
    ],
    option: TableOptions = None,
    as_json: AsJson = False,
) -> None:
    """List tables: format, rows, files, size, topics.

    \b
    Example:
      headrace archive list /lake
    """
    check_installed()
    from headrace.spark.lake import describe

    options = table_options(option)
    found = [describe(path, **options) for path in _tables(paths, options)]
    rows = [
        {
            "path": each.path,
            "kind": each.kind,
            "rows": each.rows,
            "files": each.files,
            "size": size(each.bytes),
            "topics": ", ".join(sorted({topic for topic, _ in each.offsets.partitions()})) or None,
        }
        for each in found
    ]
    names = ("path", "kind", "rows", "files", "size", "topics")
    document = [each.as_document() for each in found]
    print_listing(as_json, document, rows, names, "No tables.")


def _tables(paths: list[str], options: dict[str, str]) -> list[str]:
    from headrace.spark.lake.stores import place_of
    from headrace.spark.lake.tables import kind_of

    found: list[str] = []
    for given in paths:
        place = place_of(given)
        if not isinstance(place, Path) or kind_of(place, **options) is not None:
            found.append(str(place))
            continue
        if not place.is_dir():
            raise InvalidArgument(f"there is no directory {place}", code="table_not_found")
        found += [str(each) for each in sorted(place.iterdir()) if each.is_dir() and kind_of(each)]
    return found


@archive.command()
def show(path: Table, option: TableOptions = None, as_json: AsJson = False) -> None:
    """Show the offsets that a table holds, by partition.

    \b
    Example:
      headrace archive show /lake/orders
    """
    check_installed()
    from headrace.spark.lake import describe

    table = describe(path, **table_options(option))
    if as_json:
        print_json(table.as_document())
        return
    say(
        f"{table.path}: {table.kind}, version {table.version}, {count_of(table.rows, 'row')} in "
        f"{count_of(table.files, 'file')}, {size(table.bytes)}, "
        f"partitioned by {', '.join(table.partition_by) or 'nothing'}"
    )
    say("")
    columns = ("topic", "partition", "first", "next", "records", "missing")
    print_rows(_manifest(table), columns, "It records no offset ranges.")


def _manifest(table: Description) -> list[dict[str, Any]]:
    gaps = table.offsets.gaps()
    rows = []
    for topic, partition in table.offsets.partitions():
        ranges = table.offsets.of(topic, partition)
        rows.append(
            {
                "topic": topic,
                "partition": partition,
                "first": ranges[0][0],
                "next": ranges[-1][1],
                "records": sum(end - start for start, end in ranges),
                "missing": sum(end - start for start, end in gaps.of(topic, partition)),
            }
        )
    return rows


@archive.command()
def compact(
    path: Table,
    target: Annotated[
        int, size_option(help="Largest size of a joined file, such as 256MB.", low=1 << 20)
    ] = 128 << 20,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Also delete files that no reader needs any more.")
    ] = False,
    option: TableOptions = None,
) -> None:
    """Join small files of a table into large ones.

    A query may write to the table at the same time. Readers see the old files or the new ones. --vacuum
    deletes the old files, and files of failed attempts, when they are older than a day.

    \b
    Example:
      headrace archive compact /lake/orders --vacuum
    """
    check_installed()
    from headrace.spark import lake

    options: dict[str, Any] = {**table_options(option)}
    done = lake.compact(path, target_bytes=target, **options)
    say(f"joined {count_of(done.removed, 'file')} into {done.added}")
    if vacuum:
        say(f"deleted {count_of(lake.vacuum(path, **options), 'file')}")

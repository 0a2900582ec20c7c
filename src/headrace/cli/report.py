"""``headrace report``: what a broker did over some time, as one page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.printing import say
from headrace.cli.spark_work import (
    DataDir,
    History,
    Log,
    SparkPlace,
    check_installed,
    sparkling,
    watched,
    with_place,
)
from headrace.clock import Clock
from headrace.errors import InvalidArgument
from headrace.notation import parse_moment


@with_place
def report(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]...", help="Topics whose message sizes are shown; default: all."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page is written.")
    ] = Path("report.html"),
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Where it begins; 1h means one hour ago.")
    ] = "24h",
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Where it ends; default: now.")
    ] = None,
    no_sizes: Annotated[
        bool, typer.Option("--no-sizes", help="Do not read messages to show their sizes.")
    ] = False,
    path: DataDir = None,
    history: History = None,
    log: Log = None,
    *,
    place: SparkPlace,
) -> None:
    """Write a page with plots: traffic, sizes, lag, latency, dead letters, pipelines.

    The page is one HTML file that needs nothing else. Its numbers come from the log and from the broker's own
    events, which are kept for 7 days.

    \b
    Examples:
      headrace report
      headrace report --since 7d --output week.html
      headrace report 'orders.*' --since 2026-01-31T00:00:00Z --until 2026-02-01T00:00:00Z
    """
    check_installed()
    from headrace.spark.report.collecting import Period, collect
    from headrace.spark.report.page import html_of
    from headrace.spark.sql.catalog import Catalog
    from headrace.spark.sql.output import replacing

    now = Clock().now_ms()
    start = parse_moment("--since", since, now)
    end = now if until is None else parse_moment("--until", until, now)
    period = Period.of(start, end)
    if not output.absolute().parent.is_dir():
        raise InvalidArgument(
            f"the folder {output.absolute().parent} of {output.name} does not exist"
        )
    source = place.source(path)
    if history is not None:
        source["history"] = history
    catalog = Catalog(source)
    try:
        for name in topics or ():
            if not catalog.known(name):
                raise catalog.no_such(name)
        catalog.names()  # fails now if no broker answers
    finally:
        catalog.close()
    with sparkling("report", place, log) as spark:
        found = watched(
            spark,
            "collecting",
            lambda: collect(spark, source, period, topics=topics or (">",), sizes=not no_sizes),
        )
    with replacing(output) as stream:
        stream.write(html_of(found, made_ms=now).encode())
    say(f"wrote {output}")

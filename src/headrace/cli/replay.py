"""``headrace replay``: a topic or a table back into a topic, at a rate."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headrace.cli.connecting import Ca, Server, Token, connected, count_of, say
from headrace.cli.job_progress import TELL_S, signals
from headrace.cli.spark_work import Conf, Log, Master, check_installed, errors, sparkling, where_of
from headrace.errors import TopicNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.spark.builtin.replay import Progress as Far
    from headrace.spark.builtin.replay_plan import Request
    from headrace.spark.builtin.replay_report import ReplayReport
    from headrace.spark.sessions.stop_flag import StopFlag


def replay(
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="TOPIC|PATH", help="A topic, a wildcard, or the path of a table."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="TOPIC", help="The topic that is written.")],
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only records since then: 1h, or a time.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only records before then.")
    ] = None,
    offsets: Annotated[
        str | None,
        typer.Option(metavar="RANGES", help="Only these: 0:100-200,1:5- or JSON of a manifest."),
    ] = None,
    condition: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Only records for which this is true."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="1000/s, 60/m; default: as fast as it goes.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Repeated with its name, a replay goes on where it ended."),
    ] = None,
    keep_timestamps: Annotated[
        bool, typer.Option("--keep-timestamps", help="Records keep their times; default: now.")
    ] = False,
    partition: Annotated[
        str,
        typer.Option(metavar="HOW", help="key: as any publisher places it; same: as it was."),
    ] = "key",
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where plans are kept; default: your state directory."),
    ] = None,
    master: Master = None,
    conf: Conf = None,
    log: Log = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Write the records of a topic or of a table into a topic, exactly once, at a rate.

    Each has the header headrace-replayed-from: orders/0@17. Ctrl-C ends it in good order; the same
    command with its --name goes on.

    Exit code 0: all is written. 1: it was stopped before.

    Examples:

      headrace replay --from orders --to orders.test --since 1h --rate 1000/s

      headrace replay --from /lake/orders --to orders --where "offset >= 500" --name restore
    """
    check_installed()
    from headrace.spark.builtin.replay_plan import Request, State, new_name, parse_rate
    from headrace.spark.sessions.stop_flag import StopFlag

    request = Request.of(
        source,
        to,
        since=since,
        until=until,
        offsets=offsets,
        where=condition,
        keep_timestamps=keep_timestamps,
        partition=partition,
    )
    if rate is not None:
        parse_rate(rate)
    name = name or new_name()
    with State(state, name) as kept:
        kept.load(request)
    _look(request, server, token, ca)
    again = f"the same command with --name {name} goes on"
    say(f"replay {name}: {request.source} to {to}; if it is interrupted, {again}")

    stop = StopFlag()
    with signals() as asked, sparkling("replay", master, conf, log) as spark:
        from headrace.spark.builtin.replay import replay as run

        asked.take_over()  # Spark has put its own in place
        asked.tell(partial(_end, stop))
        with (
            _shown(name) as tell,
            _reported(name, request, where_of(server, token, ca), stop) as report,
        ):

            def told(far: Far) -> None:
                tell(far)
                report.tell(far)

            done = run(
                spark,
                source,
                to,
                since=since,
                until=until,
                offsets=offsets,
                where=condition,
                rate=rate,
                name=name,
                keep_timestamps=keep_timestamps,
                partition=partition,
                connection=where_of(server, token, ca),
                state=None if state is None else str(state),
                tell=told,
                stop=stop,
            )
            report.tell(done)
            report.ended("finished" if done.is_finished else "stopped")
    if done.is_finished:
        say(f"replay {name} is done: {count_of(done.rows, 'record')} written to {to}")
        return
    say(
        f"replay {name} was stopped: {count_of(done.rows, 'record')} written, {_left(done)} left; "
        f"{again}"
    )
    raise typer.Exit(1)


def _end(stop: StopFlag, now: bool) -> None:
    """Behind the step under way; the second time at once, even while it is planned."""
    stop.set()
    if now:
        raise KeyboardInterrupt


@contextmanager
def _reported(
    name: str, request: Request, where: dict[str, str], stop: StopFlag
) -> Iterator[ReplayReport]:
    """The broker hears how it gets on, and may ask for its end (``headrace pipeline stop``)."""
    from headrace.spark.builtin.replay_report import ReplayReport
    from headrace.spark.connecting import connect
    from headrace.spark.options import Connection, Given
    from headrace.spark.pipelines.reporting import Reporter

    connection = Connection.of(Given(where))
    report = ReplayReport(name, request.source, request.to, stop)
    reporter = Reporter(lambda: connect(connection))
    reporter.start([report])
    try:
        yield report
    except BaseException as error:
        is_asked = isinstance(error, KeyboardInterrupt)
        report.ended("stopped" if is_asked else "failed", None if is_asked else str(error))
        raise
    finally:
        reporter.close()


def _look(request: Request, server: str | None, token: str | None, ca: str | None) -> None:
    """A source that is not there is said before Spark starts."""
    from headrace.spark.lake import describe

    if request.is_table:
        describe(request.source)
    with connected(server, token, ca) as client:
        if not request.is_table and not client.positions(request.topics):
            raise TopicNotFound(f"there is no topic that matches {request.source}")


def _left(far: Far) -> str:
    return count_of(far.offsets - far.offsets_done, "offset")


@contextmanager
def _shown(name: str) -> Iterator[Callable[[Far], None]]:
    """A bar on a terminal; else a line now and then."""
    if not errors.is_terminal:
        yield _lines(name)
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[written]}"), TimeElapsedColumn(), TimeRemainingColumn(),
        console=errors, transient=True,
    )  # fmt: skip
    began: list[Any] = []
    with bar:
        task = bar.add_task(f"replay {name}", total=None, written="")

        def tell(far: Far) -> None:
            now = time.monotonic()
            if not began:
                began.extend((now, far.rows))
            rate = (far.rows - began[1]) / max(now - began[0], 0.1)
            written = f"{count_of(far.rows, 'record')}, {rate:,.0f}/s"
            bar.update(task, total=far.offsets, completed=far.offsets_done, written=written)

        yield tell


def _lines(name: str) -> Callable[[Far], None]:
    told = time.monotonic()

    def tell(far: Far) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            say(f"replay {name}: {count_of(far.rows, 'record')} written, {_left(far)} left")

    return tell

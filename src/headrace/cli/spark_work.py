"""Shared by the commands with Spark: their options, a session, a progress bar, a job that runs on."""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace.cli.connecting import Ca, Server, Token, address, count_of, request_timeout
from headrace.cli.job_progress import Signals, display, signals
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.pipelines.running import Job, RunningJob

Result = TypeVar("Result")
Command = TypeVar("Command", bound=Callable[..., None])
errors = Console(stderr=True)

# --- options ------------------------------------------------------------------------------------------
Master = Annotated[
    str | None,
    typer.Option(
        "--master", envvar="HEADRACE_SPARK_MASTER", help="A Spark cluster; default: this machine."
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may be repeated."),
]
Once = Annotated[bool, typer.Option("--once", help="Process what exists now, then exit; for cron.")]
Format = Annotated[
    str | None,
    typer.Option("--format", "-f", metavar="KIND", help="delta (the default) or iceberg."),
]
Log = Annotated[
    Path | None,
    typer.Option("--log", help="A file for Spark's log; default on a terminal: a temporary one."),
]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only records since then: 1h ago, or a time."),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="TIME", help="Only records before then: 1h ago, or a time."),
]
FromOffset = Annotated[
    int | None,
    typer.Option("--from-offset", min=0, help="Only records from this offset, in each partition."),
]
ToOffset = Annotated[
    int | None,
    typer.Option("--to-offset", min=0, help="Only records before this offset, in each partition."),
]


class SparkPlace(NamedTuple):
    """Where a command works: on which Spark, with which broker."""

    master: Master = None
    conf: Conf = None
    server: Server = None
    token: Token = None
    ca: Ca = None

    def source(self, path: Path | None = None) -> dict[str, str]:
        """The broker, or a data directory, as ``format("headrace")`` takes it."""
        return where_of(self.server, self.token, self.ca, path)


def with_place(command: Command) -> Command:
    """Give a command the options of :class:`SparkPlace`, which arrive as its one argument ``place``."""
    hints = get_type_hints(command, include_extras=True)
    added = get_type_hints(SparkPlace, include_extras=True)
    parameters = [
        each.replace(annotation=hints[name])
        for name, each in inspect.signature(command).parameters.items()
        if name != "place"
    ]
    for name, hint in added.items():
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=None, annotation=hint))

    @wraps(command)
    def run(**given: Any) -> None:
        place = SparkPlace(**{name: given.pop(name) for name in added})
        command(**given, place=place)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run  # type: ignore[return-value]


def where_of(
    server: str | None, token: str | None, ca: str | None, path: Path | None = None
) -> dict[str, str]:
    """Where the log is, as ``format("headrace")`` takes it."""
    if path is not None:
        return {"path": str(path)}
    host, port, tls = address(server)
    if ":" in host:
        host = f"[{host}]"
    where = {
        "servers": f"{'tls' if tls else 'tcp'}://{host}:{port}",
        "timeout": f"{request_timeout():g}",
    }
    if token:
        where["token"] = token
    if ca:
        where["ca"] = ca
    return where


def settings_of(conf: Sequence[str] | None) -> dict[str, Any]:
    """The settings of ``--conf``."""
    found: dict[str, Any] = {}
    for pair in conf or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.startswith("spark."):
            raise InvalidArgument(f"--conf takes spark.NAME=VALUE, not {pair!r}")
        found[name] = value
    return found


def check_installed() -> None:
    """Before anything else: Spark is an extra."""
    missing = [name for name in ("pyarrow", "pyspark") if find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"this needs Spark (no {' and no '.join(missing)}): pip install 'headrace[spark]'",
            code="no_spark",
        )


# --- Spark --------------------------------------------------------------------------------------------
@contextmanager
def started(
    name: str, master: str | None, settings: dict[str, Any], **more: Any
) -> Iterator[SparkSession]:
    """A session that ends with this, unless it was running before."""
    from headrace.spark.sessions.builder import is_active, session

    is_ours = not is_active()
    with errors.status("starting Spark"):
        spark = session(f"headrace {name}", master, **more, **settings)
    try:
        yield spark
    finally:
        if is_ours:
            spark.stop()


@contextmanager
def sparkling(
    name: str, master: str | None = None, conf: list[str] | None = None, log: Path | None = None
) -> Iterator[SparkSession]:
    """The same, with a temporary folder, and with Spark's log out of the way of our own lines."""
    settings = settings_of(conf)
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    place = log or (folder / "spark.log" if errors.is_terminal else None)
    keeps = False
    try:
        settings.setdefault("spark.sql.warehouse.dir", str(folder / "warehouse"))
        with started(name, master, settings, log_file=place, log_level="ERROR") as spark:
            yield spark
    except HeadraceError as error:
        keeps = error.code in ("spark_ended", "no_spark") and place is not None and log is None
        raise
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


class Bar:
    """A bar on a terminal, which is hidden elsewhere."""

    def __init__(self, progress: Progress, text: str):
        self._progress, self._text = progress, text
        self._task = progress.add_task(text, total=None)
        self.is_hidden = not errors.is_terminal

    def show(self, done: int, total: int, noun: str) -> None:
        if total:
            text = f"{self._text}: {done:,} of {count_of(total, noun)}"
            self._progress.update(self._task, description=text, total=total, completed=done)


@contextmanager
def progress_bar(text: str) -> Iterator[Bar]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    is_hidden = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=is_hidden) as progress:
        yield Bar(progress, text)


def with_bar(spark: SparkSession, text: str, work: Callable[[], Result]) -> Result:
    """Do something in Spark, with a bar of its tasks. Ctrl-C cancels it: the error ``cancelled``."""
    from headrace.spark.sql import running

    with progress_bar(text) as bar:

        def tell(progress: running.TaskProgress) -> None:
            bar.show(progress.done, progress.total, "task")

        return running.run(spark, work, None if bar.is_hidden else tell)


def watched(spark: SparkSession, text: str, work: Callable[[], Result]) -> Result:
    """The same, where Ctrl-C ends the command."""
    try:
        return with_bar(spark, text, work)
    except HeadraceError as error:
        if error.code == "cancelled":
            raise KeyboardInterrupt from None
        raise


# --- jobs that run on -----------------------------------------------------------------------------
def run_jobs(
    jobs: Sequence[Job], connection: ConnectionOptions, asked: Signals, *, once: bool
) -> list[RunningJob]:
    """Run jobs until they end or are stopped; the broker hears of them, the terminal shows them."""
    from headrace.spark.connection import connect
    from headrace.spark.pipelines.reporting import Reporter
    from headrace.spark.pipelines.running import Runner

    reporter = Reporter(lambda: connect(connection))
    with display() as shown:
        runner = Runner(jobs, once=once, reporter=reporter, on_look=shown.show)
        asked.tell(runner.stop)
        ended = runner.run()
        shown.end(ended)
    return ended


def end_with(ended: Sequence[RunningJob], noun: str = "") -> None:
    """Exit code 1 if a job failed; each that did is named."""
    failed = [job for job in ended if job.state == "failed"]
    for job in failed:
        print(f"headrace: {noun}{job.name} failed: {job.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def run_job(
    job_of: Callable[[SparkSession], Job],
    *,
    source: dict[str, str],
    name: str,
    once: bool,
    master: str | None,
    conf: list[str] | None,
    log: Path | None,
) -> None:
    """Run one job in a session of its own."""
    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.options import Given

    connection = ConnectionOptions.of(Given(source))
    with signals() as asked, sparkling(name, master, conf, log) as spark:
        asked.take_over()  # Spark has put its own in place
        ended = run_jobs([job_of(spark)], connection, asked, once=once)
    end_with(ended)

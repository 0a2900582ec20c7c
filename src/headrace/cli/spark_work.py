"""Commands with Spark share this: their options, a session, long-running jobs."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from headrace.cli.connecting import (
    BROKER_OPTIONS,
    BrokerPlace,
    given_as,
    login_as,
    named_values,
    request_timeout,
    with_options,
)
from headrace.cli.job_progress import Signals, display, signals
from headrace.cli.printing import complain, errors, progress_bar
from headrace.client.address import find_brokers
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.notation import RecordRange
    from headrace.spark.pipelines.running import Job, RunningJob

Result = TypeVar("Result")

# --- options ------------------------------------------------------------------------------------------
Master = Annotated[
    str | None,
    typer.Option(
        "--master", envvar="HEADRACE_SPARK_MASTER", help="A Spark cluster; default: this machine."
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A Spark setting; may be repeated."),
]
Once = Annotated[bool, typer.Option("--once", help="Process what exists now, then exit; for cron.")]
Format = Annotated[
    str | None,
    typer.Option("--format", "-f", metavar="KIND", help="delta (the default) or iceberg."),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--path", metavar="DATA_DIR", help="Read a data directory without a broker."),
]
History = Annotated[
    str | None,
    typer.Option(
        metavar="ARCHIVE",
        help="Also read records that only an archive still has: its name, or its table's path.",
    ),
]
Log = Annotated[
    Path | None,
    typer.Option("--log", help="A file for Spark's log; by default a temporary one."),
]
TableOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="NAME=VALUE", help="An option of the table; may be repeated."
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="TIME", help="Only records since this time; 1h means one hour ago."
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="TIME", help="Only records before this time; 1h means one hour ago."
    ),
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
    """The Spark and the broker that a command uses."""

    master: str | None
    conf: list[str] | None
    server: str | None
    token: str | None
    ca: str | None
    user: str | None

    @property
    def broker(self) -> BrokerPlace:
        return BrokerPlace(self.server, self.token, self.ca, self.user)

    def source(self, path: Path | None = None) -> dict[str, str]:
        """The broker, or a data directory, as ``format("headrace")`` takes it."""
        if path is not None:
            return {"path": str(path)}
        where = {
            "servers": ",".join(map(str, find_brokers(self.server))),
            "timeout": f"{request_timeout():g}",
        }
        user, password = login_as(self.token, self.user)
        if self.token:
            where["token"] = self.token
        elif user is not None and password is not None:
            where |= {"user": user, "password": password}
        if self.ca:
            where["ca"] = self.ca
        return where

    def spark_settings(self) -> dict[str, Any]:
        """The values of ``--conf``."""
        return {**named_values("--conf", self.conf, prefix="spark.")}


with_place = with_options(
    "place", {"master": Master, "conf": Conf, **BROKER_OPTIONS}, given_as(SparkPlace)
)
"""Give a command the options of :class:`SparkPlace`, which it gets as its argument ``place``."""


def _record_range(**options: Any) -> AbstractContextManager[RecordRange]:
    from headrace.spark.notation import RecordRange

    return nullcontext(RecordRange(**options))


with_range = with_options(
    "bounds",
    {"since": Since, "until": Until, "from_offset": FromOffset, "to_offset": ToOffset},
    _record_range,
)
"""Give a command the options for a range of records, which it gets as its argument ``bounds``."""


def check_installed() -> None:
    """Raise an error that says how to install Spark, if it is missing."""
    missing = [name for name in ("pyarrow", "pyspark") if find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"this command needs {' and '.join(missing)}: pip install 'headrace[spark]', or make spark in a checkout",
            code="no_spark",
        )


def table_options(given: list[str] | None) -> dict[str, str]:
    """The values of ``--option``: ``catalog=prod``, ``storage.aws_endpoint_url=http://…``."""
    return named_values("--option", given)


def state_directory() -> Path:
    """The directory for files that the next run of a command needs."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "headrace"


# --- Spark --------------------------------------------------------------------------------------------
@contextmanager
def no_orphans() -> Iterator[None]:
    """If this is interrupted, end the processes that it has started.

    Spark's Java ignores Ctrl-C. One whose start is interrupted would go on alone, miss the files that we
    remove, fill the terminal with its complaints, and stay.
    """
    before = set(_children(os.getpid()))
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for pid in set(_children(os.getpid())) - before:
            _kill(pid)
        raise


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has ended, or this is not Linux
        for task in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return [int(each) for each in found]


def _kill(pid: int) -> None:
    """The process and its own children: a shell script starts the Java."""
    inner = _children(pid)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for each in inner:
        _kill(each)


@contextmanager
def started(
    name: str,
    master: str | None,
    settings: dict[str, Any],
    *,
    in_background: bool = False,
    **more: Any,
) -> Iterator[SparkSession]:
    """A session. It is stopped at the end, unless it was active before."""
    from headrace.spark.error_sentences import SPARK_GONE
    from headrace.spark.sessions.builder import is_active, session

    is_ours = not is_active()
    status = nullcontext() if in_background else errors.status("starting Spark")
    with status, no_orphans():
        spark = session(f"headrace {name}", master, **more, **settings)
    try:
        yield spark
    finally:
        if is_ours:
            with suppress(*SPARK_GONE):  # it may have ended before
                spark.stop()


@contextmanager
def sparkling(
    name: str,
    place: SparkPlace,
    log: Path | None = None,
    *,
    in_background: bool = False,
    is_service: bool = False,
) -> Iterator[SparkSession]:
    """The same, with a temporary folder, and with Spark's log in a file.

    If Spark itself fails, the log is kept, and the error names it. ``in_background``: the terminal is left to
    another thread. ``is_service``: it runs until it is stopped; without a terminal it logs to standard error. A
    command that ends by itself does not: what Spark says at its start and end would be in every mail of cron.
    """
    settings = place.spark_settings()
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)  # for a thread that does not get to the end
    log_file = log or (folder / "spark.log" if errors.is_terminal or not is_service else None)
    more: dict[str, Any] = {"log_file": log_file, "log_level": "ERROR"}
    keeps = False
    try:
        settings.setdefault("spark.sql.warehouse.dir", str(folder / "warehouse"))
        with started(name, place.master, settings, in_background=in_background, **more) as spark:
            yield spark
    except HeadraceError as error:
        if error.code in ("spark_ended", "no_spark") and log_file is not None and log_file.exists():
            keeps = log is None
            error.message += f". The end of its log is in {log_file}"
        raise
    finally:
        atexit.unregister(remove)
        if not keeps:
            remove()


def with_bar(spark: SparkSession, text: str, work: Callable[[], Result]) -> Result:
    """Run ``work`` with a bar of Spark's tasks. Ctrl-C cancels it, with the error ``cancelled``."""
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


# --- long-running jobs ------------------------------------------------------------------------------
def run_jobs(
    jobs: Sequence[Job], connection: ConnectionOptions, asked: Signals, *, once: bool
) -> list[RunningJob]:
    """Run jobs until they end or are stopped. They report to the broker and to the terminal."""
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
    """Exit with code 1 if a job failed, after naming each one that did."""
    failed = [job for job in ended if job.state == "failed"]
    for job in failed:
        complain(f"headrace: {noun}{job.name} failed: {job.error}")
    if failed:
        raise typer.Exit(1)


def run_job(
    job_of: Callable[[SparkSession], Job],
    *,
    name: str,
    place: SparkPlace,
    once: bool,
    log: Path | None,
) -> None:
    """Run one job in a session of its own."""
    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.options import Given

    connection = ConnectionOptions.of(Given(place.source()))
    with signals() as asked, sparkling(name, place, log, is_service=not once) as spark:
        asked.take_over()  # Spark has installed its own handlers
        ended = run_jobs([job_of(spark)], connection, asked, once=once)
    end_with(ended)

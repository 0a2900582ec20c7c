"""What the commands share that work with Spark by themselves: a session, progress, running a job."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace.cli.connecting import address, count_of, request_timeout
from headrace.cli.job_progress import display, signals
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.pipelines.running import Job

Result = TypeVar("Result")
errors = Console(stderr=True)
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
Once = Annotated[bool, typer.Option("--once", help="Do what is there now, then end; for cron.")]
Format = Annotated[
    str | None,
    typer.Option("--format", "-f", metavar="KIND", help="delta (the default) or iceberg."),
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log", help="A file for what Spark says; default on a terminal: a temporary one."
    ),
]


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
    """What ``--conf`` says."""
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


@contextmanager
def sparkling(
    name: str, master: str | None = None, conf: list[str] | None = None, log: Path | None = None
) -> Iterator[SparkSession]:
    """A session that ends with this; what Spark has to say does not get between our own lines."""
    from pyspark import SparkContext

    from headrace.spark.sessions.builder import session

    settings = settings_of(conf)
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    place = log or (folder / "spark.log" if errors.is_terminal else None)
    is_ours = SparkContext._active_spark_context is None
    keeps = False
    try:
        settings.setdefault("spark.sql.warehouse.dir", str(folder / "warehouse"))
        with errors.status("starting Spark"):
            spark = session(
                f"headrace {name}", master, log_file=place, log_level="ERROR", **settings
            )
        try:
            yield spark
        finally:
            if is_ours:
                spark.stop()
    except HeadraceError as error:
        keeps = error.code in ("spark_ended", "no_spark") and place is not None and log is None
        raise
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


def watched(spark: SparkSession, text: str, work: Callable[[], Result]) -> Result:
    """Do something in Spark, with a bar of its tasks; Ctrl-C cancels it."""
    from headrace.spark.sql import running as sql_running

    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=errors, transient=True, disable=not errors.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(text, total=None)

        def tell(progress: sql_running.Progress) -> None:
            if progress.total:
                done = f"{text}: {progress.done} of {count_of(progress.total, 'task')}"
                bar.update(task, description=done, total=progress.total, completed=progress.done)

        try:
            return sql_running.run(spark, work, tell if errors.is_terminal else None)
        except HeadraceError as error:
            if error.code == "cancelled":
                raise KeyboardInterrupt from None
            raise


# --- jobs that run on -----------------------------------------------------------------------------
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
    """Run a job until it ends or is stopped; exit code 1 when it failed."""
    from headrace.spark.connecting import connect
    from headrace.spark.options import Connection, Given
    from headrace.spark.pipelines.reporting import Reporter
    from headrace.spark.pipelines.running import Runner

    connection = Connection.of(Given(source))
    with signals() as asked, sparkling(name, master, conf, log) as spark:
        asked.take_over()  # Spark has put its own in place
        reporter = Reporter(lambda: connect(connection))
        job = job_of(spark)
        with display() as shown:
            runner = Runner([job], once=once, reporter=reporter, on_look=shown.show)
            asked.tell(runner.stop)
            [ended] = runner.run()
            shown.end([ended])
    if ended.state == "failed":
        print(f"headrace: {ended.name} failed: {ended.error}", file=sys.stderr)
        raise typer.Exit(1)

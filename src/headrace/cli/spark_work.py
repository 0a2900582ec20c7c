"""What the commands share that work with Spark by themselves: a session, progress, running a job."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace.cli.connecting import console, count_of, say
from headrace.cli.pipeline import TELL_S, Conf, Master, _last_line, _line, _progress_table, _signals
from headrace.cli.sql import _settings, _where
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.pipelines.running import Job, RunningJob

Result = TypeVar("Result")
errors = Console(stderr=True)
Once = Annotated[bool, typer.Option("--once", help="Do what is there now, then end; for cron.")]
Format = Annotated[
    str | None, typer.Option("--format", "-f", metavar="KIND", help="parquet, delta or iceberg.")
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log", help="A file for what Spark says; default on a terminal: a temporary one."
    ),
]
__all__ = ["Conf", "Log", "Master", "Once", "run_job", "sparkling", "watched", "where"]


def where(
    server: str | None, token: str | None, ca: str | None, data_dir: Path | None = None
) -> dict[str, str]:
    """Where the log is, as ``format("headrace")`` takes it."""
    return _where(data_dir, server, token, ca)


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

    from headrace.spark.sessions import session

    settings = _settings(conf)
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
    from headrace.spark import sql_running

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
class _Lines:
    """A line now and then, which a log can keep."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, Any]] = {}

    def show(self, jobs: Sequence[RunningJob]) -> None:
        now = time.monotonic()
        for job in jobs:
            for query in job.document()["queries"]:
                last, told = self._told.get(query["name"], (now - TELL_S, None))
                if now - last >= TELL_S and query.get("batch_id", -1) not in (-1, told):
                    self._told[query["name"]] = (now, query["batch_id"])
                    say(_line(query))


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
    with _signals() as signals, sparkling(name, master, conf, log) as spark:
        signals.take_over()  # Spark has put its own in place
        reporter = Reporter(lambda: connect(connection))
        job = job_of(spark)
        if console.is_terminal:
            with Live(console=console, refresh_per_second=4, transient=True) as live:
                runner = Runner(
                    [job],
                    once=once,
                    reporter=reporter,
                    on_look=lambda jobs: live.update(_progress_table(jobs)),
                )
                signals.tell(runner.stop)
                [ended] = runner.run()
        else:
            runner = Runner([job], once=once, reporter=reporter, on_look=_Lines().show)
            signals.tell(runner.stop)
            [ended] = runner.run()
    say(_last_line(ended))
    if ended.state == "failed":
        print(f"headrace: {ended.name} failed: {ended.error}", file=sys.stderr)
        raise typer.Exit(1)

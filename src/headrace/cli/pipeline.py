"""``headrace pipeline``: run the pipelines that a file declares, and watch them.

Spark is imported late: most of these commands do not need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.connecting import BrokerPlace, connected, with_client
from headrace.cli.job_progress import QUERY_COLUMNS, more_lines, query_rows, signals
from headrace.cli.printing import (
    AsJson,
    errors,
    print_error,
    print_listing,
    say,
)
from headrace.cli.spark_work import (
    Once,
    SparkPlace,
    check_installed,
    end_with,
    run_jobs,
    started,
    with_place,
)
from headrace.cli.values import duration_option
from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError, InvalidArgument, NotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.pipelines.declaration import Pipeline
    from headrace.spark.pipelines.files import PipelineFile
    from headrace.spark.pipelines.planning import PipelinePlan, PipelineSetting
    from headrace.spark.pipelines.sections import InvalidPipeline

pipeline = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .toml or .py file.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Only these pipelines; default: all."),
]

CheckpointDir = Annotated[
    str | None,
    typer.Option(
        envvar="HEADRACE_CHECKPOINT_DIR",
        help="The directory for checkpoints; default: FILE.state.",
    ),
]


# --- run ------------------------------------------------------------------------------------------
@pipeline.command()
@with_place
def run(
    file: File,
    names: Names = None,
    once: Once = False,
    checkpoint_dir: CheckpointDir = None,
    py_files: Annotated[
        list[str] | None,
        typer.Option("--py-files", help="A module or zip for the executors; may be repeated."),
    ] = None,
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Start without the old checkpoint: read and write everything again."
        ),
    ] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="Start without the old checkpoint, at earliest, latest, a time, or checkpoint "
            "(where the old query stopped).",
        ),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve Spark's web interface.")] = False,
    log: Annotated[
        str | None,
        typer.Option(
            help="A file for Spark's log; default on a terminal or with --once: FILE.state/spark.log."
        ),
    ] = None,
    *,
    place: SparkPlace,
) -> None:
    """Run the pipelines of a file until they are stopped.

    Ctrl-C and SIGTERM stop it after the current batches; a second Ctrl-C interrupts them.

    If a query has changed, it continues from its checkpoint if it can; otherwise it is refused.
    Then give the pipeline a new name, or start it again with --reset or --from. The old checkpoint
    is renamed, not deleted.

    Exit code 0: all succeeded. 1: a pipeline failed.

    \b
    Examples:
      headrace pipeline run orders.toml
      headrace pipeline run orders.toml revenue --from checkpoint
      headrace pipeline run orders.toml revenue --once
      headrace pipeline run orders.py --master spark://10.0.0.5:7077 --checkpoint-dir /shared/state
    """
    from headrace.spark.pipelines.running import PipelineJob

    check_installed()
    declared = _load(file)
    chosen = declared.choose(names or ())
    base = _checkpoint_dir(declared, chosen, checkpoint_dir, place.master)
    begins_anew = reset or from_ is not None
    if begins_anew:
        chosen = _beginning(declared, chosen, names, base, reset=reset, place=from_)
    source = _source(declared, place)
    setting = _prepared(source, chosen)
    once = once or all(each.is_once for each in chosen)
    with (
        signals() as asked,
        started(
            declared.path.name,
            place.master,
            {**declared.spark, **place.spark_settings()},
            ui=ui,
            log_file=_log_file(declared, log, once),
        ) as spark,
    ):
        asked.take_over()  # Spark has installed its own handlers
        if py_files:
            spark.addArtifacts(*py_files, pyfile=True)
        plans = [_plan(each, spark, base, setting, begins_anew=begins_anew) for each in chosen]
        for each in plans:
            say(_way(each.pipeline))
            if each.changed:
                say(f"  continues from its checkpoint, with changes: {', '.join(each.changed)}")
        if begins_anew:
            _leave_checkpoints(source, chosen, base, is_reset=reset)
        jobs = [PipelineJob(plan) for plan in plans]
        ended = run_jobs(jobs, _connection(source), asked, once=once)
    end_with(ended, "pipeline ")


def _load(file: Path, *, exit_code: int = 2) -> PipelineFile:
    """Read the file; print every mistake in it, and exit."""
    from headrace.spark.pipelines.files import load
    from headrace.spark.pipelines.sections import InvalidPipeline

    try:
        return load(file)
    except InvalidPipeline as error:
        _complain(error)
        raise typer.Exit(exit_code) from None


def _complain(error: InvalidPipeline) -> int:
    """Print each mistake; returns how many."""
    for mistake in error.mistakes:
        print_error(HeadraceError(mistake, code=error.code))
    return len(error.mistakes)


def _way(pipeline: Pipeline) -> str:
    return f"{pipeline.name}: {', '.join(map(str, pipeline.inputs))} to {pipeline.to}"


def _plan(
    pipeline: Pipeline,
    spark: SparkSession,
    base: str,
    setting: PipelineSetting,
    *,
    begins_anew: bool = False,
) -> PipelinePlan:
    from headrace.spark.pipelines.planning import plan

    checkpoint = _checkpoint(pipeline, base)
    return plan(pipeline, spark, checkpoint, setting, begins_anew=begins_anew)


def _checkpoint(pipeline: Pipeline, base: str) -> str:
    return pipeline.checkpoint or f"{base}/{pipeline.name}"


def _beginning(
    declared: PipelineFile,
    chosen: Sequence[Pipeline],
    names: Sequence[str] | None,
    base: str,
    *,
    reset: bool,
    place: str | None,
) -> tuple[Pipeline, ...]:
    """The pipelines, with the place where they begin anew."""
    from headrace.spark.pipelines.restarting import beginning_at

    if reset and place is not None:
        raise InvalidArgument("give --reset or --from, not both")
    if not names and len(declared.pipelines) > 1:
        raise InvalidArgument(
            f"--reset and --from leave checkpoints behind: name the pipelines, for example "
            f"'{declared.path.name} {declared.pipelines[0].name}'"
        )
    found = []
    for each in chosen:
        pipeline, is_unconfirmed = beginning_at(each, _checkpoint(each, base), place)
        if is_unconfirmed:
            say(
                f"{each.name}: the old query did not confirm its last batch. Rows of that batch may be "
                "written twice."
            )
        found.append(pipeline)
    return tuple(found)


def _leave_checkpoints(
    source: dict[str, str], chosen: Sequence[Pipeline], base: str, *, is_reset: bool
) -> None:
    from headrace.spark.pipelines.restarting import forget_progress, set_aside

    with _broker(source) as client:
        for each in chosen:
            checkpoint = _checkpoint(each, base)
            forget_progress(client, each, checkpoint, all_of=is_reset)
            moved = set_aside(checkpoint)
            if moved is not None:
                say(f"  the old checkpoint is now {moved}")


def _checkpoint_dir(
    declared: PipelineFile, chosen: Sequence[Pipeline], given: str | None, master: str | None
) -> str:
    from headrace.spark.sessions.builder import is_local

    found = given or declared.checkpoint_dir
    if found is not None:
        return found.rstrip("/") if "://" in found else str(Path(found).expanduser().absolute())
    if master is not None and not is_local(master) and not all(e.checkpoint for e in chosen):
        raise InvalidArgument(
            "on a cluster, checkpoints need a directory that the driver and all executors share: "
            "give --checkpoint-dir, or checkpoint_dir in the file"
        )
    return str(declared.state_dir)


def _source(declared: PipelineFile, place: SparkPlace) -> dict[str, str]:
    """The broker as ``format("headrace")`` takes it: from the options, else from the file."""
    found = place.source()
    if place.server is None and declared.servers is not None:
        found["servers"] = declared.servers
    return found


def _connection(source: dict[str, str]) -> ConnectionOptions:
    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.options import Given

    return ConnectionOptions.of(Given(source))


def _prepared(source: dict[str, str], chosen: Sequence[Pipeline]) -> PipelineSetting:
    """Ask the broker for its limits, and create the topics for rows that fail."""
    with _broker(source) as client:
        info = client.info()
        known = set(client.topics())
        for name in sorted({each.failed for each in chosen if each.failed} - known):
            # One partition, like the broker's own dead-letter topics: the dlq commands read that one.
            client.create_topic(name, partitions=1, retention_hours=None)
    return _setting(source, max_message_size=info["max_message_size"])


def _setting(source: dict[str, str], **limits: int) -> PipelineSetting:
    from headrace.spark.pipelines.planning import PipelineSetting

    # Streams keep their own timeout: they outlast a restart of the broker.
    found = {name: value for name, value in source.items() if name != "timeout"}
    certificate = _connection(source).ca
    if certificate is not None:  # its text: executors may not have the file
        found["ca"] = certificate
    return PipelineSetting(found, **limits)


def _broker(source: dict[str, str]) -> AbstractContextManager[BrokerClient]:
    """A client for a few questions. If the broker does not answer, that is an error at once."""
    server = source["servers"].split(",")[0].strip()
    place = BrokerPlace(server, source.get("token"), source.get("ca"), source.get("user"))
    return connected(place, source.get("password"))


def _log_file(declared: PipelineFile, given: str | None, once: bool) -> Path | None:
    """The file for Spark's log. On a terminal it must not mix with the progress, and a run by cron is silent."""
    if given is not None:
        return Path(given)
    if not errors.is_terminal and not once:
        return None
    try:
        declared.state_dir.mkdir(exist_ok=True)
        path = declared.state_dir / "spark.log"
        path.touch()
    except OSError:
        return None
    return path


# --- list and validate ------------------------------------------------------------------------------
@pipeline.command("list")
def list_pipelines(file: File, as_json: AsJson = False) -> None:
    """List the pipelines that a file declares."""
    declared = _load(file)
    base = declared.checkpoint_dir or str(declared.state_dir)
    rows = [
        {
            "name": each.name,
            "from": ", ".join(map(str, each.inputs)),
            "through": each.way,
            "to": str(each.to),
            "failed": each.failed,
            "trigger": each.trigger_text,
            "checkpoint": each.checkpoint or f"{base}/{each.name}",
        }
        for each in declared.pipelines
    ]
    columns = ("name", "from", "through", "to", "failed", "trigger")
    print_listing(as_json, rows, rows, columns, f"{file} declares no pipelines.")


@pipeline.command()
@with_place
def validate(
    file: File,
    names: Names = None,
    checkpoint_dir: CheckpointDir = None,
    *,
    place: SparkPlace,
) -> None:
    """Check the pipelines of a file without running them.

    The command checks schemas, SQL, functions and topics, and whether a changed query can continue
    from its checkpoint. It reads no messages, and writes and creates nothing.

    It prints all mistakes, with file, line and key. For a valid pipeline, it prints the parts of
    its messages with their JSON fields, or the columns of its table.

    Exit code 0: they are valid. 1: at least one is not.

    \b
    Example:
      headrace pipeline validate orders.toml
    """
    from headrace.spark.pipelines.sections import InvalidPipeline

    check_installed()
    wrong = 0
    declared = _load(file, exit_code=1)
    chosen = declared.choose(names or ())
    source = _source(declared, place)
    setting = _setting(source)
    base = _checkpoint_dir(declared, chosen, checkpoint_dir, None)
    settings = {**declared.spark, **place.spark_settings()}
    with started(declared.path.name, place.master, settings, log_file=os.devnull) as spark:
        for each in chosen:
            try:
                found = _plan(each, spark, base, setting)
            except InvalidPipeline as error:
                wrong += _complain(error)
                continue
            say(_way(each))
            for part, text in found.queries[0].parts.items():
                say(f"  {part}: {text}")
            if found.changed:
                say(f"  continues from its checkpoint, with changes: {', '.join(found.changed)}")
    wrong += _missing_topics(source, chosen)
    raise typer.Exit(1 if wrong else 0)


def _missing_topics(source: dict[str, str], chosen: Sequence[Pipeline]) -> int:
    """Count, and name, the topics that pipelines read and that do not exist."""
    from headrace.model import is_pattern

    try:
        with _broker(source) as client:
            known = set(client.topics())
    except HeadraceError as error:
        say(f"could not check that the topics exist: {error.message}")
        return 0
    missing = 0
    for each in chosen:
        for given, topic in [(read, topic) for read in each.topics for topic in read.topics]:
            if not is_pattern(topic) and not topic.startswith("__") and topic not in known:
                missing += 1
                where = given.section.place("from")
                print_error(
                    NotFound(f"{where}: from: there is no topic {topic!r}", code="topic_not_found")
                )
    return missing


# --- status and stop --------------------------------------------------------------------------------
@pipeline.command()
@with_client
def status(
    client: BrokerClient,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this pipeline.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show running and recent pipelines: rates, lag, batches, watermark, state, errors.

    A running pipeline that cannot keep up is 'falling behind'; one that has records to process and finishes no
    batch is 'stalled'; one that does not report any more is 'silent'.

    \b
    Examples:
      headrace pipeline status
      headrace pipeline status revenue --json
    """
    found = client.pipelines() if name is None else [client.pipeline_stats(name)]
    document = found if name is None else found[0]
    rows = [row for each in found for row in query_rows(each["name"], each)]
    empty = "No pipeline has reported to this broker."
    print_listing(as_json, document, rows, QUERY_COLUMNS, empty)
    for line in [] if as_json else [line for each in found for line in more_lines(each)]:
        say(line)


@pipeline.command()
@with_client
def stop(
    client: BrokerClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline.")],
    wait: Annotated[
        float,
        duration_option(
            help="Wait this long until it has stopped (seconds, or 5m); 0: do not wait."
        ),
    ] = 60.0,
) -> None:
    """Ask a running pipeline to stop.

    The pipeline may run on any machine. It gets the request within seconds, and finishes its
    current batch first.

    Exit code 0: it has stopped, or --wait is 0. 1: it was still running after --wait seconds.

    \b
    Example:
      headrace pipeline stop revenue
    """
    client.stop_pipeline(name)
    deadline = time.monotonic() + wait
    state = "running"
    while state == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
        state = client.pipeline_stats(name)["state"]
    if state == "running":
        say(f"Asked pipeline {name} to stop.")
        raise typer.Exit(1 if wait else 0)
    say(f"Pipeline {name} {state}.")

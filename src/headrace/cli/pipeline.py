"""``headrace pipeline``: run what a file declares, and see how it gets on. Spark is imported late."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Server,
    Token,
    connected,
    print_json,
    print_rows,
    request_timeout,
    say,
    text_of,
    when,
)
from headrace.cli.job_progress import Signals, signals
from headrace.cli.spark_work import (
    Once,
    SparkPlace,
    check_installed,
    end_with,
    errors,
    run_jobs,
    settings_of,
    started,
    with_place,
)
from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.pipelines.declaration import Pipeline
    from headrace.spark.pipelines.files import PipelineFile
    from headrace.spark.pipelines.planning import PipelinePlan, PipelineSetting
    from headrace.spark.pipelines.running import RunningJob

pipeline = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .toml or .py file.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these; default: all of it.")
]


# --- run ------------------------------------------------------------------------------------------
@pipeline.command()
@with_place
def run(
    file: File,
    names: Names = None,
    once: Once = False,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            envvar="HEADRACE_CHECKPOINT_DIR",
            help="Where checkpoints are kept; default: FILE.state beside it.",
        ),
    ] = None,
    py_files: Annotated[
        list[str] | None,
        typer.Option("--py-files", help="A module or zip for executors; may be repeated."),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve Spark's own web page.")] = False,
    log: Annotated[
        str | None,
        typer.Option(
            help="A file for what Spark says; default on a terminal: FILE.state/spark.log."
        ),
    ] = None,
    *,
    place: SparkPlace,
) -> None:
    """Run the pipelines of a file, until they are stopped.

    Ctrl-C and SIGTERM end it after the batches under way; a second Ctrl-C breaks them off. Exit
    code 0: all went well; 1: a pipeline failed.

    Examples:

      headrace pipeline run orders.toml

      headrace pipeline run orders.toml revenue --once

      headrace pipeline run orders.py --master spark://10.0.0.5:7077 --checkpoint-dir /shared/state
    """
    from headrace.spark.pipelines.files import load

    check_installed()
    declared = load(file)
    chosen = declared.choose(names or ())
    base = _checkpoint_dir(declared, chosen, checkpoint_dir, place.master)
    connection = _connection(declared, place)
    setting = _prepared(connection, chosen)
    with (
        signals() as asked,
        started(
            declared.path.name,
            place.master,
            {**declared.spark, **settings_of(place.conf)},
            ui=ui,
            log_file=_log_file(declared, log),
        ) as spark,
    ):
        asked.take_over()  # Spark has put its own in place
        for path in py_files or ():
            spark.sparkContext.addPyFile(path)
        ended = _run(spark, chosen, base, setting, connection, once, asked)
    end_with(ended, "pipeline ")


def _run(
    spark: SparkSession,
    chosen: Sequence[Pipeline],
    base: str,
    setting: PipelineSetting,
    connection: ConnectionOptions,
    once: bool,
    asked: Signals,
) -> list[RunningJob]:
    from headrace.spark.pipelines.running import PipelineJob

    plans = _plans(spark, chosen, base, setting)
    for each in chosen:
        say(f"{each.name}: {', '.join(map(str, each.inputs))} to {each.to}")
    once = once or all(each.is_once for each in chosen)
    return run_jobs([PipelineJob(plan) for plan in plans], connection, asked, once=once)


def _plans(
    spark: SparkSession, chosen: Sequence[Pipeline], base: str, setting: PipelineSetting
) -> list[PipelinePlan]:
    from headrace.spark.pipelines.planning import plan

    return [plan(each, spark, each.checkpoint or f"{base}/{each.name}", setting) for each in chosen]


def _checkpoint_dir(
    declared: PipelineFile, chosen: Sequence[Pipeline], given: str | None, master: str | None
) -> str:
    from headrace.spark.sessions.builder import is_local

    found = given or declared.checkpoint_dir
    if found is not None:
        return found.rstrip("/") if "://" in found else str(Path(found).expanduser().absolute())
    if master is not None and not is_local(master) and not all(e.checkpoint for e in chosen):
        raise InvalidArgument(
            "on a cluster checkpoints need a place that the driver and all executors share: "
            "give --checkpoint-dir, or checkpoint_dir in the file"
        )
    return str(declared.state_dir)


def _connection(declared: PipelineFile, place: SparkPlace) -> ConnectionOptions:
    from headrace.spark.connection import ConnectionOptions
    from headrace.spark.options import Given

    found = place.source()
    if place.server is None and declared.servers is not None:
        found["servers"] = declared.servers
    return ConnectionOptions.of(Given(found))


def _prepared(connection: ConnectionOptions, chosen: Sequence[Pipeline]) -> PipelineSetting:
    """Ask the broker what it takes, and make the topics for rows that fail."""
    with _asking(connection) as client:
        info = client.info()
        known = set(client.topics())
        for name in sorted({each.failed for each in chosen if each.failed} - known):
            # One partition, as the broker's own have: the commands for dead letters look there.
            client.create_topic(name, partitions=1, retention_hours=None)
    return _setting(connection, info["max_message_size"])


def _setting(connection: ConnectionOptions, max_message_size: int | None = None) -> PipelineSetting:
    from headrace.spark.pipelines.planning import PipelineSetting

    scheme = "tls://" if connection.tls else ""
    hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in connection.addresses]
    options = {"servers": ",".join(f"{scheme}{host}:{port}" for host, port in hosts)}
    if connection.token is not None:
        options["token"] = connection.token
    if connection.ca is not None:
        options["ca"] = connection.ca
    return (
        PipelineSetting(options)
        if max_message_size is None
        else PipelineSetting(options, max_message_size)
    )


@contextmanager
def _asking(connection: ConnectionOptions) -> Iterator[BrokerClient]:
    """A client for a few questions; a broker that does not answer is an error at once."""
    host, port = connection.addresses[0]
    client = BrokerClient(
        host,
        port,
        client_id=f"cli-{os.getpid()}",
        token=connection.token,
        tls=connection.tls_context() or False,
        request_timeout=request_timeout(),
    )
    client.connect()
    try:
        yield client
    finally:
        client.disconnect()


def _log_file(declared: PipelineFile, given: str | None) -> Path | None:
    """Where Spark's own words go: not between the lines of the progress on a terminal."""
    if given is not None:
        return Path(given)
    if not errors.is_terminal:
        return None
    try:
        declared.state_dir.mkdir(exist_ok=True)
        path = declared.state_dir / "spark.log"
        path.touch()
    except OSError:
        return None
    return path


# --- looking at files -------------------------------------------------------------------------------
@pipeline.command("list")
def list_pipelines(file: File, as_json: AsJson = False) -> None:
    """List the pipelines that a file declares."""
    from headrace.spark.pipelines.files import load

    declared = load(file)
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
    if as_json:
        print_json(rows)
        return
    names = ("name", "from", "through", "to", "failed", "trigger")
    print_rows(rows, {name: name for name in names}, "It declares no pipelines.")


@pipeline.command()
@with_place
def validate(
    file: File,
    names: Names = None,
    *,
    place: SparkPlace,
) -> None:
    """Plan the pipelines of a file without running them: schemas, SQL, functions, topics.

    Nothing is read, written or created. Exit code 0: they can be run; 1: something is wrong.

    Examples:

      headrace pipeline validate orders.toml
    """
    from headrace.spark.pipelines.files import load
    from headrace.spark.pipelines.sections import InvalidPipeline

    check_installed()
    wrong = 0
    try:
        declared = load(file)
    except InvalidPipeline as error:
        print(f"headrace: {error.message} [{error.code}]", file=sys.stderr)
        raise typer.Exit(1) from None
    chosen = declared.choose(names or ())
    connection = _connection(declared, place)
    settings = {**declared.spark, **settings_of(place.conf)}
    with started(declared.path.name, place.master, settings, log_file=os.devnull) as spark:
        for each in chosen:
            try:
                (found,) = _plans(spark, [each], str(declared.state_dir), _setting(connection))
            except InvalidPipeline as error:
                wrong += 1
                print(f"headrace: {error.message} [{error.code}]", file=sys.stderr)
                continue
            columns = [f.simpleString() for f in found.queries[0].rows.schema.fields]
            say(f"{each.name}: {', '.join(map(str, each.inputs))} to {each.to}")
            say(f"  {', '.join(columns)}")
    wrong += _missing_topics(connection, chosen)
    raise typer.Exit(1 if wrong else 0)


def _missing_topics(connection: ConnectionOptions, chosen: Sequence[Pipeline]) -> int:
    """How many topics do not exist that the pipelines read."""
    from headrace.model import is_pattern

    try:
        with _asking(connection) as client:
            known = set(client.topics())
    except HeadraceError as error:
        say(f"the topics were not checked: {error.message}")
        return 0
    missing = 0
    for each in chosen:
        for topic in [topic for given in each.topics for topic in given.topics]:
            if not is_pattern(topic) and not topic.startswith("__") and topic not in known:
                missing += 1
                print(
                    f"headrace: {each.section.where}: from: there is no topic {topic!r} "
                    "[topic_not_found]",
                    file=sys.stderr,
                )
    return missing


# --- looking at what runs -----------------------------------------------------------------------------
@pipeline.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one.")] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show the pipelines that have reported to the broker: rates, lag, the last error.

    Examples:

      headrace pipeline status

      headrace pipeline status revenue --json
    """
    with connected(server, token, ca) as client:
        found = client.pipelines() if name is None else [client.pipeline_stats(name)]
    if as_json:
        print_json(found if name is None else found[0])
        return
    rows = [
        _status_row(each, query)
        for each in found
        for query in each["queries"] or [{"name": each["name"]}]
    ]
    columns = {
        "name": "query",
        "state": "state",
        "since": "since (UTC)",
        "batch": "batch",
        "rows": "rows",
        "rate": "rows/s",
        "lag": "lag",
        "dead": "dead letters",
        "sink": "to",
    }
    print_rows(rows, columns, "No pipeline has reported to this broker.")
    for each in found:
        for query in each["queries"]:
            error = query.get("error")
            if error:
                say(f"{query['name']}: {text_of(error.encode())}")


def _status_row(document: Mapping[str, Any], query: Mapping[str, Any]) -> dict[str, Any]:
    state = document["state"]
    if document["stale"]:
        state = "silent"
    elif document["stopping"] and state == "running":
        state = "stopping"
    return {
        "name": query.get("name", document["name"]),
        "state": state,
        "since": when(document["started_at"]),
        "batch": query.get("batch_id"),
        "rows": query.get("input_rows_total"),
        "rate": round(query.get("input_rows_per_second") or 0),
        "lag": query.get("lag"),
        "dead": query.get("dead_letters"),
        "sink": query.get("sink"),
    }


@pipeline.command()
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline.")],
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for its end; 0: do not wait.")
    ] = 60.0,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Ask a running pipeline to stop, wherever it runs; it hears of it within seconds.

    The batch under way is finished first.

    Examples:

      headrace pipeline stop revenue
    """
    with connected(server, token, ca) as client:
        client.stop_pipeline(name)
        deadline = time.monotonic() + wait
        state = "running"
        while state == "running" and time.monotonic() < deadline:
            time.sleep(0.2)
            state = client.pipeline_stats(name)["state"]
    if state == "running":
        say(f"pipeline {name} was asked to stop")
        raise typer.Exit(1 if wait else 0)
    say(f"pipeline {name} is {state}")

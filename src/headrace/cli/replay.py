"""``headrace replay``: a topic or a table back into a topic, at a rate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.job_progress import TELL_S, signals
from headrace.cli.printing import count_of, progress_bar, say
from headrace.cli.spark_work import (
    Log,
    SparkPlace,
    check_installed,
    sparkling,
    state_directory,
    with_place,
    with_range,
)

if TYPE_CHECKING:
    from headrace.spark.builtin.replay import ReplayPlan


@with_place
@with_range
def replay(
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="TOPIC|PATH", help="A topic, a wildcard, or the path of a table."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="TOPIC", help="The topic to write.")],
    condition: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Only records for which this is true."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e9, help="Records per second; default: no limit."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The replay's name; the same name later continues it.")
    ] = None,
    keep_timestamps: Annotated[
        bool,
        typer.Option(
            "--keep-timestamps", help="Keep the timestamps of records; default: the current time."
        ),
    ] = False,
    same_partition: Annotated[
        bool,
        typer.Option("--same-partition", help="Keep the partitions of records; default: by key."),
    ] = False,
    log: Log = None,
    *,
    bounds: Any,
    place: SparkPlace,
) -> None:
    """Publish the records of a topic or a table to a topic again.

    Every record is written exactly once. Each gets the header headrace-replayed-from: orders/0@17.
    Ctrl-C stops the replay after the current step; the same command with its --name continues.

    Exit code 0: everything is written. 1: it was stopped before the end.

    \b
    Examples:
      headrace replay --from orders --to orders.test --since 1h --rate 1000
      headrace replay --from /lake/orders --to orders --where "partition = 2" --name restore
    """
    check_installed()
    from headrace.spark.builtin.replay import Replay, ReplayRequest
    from headrace.spark.sessions.stop_flag import StopFlag

    request = ReplayRequest(source, to, bounds, condition, keep_timestamps, same_partition)
    work = Replay(
        request, place.source(), state=state_directory() / "replays", rate=rate, name=name
    )
    say(f"replay {work.name}: {source} to {to}; to continue it, give --name {work.name}")
    stop = StopFlag()

    def end(now: bool) -> None:
        """After the step under way; the second time at once."""
        stop.set()
        if now:
            raise KeyboardInterrupt

    with (
        signals() as asked_to_stop,
        sparkling("replay", place, log) as spark,
        progress_bar(f"replay {work.name}") as bar,
    ):
        asked_to_stop.take_over()  # Spark has installed its own handlers
        asked_to_stop.tell(end)
        told = time.monotonic()

        def tell(plan: ReplayPlan) -> None:
            nonlocal told
            bar.show(plan.done, plan.steps, "step")
            if bar.is_hidden and time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                say(f"replay {work.name}: {_written(plan)}")

        plan = work.run(spark, tell, stop)
    if plan.is_finished:
        say(f"replay {work.name} is done: {count_of(plan.rows, 'record')} written to {to}")
        return
    say(f"replay {work.name} was stopped: {_written(plan)}")
    raise typer.Exit(1)


def _written(plan: ReplayPlan) -> str:
    left = count_of(plan.left, "offset")
    return f"{count_of(plan.rows, 'record')} written, {left} left"

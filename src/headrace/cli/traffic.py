"""``headrace traffic``: what goes through topics and subscriptions, minute by minute."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from headrace.cli.connecting import (
    AsJson,
    Ca,
    Server,
    Token,
    connected,
    count_of,
    print_json,
    print_rows,
    say,
    size,
)
from headrace.cli.job_progress import signals
from headrace.cli.spark_work import (
    Conf,
    Format,
    Log,
    Master,
    Once,
    check_installed,
    sparkling,
    where_of,
)
from headrace.errors import InvalidArgument, NotFound, TopicNotFound

if TYPE_CHECKING:
    from headrace.client.threads import BrokerClient
    from headrace.spark.builtin.repeating import Rounds
    from headrace.spark.builtin.traffic import Output

traffic = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
PREFIX = "headrace"
FETCHED = 1000
KINDS = ("traffic", "deliveries")


@traffic.command()
def run(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="Topics and wildcards; default: all."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="PATH", help="A directory for two tables.")
    ] = None,
    to_topic: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="Topics PREFIX.traffic and PREFIX.deliveries."),
    ] = None,
    format_: Format = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The first minute of a first run: 1h, or a time."),
    ] = None,
    name: Annotated[str, typer.Option(help="Its name among the pipelines.")] = "traffic",
    once: Once = False,
    delay: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Seconds after which a minute is told.")
    ] = 5.0,
    master: Master = None,
    conf: Conf = None,
    log: Log = None,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Tell, minute by minute, what goes through topics and subscriptions, until stopped.

    Into tables (--to), into topics that a dashboard can follow (--to-topic; headrace.traffic and
    headrace.deliveries unless tables alone are asked for), or both. Each minute is told once, when it
    is over; with --once all that are over now.

    Examples:

      headrace traffic run

      headrace traffic run 'shop.>' --to /lake/traffic --once
    """
    check_installed()
    from headrace.spark.builtin.repeating import Rounds
    from headrace.spark.builtin.traffic import Traffic
    from headrace.spark.connecting import connect
    from headrace.spark.options import Connection, Given
    from headrace.spark.pipelines.reporting import Reporter
    from headrace.spark.sql.text import moment_ms

    now_ms = time.time_ns() // 1_000_000
    since_ms = 0 if since is None else moment_ms("--since", since, now_ms)
    wanted = topics or [">"]
    source = where_of(server, token, ca)
    connection = Connection.of(Given(source))
    with connected(server, token, ca) as client:
        client.positions(list(wanted))  # a topic that is not there is said before Spark starts
        outputs = _outputs(client, to, to_topic, format_, name)
        sink = ", ".join(map(str, outputs))
        with signals() as asked, sparkling("traffic", master, conf, log) as spark:
            asked.take_over()  # Spark has put its own in place
            work = Traffic(spark, source, wanted, outputs, since_ms=since_ms, delay_s=delay)
            rounds = Rounds(
                spark,
                name,
                work.round,
                work.seconds_to_next,
                sink=sink,
                once=once,
                on_round=_told,
            )
            asked.tell(rounds.stop)
            rounds.run(Reporter(lambda: connect(connection)))
    say(f"{name} {rounds.state}: {count_of(rounds.rows, 'row')} to {sink}")
    if rounds.state == "failed":
        print(f"headrace: {name} failed: {rounds.error}", file=sys.stderr)
        raise typer.Exit(1)


def _told(rounds: Rounds) -> None:
    if rounds.last_rows:
        moment = datetime.now(UTC).strftime("%H:%M:%S")
        say(f"{moment} told {count_of(rounds.last_rows, 'row')}")


def _outputs(
    client: BrokerClient, to: str | None, to_topic: str | None, format_: str | None, name: str
) -> list[Output]:
    from headrace.model import check_topic_name
    from headrace.spark.builtin.traffic import TableOutput, TopicOutput
    from headrace.spark.lake.table import directory_of
    from headrace.spark.lake.tables import kind_of

    found: list[Output] = []
    if to is not None:
        for kind in KINDS:
            path = directory_of(to) / kind
            found.append(TableOutput(kind, str(path), format_ or kind_of(path) or "parquet", name))
    elif format_ is not None:
        raise InvalidArgument("--format is for tables: give --to PATH, too")
    if to is None or to_topic is not None:
        prefix = to_topic or PREFIX
        for kind in KINDS:
            found.append(TopicOutput(kind, check_topic_name(f"{prefix}.{kind}"), name, client))
    return found


# --- show -----------------------------------------------------------------------------------------
@traffic.command()
def show(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic or subscription.")
    ] = None,
    deliveries: Annotated[
        bool, typer.Option("--deliveries", help="Subscriptions, not topics.")
    ] = False,
    minutes: Annotated[int, typer.Option("--minutes", "-n", min=1, help="The last so many.")] = 10,
    table: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH", help="The tables of --to; default: the topics."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="The topics of --to-topic.")] = PREFIX,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show the traffic of the last minutes, as 'headrace traffic run' has told it.

    Examples:

      headrace traffic show

      headrace traffic show email --deliveries -n 60
    """
    kind = "deliveries" if deliveries else "traffic"
    if table is not None:
        check_installed()
        rows = _rows_of_table(Path(table) / kind)
    else:
        with connected(server, token, ca) as client:
            rows = _rows_of_topic(client, f"{prefix}.{kind}")
    about = "subscription" if deliveries else "topic"
    rows = [row for row in rows if topic in (None, row[about])]
    last = sorted({row["minute"] for row in rows})[-minutes:]
    rows = [row for row in rows if row["minute"] in last]
    rows.sort(key=lambda row: (row["minute"], row[about]))
    if as_json:
        print_json(rows)
    elif deliveries:
        _print_deliveries(rows)
    else:
        _print_traffic(rows)


def _rows_of_topic(client: BrokerClient, topic: str) -> list[dict[str, Any]]:
    try:
        place = client.positions(topic)[topic][0]
    except TopicNotFound:
        raise NotFound(
            f"nothing was told to {topic} yet: 'headrace traffic run' does, or name the tables with "
            "--from",
            code="no_traffic",
        ) from None
    start = max(place["start"], place["end"] - FETCHED)
    found = []
    while start < place["end"]:
        messages = client.fetch(topic, start, place["end"] - start)
        if not messages:
            break
        found += [orjson.loads(message.value) for message in messages]
        start = messages[-1].offset + 1
    return found


def _rows_of_table(path: Path) -> list[dict[str, Any]]:
    from headrace.spark.builtin.traffic import rows_of_table

    return rows_of_table(str(path))


def _print_traffic(rows: list[dict[str, Any]]) -> None:
    shown = [
        {
            "minute": row["minute"][:16].replace("T", " "),
            "topic": row["topic"],
            "messages": row["messages"],
            "rate": f"{row['messages'] / 60:,.1f}",
            "size": size(row["bytes"]),
            "values": f"{row['value_min']:,} / {row['value_p50']:,} / {row['value_p99']:,} / "
            f"{row['value_max']:,}",
            "keys": row["keys"],
            "gaps": f"{_milliseconds(row['gap_avg_ms'])} / {_milliseconds(row['gap_p99_ms'])}",
        }
        for row in rows
    ]
    columns = {
        "minute": "minute (UTC)",
        "topic": "topic",
        "messages": "messages",
        "rate": "per second",
        "size": "size",
        "values": "bytes min / p50 / p99 / max",
        "keys": "keys",
        "gaps": "between avg / p99",
    }
    print_rows(shown, columns, "There was no traffic.")


def _print_deliveries(rows: list[dict[str, Any]]) -> None:
    shown = [
        {
            "minute": row["minute"][:16].replace("T", " "),
            "subscription": row["subscription"],
            "delivered": row["delivered"],
            "acked": row["acked"],
            "nacked": row["nacked"],
            "again": row["redelivered"],
            "latency": f"{_milliseconds(row['latency_avg_ms'])} / "
            f"{_milliseconds(row['latency_p99_ms'])} / {_milliseconds(row['latency_max_ms'])}",
            "lag": row["lag"],
            "dead": ", ".join(f"{n:,} {why}" for why, n in row["dead_letters"].items()) or None,
        }
        for row in rows
    ]
    columns = {
        "minute": "minute (UTC)",
        "subscription": "subscription",
        "delivered": "delivered",
        "acked": "acked",
        "nacked": "nacked",
        "again": "again",
        "latency": "latency avg / p99 / max",
        "lag": "lag",
        "dead": "dead letters",
    }
    print_rows(shown, columns, "Nothing was delivered.")


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:,.1f} s" if value >= 10_000 else f"{value:,.0f} ms"

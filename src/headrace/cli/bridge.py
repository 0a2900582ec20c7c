"""``headrace bridge``: copies between plain Kafka topics and Headrace topics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from headrace.bridge.routes import (
    SKIPS,
    BridgeProgress,
    BridgeRoute,
    check_bridge_name,
    parse_routes,
    parse_skips,
)
from headrace.cli.connecting import BROKER_OPTIONS, BrokerPlace, connected, given_as, with_options
from headrace.cli.job_progress import TELL_S, signals
from headrace.cli.printing import AsJson, console, count_of, print_json, say, table_of
from headrace.cli.values import repartition_option
from headrace.client.threads import BrokerClient
from headrace.engine.kafka import read_options, refused_options
from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.bridge.kafka import KafkaPlace
    from headrace.bridge.running import Bridge

bridge = typer.Typer(no_args_is_help=True)
DELIVERY_S = 60.0
"""How long the bridge tries to store a round before it begins again."""
Topics = Annotated[
    list[str],
    typer.Argument(metavar="TOPIC|FROM=TO...", help="The topics; FROM=TO copies to another name."),
]
BRIDGE_OPTIONS: dict[str, Any] = {
    "kafka_servers": Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", envvar="HEADRACE_KAFKA_SERVERS", help="Addresses of Kafka."
        ),
    ],
    "kafka_config": Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="HEADRACE_KAFKA_CONFIG",
            help="Properties of librdkafka, such as TLS and logins: name=value on each line.",
        ),
    ],
    "name": Annotated[
        str | None,
        typer.Option(help="The bridge's name; the same name continues. Only one runs at a time."),
    ],
    "start": Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="earliest|latest",
            help="Where to begin in a topic that is new to the bridge.",
        ),
    ],
    "skip": Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(SKIPS),
            help="Skip these messages, and report them; default: stop. May be repeated.",
        ),
    ],
    "until_caught_up": Annotated[
        bool, typer.Option("--until-caught-up", help="End when everything is copied.")
    ],
    "as_json": AsJson,
    **BROKER_OPTIONS,
}


class BridgeRun(NamedTuple):
    """The options of both directions."""

    place: BrokerPlace
    kafka_servers: str
    kafka_config: str | None
    name: str
    start: str
    skips: frozenset[str]
    until_caught_up: bool
    as_json: bool

    @classmethod
    def of(cls, **given: Any) -> BridgeRun:
        place = BrokerPlace(**{option: given.pop(option) for option in BROKER_OPTIONS})
        if not given["kafka_servers"]:
            raise InvalidArgument("name Kafka with --kafka-servers, for example k1:9092,k2:9092")
        if not given["name"]:
            raise InvalidArgument(
                "give the bridge a --name, for example --name shop: the next start continues under it"
            )
        start = given["start"] or "earliest"
        if start not in ("earliest", "latest"):
            raise InvalidArgument(f"--from is earliest or latest, not {start!r}")
        return cls(
            place,
            given["kafka_servers"],
            given["kafka_config"],
            check_bridge_name(given["name"]),
            start,
            parse_skips(given["skip"] or ()),
            bool(given["until_caught_up"]),
            bool(given["as_json"]),
        )


with_bridge = with_options("run", BRIDGE_OPTIONS, given_as(BridgeRun.of))


@bridge.command()
@with_bridge
def from_kafka(
    topics: Topics,
    repartition: Annotated[bool, repartition_option("Kafka")] = False,
    *,
    run: BridgeRun,
) -> None:
    """Copy topics of Kafka into topics of Headrace, and follow them. Exactly once.

    Ctrl-C stops the bridge after the messages in progress; the same command continues. A kill is
    safe, too: nothing is lost, and nothing is copied twice.

    \b
    Examples:
      headrace bridge from-kafka orders payments=shop.payments --kafka-servers k1:9092 --name shop
      headrace bridge from-kafka orders --kafka-servers k1:9092 --name move --until-caught-up

    Exit code 1: messages were skipped.
    """
    routes = parse_routes(topics, inward=True)

    def make(client: BrokerClient, place: KafkaPlace, **more: Any) -> Bridge:
        from headrace.bridge.inward import InwardBridge

        return InwardBridge(client, place, routes, run.name, repartition=repartition, **more)

    _run(run, make, lambda route: (route.kafka, route.headrace))


@bridge.command()
@with_bridge
def to_kafka(topics: Topics, *, run: BridgeRun) -> None:
    """Copy topics of Headrace into topics of Kafka, and follow them. Exactly once, by Kafka's transactions.

    The topics must exist in Kafka. Consumers there need isolation.level=read_committed; otherwise
    they also see messages of aborted transactions. The subscription bridge.NAME shows the lag, and
    keeps messages until they are copied.

    \b
    Examples:
      headrace bridge to-kafka invoices --kafka-servers k1:9092 --name shop
      headrace bridge to-kafka shop.orders=orders --kafka-servers k1:9092 --name shop --from latest

    Exit code 1: messages were skipped.
    """
    routes = parse_routes(topics, inward=False)

    def make(client: BrokerClient, place: KafkaPlace, **more: Any) -> Bridge:
        from headrace.bridge.outward import OutwardBridge

        return OutwardBridge(client, place, routes, run.name, **more)

    _run(run, make, lambda route: (route.headrace, route.kafka))


def _run(
    run: BridgeRun, make: Callable[..., Bridge], ends: Callable[[BridgeRoute], tuple[str, str]]
) -> None:
    options = read_options(run.kafka_config)
    try:
        from confluent_kafka import KafkaException

        from headrace.bridge.kafka import KafkaPlace
    except ImportError:
        raise InvalidArgument(
            "the bridge needs confluent-kafka; install it with: pip install confluent-kafka"
        ) from None
    kafka = KafkaPlace(run.kafka_servers, options)
    try:
        kafka.admin()
    except KafkaException as error:
        raise refused_options(run.kafka_config, error) from None
    stop = threading.Event()

    def end(now: bool) -> None:
        stop.set()
        if now:
            raise KeyboardInterrupt

    with signals() as asked_to_stop, connected(run.place, delivery=DELIVERY_S) as client:
        work = make(
            client,
            kafka,
            start=run.start,
            skips=run.skips,
            stop=stop,
        )
        asked_to_stop.tell(end)
        with _shown(work.progress, ends, hidden=run.as_json):
            work.run(until_caught_up=run.until_caught_up)
    progress = work.progress
    if run.as_json:
        print_json(_document(progress, ends))
    else:
        say(_line(progress, run.name, "copied" if run.until_caught_up else "stopped"))
    if progress.skipped:
        raise typer.Exit(1)


def _line(progress: BridgeProgress, name: str, state: str) -> str:
    skipped = f", {count_of(progress.skipped, 'message')} skipped" if progress.skipped else ""
    return f"bridge {name} {state}: {count_of(progress.copied, 'message')} copied{skipped}, lag {progress.lag:,}"


def _document(
    progress: BridgeProgress, ends: Callable[[BridgeRoute], tuple[str, str]]
) -> dict[str, Any]:
    rows = []
    for route in progress.routes:
        source, target = ends(route)
        rows.append(
            {
                "from": source,
                "to": target,
                "partitions": len(route.ends),
                "copied": route.copied,
                "skipped": route.skipped,
                "lag": route.lag,
            }
        )
    return {"copied": progress.copied, "skipped": progress.skipped, "routes": rows}


# --- progress -------------------------------------------------------------------------------------
@contextmanager
def _shown(
    progress: BridgeProgress, ends: Callable[[BridgeRoute], tuple[str, str]], *, hidden: bool
) -> Iterator[None]:
    """A live table on a terminal; a line every few seconds elsewhere."""
    if hidden:
        yield
        return
    if console.is_terminal:
        with Live(
            console=console,
            refresh_per_second=4,
            transient=True,
            get_renderable=lambda: _picture(progress, ends),
        ):
            yield
        return
    done = threading.Event()

    def tell() -> None:
        while not done.wait(TELL_S):
            trouble = f"; {progress.trouble}" if progress.trouble else ""
            say(
                f"{count_of(progress.copied, 'message')} copied, {progress.rate():,.0f}/s, "
                f"lag {progress.lag:,}{trouble}"
            )

    thread = threading.Thread(target=tell, name="headrace-bridge-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _picture(
    progress: BridgeProgress, ends: Callable[[BridgeRoute], tuple[str, str]]
) -> RenderableType:
    titles = ("from", "to", "partitions", "copied", "skipped", "lag")
    parts: list[RenderableType] = [table_of(_document(progress, ends)["routes"], titles)]
    parts.append(Text(f"{progress.rate():,.0f} messages/s", style="dim"))
    if progress.trouble:
        parts.append(Text(progress.trouble, style="bold red"))
    return Group(*parts)

"""``headrace bench``: a load test of a running broker."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace import limits
from headrace.bench.dialects import OVER_HTTP, PAYLOAD_BYTES_MIN
from headrace.bench.figures import PERCENTILES
from headrace.bench.load import Load, Plan, Target
from headrace.bench.topic import BenchTopic
from headrace.cli.connecting import AsJson, Ca, Server, Token, address, count_of, print_json, say
from headrace.client.aio import make_tls
from headrace.clock import new_loop
from headrace.errors import HeadraceError, InvalidArgument

CONNECTIONS_MAX = 10_000
MESSAGES_MAX = 10_000_000
SECONDS_MAX = 86_400.0
BAR_CHARS = 50
DRAW_S = 0.1
OPEN_FILES_SPARE = 100
_errors = Console(stderr=True)


class Protocol(StrEnum):
    TEXT = "text"
    BINARY = "binary"
    HTTP = "http"
    WS = "ws"


def bench(
    concurrent: Annotated[
        int, typer.Option("--concurrent", "-c", min=1, max=CONNECTIONS_MAX, help="Connections.")
    ] = 100,
    messages: Annotated[
        int, typer.Option("--messages", "-n", min=1, max=MESSAGES_MAX, help="Messages in all.")
    ] = 10_000,
    protocol: Annotated[Protocol, typer.Option(help="What is spoken.")] = Protocol.HTTP,
    size: Annotated[
        int,
        typer.Option(
            min=PAYLOAD_BYTES_MIN, max=limits.MESSAGE_BYTES_CEILING, help="Bytes of a message."
        ),
    ] = 100,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e7, help="Messages per second; else as fast as it goes."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=SECONDS_MAX, help="Stop after so long.")
    ] = 60.0,
    consume: Annotated[
        bool, typer.Option("--consume", help="Also measure how long until a subscriber has it.")
    ] = False,
    topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Else a new one, bench-<random>.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not delete the topic made for the test.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Start a broker for this test alone.")
    ] = False,
    as_json: AsJson = False,
    server: Server = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="The broker's HTTP port (http, ws)."),
    ] = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Test a running broker under load: how many messages, and how long until each is stored.

    Every connection publishes, waits for the acknowledgement, and publishes again. With --rate, a
    message's latency counts from when it was due, so a broker that stalls cannot hide it.

    It publishes to a topic of its own and deletes that afterwards. All of the load comes from one
    process in Python, which on fast protocols is the limit itself: "make bench" in a checkout
    measures the broker with native tools.

    Exit code: 0 when every message was stored, 1 when some were not, 2 when it could not be done,
    130 after Ctrl-C (what was measured until then is printed).

    Examples:

      headrace bench --concurrent 100 --messages 10000

      headrace bench --protocol text --rate 1000 --consume

      headrace bench --start --protocol ws --size 1000 --json
    """
    if start and server == os.environ.get("HEADRACE_SERVER"):
        server = None  # nobody has asked for it here
    if start and (server or http):
        raise InvalidArgument("--start makes a broker of its own: leave --server and --http out")
    plan = Plan(topic or f"bench-{secrets.token_hex(4)}", concurrent, messages, size, rate, seconds, consume)  # fmt: skip
    limits.allow_open_files(concurrent + OPEN_FILES_SPARE)
    if start:
        with _own_broker() as places:
            target = Target(protocol.value, *places["http" if protocol in OVER_HTTP else "tcp"])
            raise typer.Exit(_test(plan, target, keep, as_json))
    raise typer.Exit(_test(plan, _target(protocol, server, http, token, ca), keep, as_json))


# --- where ----------------------------------------------------------------------------------------
def _target(
    protocol: str, server: str | None, http: str | None, token: str | None, ca: str | None
) -> Target:
    host, port, tls = address(server)
    if protocol in OVER_HTTP:
        host, port, tls = _http_address(http, host, tls)
    try:
        context: ssl.SSLContext | None = make_tls(tls, ca)
    except OSError as error:
        raise InvalidArgument(f"the certificate {ca} cannot be used: {error}") from None
    return Target(str(protocol), host, port, token, context)


def _http_address(http: str | None, host: str, tls: bool) -> tuple[str, int, bool]:
    port = os.environ.get("HEADRACE_HTTP_PORT") or os.environ.get("PORT") or "8080"
    if http is None:
        http = f"{'https' if tls else 'http'}://{host}:{port}"
    scheme, separator, text = http.partition("://")
    if not separator:
        scheme, text = "http", http
    if scheme not in ("http", "https"):
        raise InvalidArgument(f"{http!r} is not http:// or https://; --http takes HOST:PORT")
    found = address(f"tcp://{text if ':' in text else f'{text}:{port}'}")
    return found.host, found.port, scheme == "https"


@contextmanager
def _own_broker() -> Iterator[dict[str, tuple[str, int]]]:
    """A broker with default settings, on free ports, whose directory goes with it."""
    from headrace.testing.servers import server_process

    with server_process() as process:
        yield {name: (host, port) for name, (host, port) in process.addresses.items()}
        process.terminate()


# --- the test -------------------------------------------------------------------------------------
def _test(plan: Plan, target: Target, keep: bool, as_json: bool) -> int:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        load, durability, kept = runner.run(_run(plan, target, keep, as_json))
    figures = load.figures
    document = {
        "protocol": target.protocol,
        "topic": plan.topic,
        "durability": durability,
        "messages": plan.messages,
        "size": plan.size,
        "rate": plan.rate,
        **figures.as_dict(plan.size, consume=plan.consume),
    }
    if as_json:
        print_json(document)
    else:
        _print(document, kept)
    if figures.interrupted:
        return 130
    missing = plan.consume and figures.delivered < figures.published
    return 0 if figures.published == plan.messages and not figures.errors and not missing else 1


async def _run(plan: Plan, target: Target, keep: bool, as_json: bool) -> tuple[Load, str, bool]:
    topic = BenchTopic(target, plan.topic)
    await topic.make()
    load = Load(plan, target)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, load.stop)
    try:
        with _progress(load, hidden=as_json):
            await load.run()
    finally:
        kept = keep or not topic.is_ours
        if not kept:
            await _remove(topic)
    return load, topic.durability, kept


async def _remove(topic: BenchTopic) -> None:
    """The broker may be gone by now; the figures are worth more than the complaint."""
    try:
        await topic.remove()
    except HeadraceError as error:
        print(f"headrace: the topic {topic.name} could not be deleted: {error}", file=sys.stderr)


@contextmanager
def _progress(load: Load, *, hidden: bool) -> Iterator[None]:
    bar = Progress(
        TextColumn("published"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
        console=_errors, transient=True, auto_refresh=False,
        disable=hidden or not _errors.is_terminal,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    task = bar.add_task("", total=load.plan.messages)

    async def draw() -> None:
        while True:
            await asyncio.sleep(DRAW_S)
            figures = load.figures
            bar.update(task, completed=figures.published + figures.errors.total(), refresh=True)

    with bar:
        drawing = loop.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()


# --- the summary ----------------------------------------------------------------------------------
def _print(document: dict[str, Any], kept: bool) -> None:
    figures = document
    say(
        f"{figures['protocol']}, {count_of(figures['connections'], 'connection')}, messages of "
        f"{figures['size']:,} bytes, durability {figures['durability']}"
    )
    megabytes = figures["bytes_per_second"] / 1e6
    say(
        f"published  {figures['published']:,} of {figures['messages']:,} in "
        f"{figures['seconds']:.2f} s: {figures['messages_per_second']:,.0f} messages/s, "
        f"{megabytes:.2f} MB/s"
    )
    if figures["delivered"] is not None:
        say(f"delivered  {figures['delivered']:,}")
    for code, count in figures["errors"].items():
        say(f"error      {count:,} × {code}")
    for title, found in (
        ("until it was acknowledged", figures["latency_ms"]),
        ("until a subscriber had it", figures["delivery_ms"]),
    ):
        if found is not None:
            say("")
            points = [f"{name} {_ms(found[name])}" for name in (*_POINTS, "max", "mean")]
            say(f"{title}: {', '.join(points)}")
            for line in draw_histogram(found["histogram"]):
                say(line)
    say("")
    if figures["interrupted"]:
        say("Interrupted: this is what was measured until then.")
    elif figures["time_was_up"]:
        say("The time was up before every message was sent; --seconds gives it more.")
    if kept:
        say(f"The messages are in topic {figures['topic']}.")


_POINTS = tuple(f"p{percent}" for percent in PERCENTILES)
_EIGHTHS = " ▏▎▍▌▋▊▉"


def draw_histogram(steps: list[dict[str, Any]]) -> list[str]:
    """A bar a step, the longest as wide as there is room."""
    most = max(step["count"] for step in steps)
    labels = [f"{_ms(step['from_ms'])} – {_ms(step['to_ms'])}" for step in steps]
    width = max(map(len, labels))
    lines = []
    for label, step in zip(labels, steps, strict=True):
        count = int(step["count"])
        full, eighths = divmod(round(count / most * BAR_CHARS * 8), 8)
        if count and not full and not eighths:
            eighths = 1
        bar = "█" * full + _EIGHTHS[eighths].strip()
        lines.append(f"  {label:>{width}}  {bar} {count:,}".rstrip())
    return lines


def _ms(ms: float) -> str:
    """With a unit, and as many digits as can be believed."""
    if ms >= 999.5:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 0.9995 else f"{ms * 1000:.3g} µs"

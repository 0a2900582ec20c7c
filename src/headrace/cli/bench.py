"""``headrace bench``: a load test of a running broker."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer

from headrace import limits
from headrace.bench import CONNECT_S, PAYLOAD_BYTES_MIN, PERCENTILES, PUBLISH_S, LoadPlan, LoadTest
from headrace.cli.connecting import (
    BrokerPlace,
    login_as,
    with_broker_place,
)
from headrace.cli.printing import AsJson, complain, count_of, print_json, progress_bar, say
from headrace.cli.values import duration_option, size_option
from headrace.client.aio import AsyncClient
from headrace.clock import new_loop
from headrace.errors import ConnectFailed, InvalidArgument

CONNECTIONS_MAX = 10_000
MESSAGES_MAX = 10_000_000
SECONDS_MAX = 86_400.0
BAR_CHARS = 50
DRAW_S = 0.1
OPEN_FILES_SPARE = 100


@with_broker_place
def bench(
    place: BrokerPlace,
    concurrent: Annotated[
        int,
        typer.Option(
            "--concurrent", "-c", min=1, max=CONNECTIONS_MAX, help="Number of connections."
        ),
    ] = 100,
    messages: Annotated[
        int, typer.Option("--messages", "-n", min=1, max=MESSAGES_MAX, help="Number of messages.")
    ] = 10_000,
    size: Annotated[
        int,
        size_option(
            help="Size of a message: bytes, or 10KB.",
            low=PAYLOAD_BYTES_MIN,
            high=limits.MESSAGE_BYTES_CEILING,
        ),
    ] = 100,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1e7, help="Messages per second; by default as many as possible."
        ),
    ] = None,
    seconds: Annotated[
        float,
        duration_option(
            "--seconds", help="Stop after this time: seconds, or 5m.", low=0.01, high=SECONDS_MAX
        ),
    ] = 60.0,
    consume: Annotated[
        bool, typer.Option("--consume", help="Measure the time to delivery as well.")
    ] = False,
    topic: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The topic; by default a new one, bench-<random>."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the topic that the test created.")
    ] = False,
    start: Annotated[bool, typer.Option("--start", help="Start a broker for this test.")] = False,
    as_json: AsJson = False,
) -> None:
    """Test a running broker under load.

    The test measures how many messages the broker stores, and how long each takes. Each connection publishes, waits for the receipt, and publishes again. With --rate, the latency
    of a message counts from the time at which it was due, so a broker that stalls cannot hide it.

    The test publishes to a topic of its own and deletes it afterwards. One Python process makes all
    of the load, and may reach its own limit first: "make bench" in a checkout measures the broker
    with native tools, over HTTP, WebSocket and the text protocol as well.

    Exit code: 0 if every message was stored, 1 if some were not, 2 if the test could not run,
    130 after Ctrl-C (which prints the results so far).

    \b
    Examples:
      headrace bench --concurrent 100 --messages 10000
      headrace bench --rate 1000 --consume
      headrace bench --start --size 1000 --json
    """
    server = place.server
    if start and server == os.environ.get("HEADRACE_SERVER"):
        server = None  # it comes from the environment, not from the command line
    if start and server:
        raise InvalidArgument("--start starts a broker of its own: leave --server out")
    name = topic or f"bench-{secrets.token_hex(4)}"
    plan = LoadPlan(name, concurrent, messages, size, rate, seconds, consume, keep)
    limits.allow_open_files(concurrent + OPEN_FILES_SPARE)
    if start:
        with _own_broker() as (host, port):
            raise typer.Exit(_run(plan, _clients(f"{host}:{port}"), as_json))
    user, password = login_as(place.token, place.user)
    login = {"token": place.token, "user": user, "password": password}
    raise typer.Exit(_run(plan, _clients(server, ca=place.ca, **login), as_json))


def _clients(server: str | None, **options: Any) -> Callable[[], AsyncClient]:
    AsyncClient(server, **options)  # a mistake is found before anything is measured
    return partial(
        AsyncClient,
        server,
        request_timeout=CONNECT_S,
        delivery_timeout=PUBLISH_S,
        **options,
    )


@contextmanager
def _own_broker() -> Iterator[tuple[str, int]]:
    """A broker with default settings on a free port; its directory is removed with it."""
    from headrace.testing.servers import server_process

    with server_process() as process:
        yield process.address
        process.terminate()


# --- the test -------------------------------------------------------------------------------------
def _run(plan: LoadPlan, new_client: Callable[[], AsyncClient], as_json: bool) -> int:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        test = runner.run(_tested(plan, new_client, as_json))
    figures = test.figures
    document = {
        "topic": plan.topic,
        "durability": test.durability,
        "messages": plan.messages,
        "size": plan.size,
        "rate": plan.rate,
        **figures.as_dict(plan.size, consume=plan.consume),
    }
    if as_json:
        print_json(document)
    else:
        _print(document, kept=plan.keep or not test.topic_is_ours)
    if test.left_over is not None:
        text = f"headrace: the topic {plan.topic} could not be deleted: {test.left_over}"
        complain(text)
    if figures.interrupted:
        return 130
    missing = plan.consume and figures.delivered < figures.published
    return 0 if figures.published == plan.messages and not figures.errors and not missing else 1


async def _tested(plan: LoadPlan, new_client: Callable[[], AsyncClient], as_json: bool) -> LoadTest:
    test = LoadTest(plan, new_client)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, test.stop)
    with _progress(test, hidden=as_json):
        try:
            await test.run()
        except ConnectFailed as error:
            raise ConnectFailed(f"{error} (--start starts a broker for this test)") from None
    return test


@contextmanager
def _progress(test: LoadTest, *, hidden: bool) -> Iterator[None]:
    with progress_bar("publishing", hidden=hidden) as bar:

        async def draw() -> None:
            while True:
                await asyncio.sleep(DRAW_S)
                figures = test.figures
                bar.show(figures.published + figures.errors.total(), test.plan.messages, "message")

        drawing = asyncio.get_running_loop().create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()


# --- the summary ----------------------------------------------------------------------------------
def _print(figures: dict[str, Any], *, kept: bool) -> None:
    say(
        f"{count_of(figures['connections'], 'connection')}, messages of {figures['size']:,} bytes, "
        f"durability {figures['durability']}"
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
        ("time to the receipt", figures["latency_ms"]),
        ("time to delivery", figures["delivery_ms"]),
    ):
        if found is not None:
            say("")
            points = [f"{name} {_ms(found[name])}" for name in (*_POINTS, "max", "mean")]
            say(f"{title}: {', '.join(points)}")
            for line in draw_histogram(found["histogram"]):
                say(line)
    say("")
    if figures["interrupted"]:
        say("Interrupted: these are the results until then.")
    elif figures["time_was_up"]:
        say("The time was up before every message was sent; give more with --seconds.")
    if kept:
        say(f"The messages are in topic {figures['topic']}.")


_POINTS = tuple(f"p{percent}" for percent in PERCENTILES)
_EIGHTHS = " ▏▎▍▌▋▊▉"


def draw_histogram(steps: list[dict[str, Any]]) -> list[str]:
    """One line with a bar for each step of the histogram."""
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
    """With a unit and three significant digits."""
    if ms >= 999.5:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 0.9995 else f"{ms * 1000:.3g} µs"

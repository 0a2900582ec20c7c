"""``headrace top`` and ``headrace clients``: what happens on the broker now, and who is connected."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from headrace.cli.connecting import BrokerPlace, connected, with_broker_place, with_client
from headrace.cli.groups import state_of
from headrace.cli.live import PATIENCE_S, Interval, Screen
from headrace.cli.printing import (
    AsJson,
    ago,
    console,
    count_of,
    is_narrow,
    print_each,
    print_json,
    print_table,
    say,
    size,
    table_of,
    when,
)
from headrace.client.threads import BrokerClient
from headrace.operations.results import BrokerLoad, ClientInfo, Overview, OverviewRow

ROWS_MAX = 200
"""Subscriptions that are asked for: more fit on no screen."""
PAGE = 1_000
RATES = ("published", "delivered", "acked", "redelivered")
HEAD_LINES = 6
COLUMNS = {
    "subscription": "subscription",
    "topic": "topic",
    "in": "in/s",
    "out": "out/s",
    "acked": "ack/s",
    "again": "again/s",
    "lag": "lag",
    "in_flight": "flight",
    "waiting_for_retry": "retry",
    "dead_letters": "dead",
    "members": "members",
    "state": "state",
}


LESS_NEEDED = ("again", "waiting_for_retry", "members")
"""Left out on a narrow terminal; ``state`` tells if there are no members."""


@with_broker_place
def top(
    place: BrokerPlace,
    interval: Interval = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, then exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the broker: rates, lag, dead letters, disk, memory.

    Problems come first: subscriptions that cannot continue, dead letters, lag without a worker.
    Keys: q quits, + and - change the interval, space refreshes now. Without a terminal, the command
    prints once.

    \b
    Examples:
      headrace top
      headrace top --interval 10s
      headrace top --once --json
    """
    with connected(place, patience=PATIENCE_S) as client:
        if once or as_json or not console.is_terminal:
            before = client.overview(limit=ROWS_MAX)
            time.sleep(min(interval, 1.0))
            now = client.overview(limit=ROWS_MAX)
            if as_json:
                print_json(_document(now, before))
            else:
                _print_once(now, before)
            return
        where = place.server or ""
        Screen(
            lambda: client.overview(limit=ROWS_MAX),
            lambda now, before, every: _screen(now, before, f"every {every:g}s  {where}"),
            interval,
        ).run()


# --- rates ------------------------------------------------------------------------------------------
def _rate(now: Mapping[str, Any], before: Mapping[str, Any] | None, name: str, s: float) -> Any:
    """Per second; None if nothing can be said: the first look, or the broker has started anew."""
    if before is None or s <= 0 or now[name] < before[name]:
        return None
    return round((now[name] - before[name]) / s, 1)


def _seconds(now: Overview, before: Overview | None) -> float:
    return 0.0 if before is None else (now["time"] - before["time"]) / 1000


def _rows(now: Overview, before: Overview | None) -> list[dict[str, Any]]:
    seconds = _seconds(now, before)
    earlier = {} if before is None else {_key(row): row for row in before["rows"]}
    found = []
    for row in now["rows"]:
        last = earlier.get(_key(row))
        rates = {
            "in": _rate(row, last, "end", seconds),
            "out": _rate(row, last, "delivered", seconds),
            "acked": _rate(row, last, "acked", seconds),
            "again": _rate(row, last, "redelivered", seconds),
        }
        found.append({**row, **rates, "state": _state(row)})
    return found


def _key(row: OverviewRow) -> tuple[str, str | None]:
    return row["topic"], row["subscription"]


def _state(row: OverviewRow) -> str:
    if row["subscription"] is None:
        return "read-only" if row["blocked"] else ""
    return state_of(row["paused"], row["blocked"] > 0, row["lag"], row["members"])


def _document(now: Overview, before: Overview) -> dict[str, Any]:
    """The answer of the broker, with rates: of everything, and of each row."""
    seconds = _seconds(now, before)
    rows = [
        {**row, "rates": {name: shown[name] for name in ("in", "out", "acked", "again")}}
        for row, shown in zip(now["rows"], _rows(now, before), strict=True)
    ]
    rates = {name: _rate(now, before, name, seconds) for name in RATES}
    return {**now, "rates": rates, "rows": rows}


# --- drawing ----------------------------------------------------------------------------------------
def _head(now: Overview, before: Overview | None) -> list[Text]:
    seconds = _seconds(now, before)
    rates = Text("  ").join(
        _figure(name, _per_second(_rate(now, before, name, seconds))) for name in RATES
    )
    held = Text("  ").join(
        [
            _figure("lag", f"{now['lag']:,}", "bold yellow" if now["lag"] else ""),
            _figure("in flight", f"{now['in_flight']:,}"),
            _figure("dead", f"{now['dead_letters']:,}", "bold red" if now["dead_letters"] else ""),
            _figure("topics", f"{now['topics']:,}"),
            _figure("subscriptions", f"{now['subscriptions']:,}"),
            _figure("stored", size(now["bytes"])),
        ]
    )
    lines = [rates, held]
    if "load" in now:
        lines.append(_load_line(now["load"]))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _load_line(load: BrokerLoad) -> Text:
    free = load["disk_free_bytes"]
    disk = "in memory" if free is None else f"{size(free)} free"
    is_scarce = load["memory_used"] > 0.8 * load["memory_limit"]
    memory = f"{size(load['memory_used'])} of {size(load['memory_limit'])}"
    return Text("  ").join(
        [
            _figure("connections", f"{load['connections']:,}"),
            _figure("memory", memory, "bold red" if is_scarce else ""),
            _figure("resident", size(load["resident_bytes"])),
            _figure(
                "disk",
                f"{disk}, FULL" if load["disk_full"] else disk,
                "bold red" if load["disk_full"] else "",
            ),
        ]
    )


def _figure(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style or "bold"))


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}/s"


def _screen(now: Overview, before: Overview | None, title: str) -> RenderableType:
    up = f"  up {ago(now['time'] - now['load']['started'])}" if "load" in now else ""
    head = Text(f"headrace top  {when(now['time'])} UTC{up}  {title}", style="reverse")
    head.no_wrap, head.overflow = True, "ellipsis"
    rows = _rows(now, before)
    room = max(console.height - HEAD_LINES - 2, 1)
    parts: list[RenderableType] = [head, *_head(now, before), Text()]
    if rows:
        parts.append(_table(rows[:room]))
    more = now["subscriptions"] - len([row for row in rows[:room] if row["subscription"]])
    if more > 0:
        parts.append(Text(f"and {count_of(more, 'subscription')} more", style="dim"))
    return Group(*parts)


def _table(rows: list[dict[str, Any]]) -> RenderableType:
    shown = [
        {**row, **{name: _whole(row[name]) for name in ("in", "out", "acked", "again")}}
        for row in rows
    ]
    left_out = LESS_NEEDED if is_narrow() else ()
    return table_of(shown, {k: title for k, title in COLUMNS.items() if k not in left_out})


def _whole(rate: float | None) -> int | None:
    return None if rate is None else round(rate)


def _print_once(now: Overview, before: Overview) -> None:
    for line in _head(now, before):
        say(line.plain)
    rows = _rows(now, before)
    if rows:
        say("")
        print_table(_table(rows))  # type: ignore[arg-type]
    more = now["subscriptions"] - len([row for row in rows if row["subscription"]])
    if more > 0:
        say(f"and {count_of(more, 'subscription')} more")


# --- clients ----------------------------------------------------------------------------------------
@with_client
def clients(
    client: BrokerClient,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of connections.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List who is connected, and what each connection holds.

    You see the connections with your own login. An administrator also sees the connections of the
    users and tokens that it administers; an administrator of the broker sees all connections.

    \b
    Examples:
      headrace clients
      headrace clients --json
    """
    found = _connections(client, limit)
    now = client.info()["time"]
    print_each(
        as_json,
        found,
        lambda each: {
            "client": each["client_id"],
            "login": each["name"],
            "address": each["address"],
            "protocol": each["protocol"],
            "for": ago(now - each["connected"]),
            "in flight": each["in_flight"],
            "unsent": size(each["unsent_bytes"]),
            "subscriptions": _subscriptions(each),
        },
        "No connections.",
    )


def _connections(client: BrokerClient, limit: int | None) -> list[ClientInfo]:
    found: list[ClientInfo] = []
    while limit is None or len(found) < limit:
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        page = client.clients(after=found[-1]["connection"] if found else 0, limit=wanted)
        found += page
        if len(page) < wanted:
            break
    return found


def _subscriptions(each: ClientInfo) -> str | None:
    names = [
        held["topic"] if held["subscription"] is None else f"{held['subscription']}@{held['topic']}"
        for held in each["subscriptions"]
    ]
    more = each["subscriptions_total"] - len(names)
    return ", ".join([*names, f"{more:,} more"] if more else names) or None

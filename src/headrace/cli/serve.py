"""``headrace serve`` and ``headrace config``: run a broker, and see what it is told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from headrace.cli.connecting import print_table
from headrace.settings import SETTINGS, Settings, load

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="HEADRACE_CONFIG", help="Config file; else ./config.json."),
]


def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 picks a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where topics are kept.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep everything in memory.")] = False,
    durability: Annotated[
        str | None, typer.Option(help="always, interval or never: when a publish counts.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Secret that clients must present.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Private key (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")
    ] = False,
    max_message_size: Annotated[str | None, typer.Option(help="Such as 1MB.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    Examples:

      headrace serve

      headrace serve --port 0 --data-dir /var/lib/headrace

      HEADRACE_TOKEN=secret headrace serve --host 0.0.0.0
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "http_port": http_port,
        "data_dir": data_dir,
        "persistence_enabled": False if memory else None,
        "durability": durability,
        "token": token,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "insecure": True if insecure else None,
        "max_message_size": max_message_size,
        "log_level": log_level,
    }
    settings = load(flags, os.environ, config)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)-8s %(name)s: %(message)s",
    )
    raise typer.Exit(_run(settings))


def _run(settings: Settings) -> int:
    from headrace.clock import new_loop
    from headrace.server.server import serve as serve_until_stopped

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(serve_until_stopped(settings, ready=_say_ready))


def _say_ready(server: Any) -> None:
    schemes = {"tcp": "tls", "http": "https"} if server.is_tls else {"tcp": "tcp", "http": "http"}
    where = "in memory" if server.engine.directory is None else str(server.engine.directory.path)
    places = [f"{schemes[name]}://{host}:{port}" for name, (host, port) in server.addresses.items()]
    print(f"Headrace is ready: {', '.join(places)} (data: {where})", flush=True)


def config(
    file: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print the settings in force here, and where each value came from."""
    settings = load({}, os.environ, file)
    values = settings.as_dict()
    if values["token"]:
        values["token"] = "(set)"
    if as_json:
        rows = {n: {"value": v, "source": settings.source(n)} for n, v in values.items()}
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("setting", "value", "from", "meaning"):
        table.add_column(column)
    for setting in SETTINGS:
        value = values[setting.name]
        shown = "-" if value is None else str(value)
        row = (setting.name, shown, settings.source(setting.name), setting.help)
        table.add_row(*map(Text, row))
    print_table(table)

"""``headrace serve`` and ``headrace config``: run a broker, and show its settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.connecting import given_as, with_options
from headrace.cli.printing import AsJson, print_error, print_listing, visible
from headrace.errors import StorageFailed
from headrace.settings import BY_NAME, SETTINGS, Settings, load

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="HEADRACE_CONFIG", help="The config file; default: ./config.json."
    ),
]
_FLAGS = (
    *("host", "port", "http_port", "data_dir", "durability", "token", "tls_cert", "tls_key"),
    *("insecure", "max_message_size", "log_level", "log_format"),
    *("engine", "kafka_servers", "cluster", "advertise"),
)
"""The settings that are also flags of ``headrace serve``."""
EXIT_UNAVAILABLE = 69
"""A service manager may try again: an address appears when the network does, a port becomes free, and Kafka answers again."""


def setting_flag(name: str) -> Any:
    setting = BY_NAME[name]
    text = f"{setting.help[0].upper()}{setting.help[1:]}."
    option = f"--{name.replace('_', '-')}"
    kind: Any = bool if setting.annotation is bool else str
    return Annotated[kind | None, typer.Option(option, help=text)]


@with_options("flags", {name: setting_flag(name) for name in _FLAGS}, given_as(dict))
def serve(
    flags: dict[str, Any],
    config: ConfigFile = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep everything in memory.")] = False,
) -> None:
    """Run the broker.

    It stops on SIGTERM or Ctrl-C. SIGHUP reloads certificates, log level and access rules.

    \b
    Examples:
      headrace serve
      headrace serve --port 0 --data-dir /var/lib/headrace
      HEADRACE_TOKEN=correct-horse-battery-staple headrace serve --host 0.0.0.0
      headrace serve --engine kafka --kafka-servers k1:9092,k2:9092 --cluster shop
    """
    flags["persistence_enabled"] = False if memory else None
    try:
        code = _run(lambda: load(flags, os.environ, config))
    except StorageFailed as error:
        if error.code != "kafka_unavailable":
            raise
        print_error(error)
        code = EXIT_UNAVAILABLE
    raise typer.Exit(code)


def _run(read: Callable[[], Settings]) -> int:
    from headrace.clock import new_loop
    from headrace.server import logs
    from headrace.server.server import serve as serve_until_stopped

    settings = read()
    logs.set_up(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(serve_until_stopped(settings, ready=_say_ready, reload=read))


def _say_ready(server: Any) -> None:
    schemes = {"tcp": "tls", "http": "https"} if server.is_tls else {"tcp": "tcp", "http": "http"}
    where = "in memory" if server.engine.directory is None else str(server.engine.directory.path)
    if server.settings.engine == "kafka":
        where = f"Kafka {server.settings.kafka_servers}, cluster {server.settings.cluster}"
    places = [f"{schemes[name]}://{host}:{port}" for name, (host, port) in server.addresses.items()]
    print(visible(f"Headrace is ready: {', '.join(places)} (data: {where})"), flush=True)


def config(file: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print the settings in force, and their sources."""
    settings = load({}, os.environ, file)
    values = settings.as_dict()
    if values["token"]:
        values["token"] = "(set)"
    document = {n: {"value": v, "source": settings.source(n)} for n, v in values.items()}
    rows = [
        {
            "setting": setting.name,
            "value": None if values[setting.name] is None else str(values[setting.name]),
            "from": settings.source(setting.name),
            "meaning": setting.help,
        }
        for setting in SETTINGS
    ]
    print_listing(as_json, document, rows, ("setting", "value", "from", "meaning"), "")

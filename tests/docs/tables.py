"""The tables of the documentation that are made from the source.

``python -m tests.docs.tables`` prints the settings as they have to stand in docs/operations.md. The site
(docs/hooks.py) has a page for each of the others.
"""

import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from headrace import errors
from headrace.cli import app
from headrace.errors import HeadraceError
from headrace.model import SubscriptionSettings, TopicSettings
from headrace.server import watchdog
from headrace.settings import SETTINGS
from headrace.testing import running_server
from headrace.wire.http import status_of
from tests.docs.blocks import read, section, table

SETTINGS_HEAD = ("setting", "default", "environment", "in config.json", "meaning")


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells).replace("  ", " ") + " |"


def shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 4096 and value % 1024 == 0:
        units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        return next(f"{value // size} {unit}" for size, unit in units if value % size == 0)
    return f"{value:g}" if isinstance(value, float) else str(value)


def server_settings() -> str:
    """Every setting of a server."""
    lines = [row(SETTINGS_HEAD), "|" + "---|" * len(SETTINGS_HEAD)]
    for setting in SETTINGS:
        variables = (f"HEADRACE_{setting.name.upper()}", *setting.environment)
        keys = [f"{setting.section}.{key}" for key in (setting.name, *setting.aliases)]
        cells = (
            f"`{setting.name}`",
            shown(setting.default),
            ", ".join(f"`{name}`" for name in variables),
            ", ".join(f"`{key}`" for key in keys),
            setting.help,
        )
        lines.append(row(cells))
    return "\n".join(lines)


def defaults(settings: type[TopicSettings] | type[SubscriptionSettings]) -> dict[str, str]:
    return {field.name: shown(field.default) for field in fields(settings)}


# --- the pages of the site ---------------------------------------------------------------------------
def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [[cell.replace("|", "\\|") for cell in cells] for cells in rows]
    return "\n".join([row(head), "|" + "---|" * len(head), *map(row, lines)])


def settings_page() -> str:
    text = read("docs/operations.md")
    parts = [
        "# Settings",
        "Every setting of a broker, of a topic and of a subscription. [Operations](../operations.md#settings) says "
        "where they are written and which of two values is stronger.",
        "## Of the broker",
        server_settings(),
    ]
    for title in ("Settings of a topic", "Settings of a subscription"):
        rows = table(section(text, title), "setting", "default", "meaning")
        parts += [
            f"## {title.removeprefix('Settings ').capitalize()}",
            _table(("setting", "default", "meaning"), rows),
        ]
    return "\n\n".join(parts)


def metrics() -> Iterator[tuple[str, str, str, str]]:
    """Name, type, labels and meaning of each metric that a broker with some traffic has."""
    with running_server(memory=True) as server, server.client() as client:
        client.publish("orders", b"x")
        client.create_subscription("email", "orders")
        query = {"name": "q", "batch_id": 1, "input_rows_total": 1, "trigger_ms": 1.0}
        now = server.server.engine.now_ms()
        query |= {"processed_rows_per_second": 1.0, "last_progress_at": now}
        run = {"state": "running", "run_id": "r", "started_at": now, "queries": [query]}
        client.report_pipeline("totals", run)
        watchdog.logger.disabled = True
        server.call(time.sleep, 0.2)  # so that the loop was blocked
        address = f"http://{server.http_address.host}:{server.http_address.port}/metrics"
        with urllib.request.urlopen(address) as answer:
            text = answer.read().decode()
        watchdog.logger.disabled = False
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, ", ".join(sorted(labels)), family.documentation


def metrics_page() -> str:
    rows = [
        (f"`{name}`", kind, ", ".join(f"`{each}`" for each in labels.split(", ") if each), text)
        for name, kind, labels, text in sorted(metrics())
    ]
    return "\n\n".join(
        (
            "# Metrics",
            "What `GET /metrics` answers, in the format of Prometheus ([HTTP](../http.md#health-and-metrics)).",
            _table(("metric", "type", "labels", "meaning"), rows),
        )
    )


def codes_page() -> str:
    text = read("docs/protocol.md")
    kinds = {row[0].strip("`"): row for row in table(text, "code", "class", "retryable", "meaning")}
    rows = []
    for code, name, _, meaning in kinds.values():
        rows.append((code.strip("`"), name, code.strip("`"), "any", meaning))
    for code, kind, where, meaning in table(text, "code", "kind", "where", "meaning"):
        rows.append((code.strip("`"), kinds[kind.strip("`")][1], kind.strip("`"), where, meaning))
    shown = []
    for code, name, kind, where, meaning in sorted(rows):
        cls = getattr(errors, name.strip("`"), HeadraceError)
        status = str(status_of(cls("", code=code), kind)) if where in ("any", "http") else ""
        is_retryable = "yes" if cls.retryable else "no"
        shown.append((f"`{code}`", name, is_retryable, status, where, meaning))
    return "\n\n".join(
        (
            "# Error codes",
            "Every code with the class that Python raises, the status of HTTP, and whether the same request may "
            "succeed later. [The protocol](../protocol.md#errors) says what a code promises, "
            "[Spark](../spark.md#error-codes) has the codes of Spark jobs.",
            _table(("code", "class", "retryable", "HTTP", "where", "meaning"), shown),
        )
    )


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command by its full name."""
    found: dict[str, Any] = {}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*path, name)) or {" ".join((*path, name)): command}
    return found


COMMANDS = commands(typer.main.get_command(app))


def commands_page() -> str:
    parts = [
        "# Commands",
        "Every command with its arguments and options, as `--help` shows them. [The command line](../cli.md) "
        "explains them, with examples.",
    ]
    for name, command in COMMANDS.items():
        context = command.make_context(f"headrace {name}", [], resilient_parsing=True)
        usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
        first = (command.help or "").strip().split("\n\n")[0].replace("\n", " ")
        records = [each.get_help_record(context) for each in command.params]
        rows = [(f"`{word}`", " ".join(text.split())) for word, text in filter(None, records)]
        parts += [f"## {name}", first, f"```\n{usage}\n```"]
        if rows:
            parts.append(_table(("argument or option", "meaning"), rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(server_settings())

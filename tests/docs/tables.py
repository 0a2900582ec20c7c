"""The tables of the documentation that are made from the source.

``python -m tests.docs.tables`` prints them as they have to stand in docs/operations.md.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from headrace.model import SubscriptionSettings, TopicSettings
from headrace.settings import SETTINGS

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


if __name__ == "__main__":
    print(server_settings())

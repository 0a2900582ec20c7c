"""docs/http.md: every route is there, and nothing that is not."""

import re
from pathlib import Path

from headrace.server.server import ALL_ROUTES
from headrace.server.websocket import TYPES

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_every_route_is_described() -> None:
    """Whoever adds a route says so on the page."""
    missing = [f"{r.method} {r.path}" for r in ALL_ROUTES if f"{r.method} {r.path}" not in TEXT]
    assert missing == []


def test_nothing_is_described_that_is_not_there() -> None:
    """A route on the page is a route of the server."""
    known = {f"{route.method} {route.path}" for route in ALL_ROUTES}
    told = set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`?\s]*)`", TEXT))
    assert told - known == set()


def test_every_websocket_command_is_described() -> None:
    """The table of commands is the table of handlers."""
    rows = "".join(line for line in TEXT.splitlines() if line.startswith("| `"))
    assert [name for name in TYPES if f"`{name}`" not in rows] == []

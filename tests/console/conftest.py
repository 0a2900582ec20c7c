"""One browser and one shop for the tests of the console."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import RunningServer, running_server
from tests.console.browser import Browser, browser, missing
from tests.console.shop import shop


@pytest.fixture(scope="session")
def look(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real Chromium. Where there is none, the tests say so."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with browser(Path(tmp_path_factory.mktemp("profile"))) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    """Of the shop that the pages show."""
    with shop(server) as found:
        yield found


@pytest.fixture
def page(look: Browser, server: RunningServer, client: Any) -> Iterator[Browser]:
    """The console, opened; at the end the browser has complained about nothing."""
    look.errors()
    host, port = server.http_address
    look.open(f"http://{host}:{port}")
    look.find("main h1")
    yield look
    assert look.errors() == []

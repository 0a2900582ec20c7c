"""Every test of the contract runs once over each front end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.clients import AsyncioClient, ThreadClient
from tests.contract.embedded import EmbeddedAsyncBroker, EmbeddedBroker
from tests.contract.front_end import ABILITIES, FrontEnd, Session
from tests.contract.over_http import HttpInterface
from tests.contract.over_websocket import WebSocketInterface
from tests.contract.raw_binary import BinaryProtocol
from tests.contract.raw_text import TextProtocol

FRONT_ENDS: list[type[FrontEnd]] = [
    EmbeddedBroker,
    EmbeddedAsyncBroker,
    TextProtocol,
    BinaryProtocol,
    ThreadClient,
    AsyncioClient,
    HttpInterface,
    WebSocketInterface,
]


@pytest.fixture(params=FRONT_ENDS, ids=lambda front: front.name)
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FrontEnd]:
    """A broker with one way to it. ``@pytest.mark.needs`` skips those that lack something."""
    yield from opened(request, tmp_path)


def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FrontEnd]:
    kind: type[FrontEnd] = request.param
    for mark in request.node.iter_markers("needs"):
        for ability in mark.args:
            assert ability in ABILITIES
            if ability in kind.cannot:
                pytest.skip(f"{kind.name} cannot {ability}: {kind.cannot[ability]}")
    made = kind(tmp_path / "data")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def session(front: FrontEnd) -> Session:
    """One user of the broker."""
    return front.open()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): what a front end must be able to do")

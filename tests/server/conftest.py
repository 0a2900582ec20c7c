"""Servers for the tests of this room."""

from collections.abc import Iterator

import pytest

from headrace.testing import RunningServer, running_server
from tests.contract.raw_binary import FrameSocket
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Http, RawHttp


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A server in memory: most of what is tested here does not touch the disk."""
    with running_server(memory=True) as running:
        yield running


@pytest.fixture
def text(server: RunningServer) -> Iterator[TextSocket]:
    """A connection that speaks text."""
    connection = TextSocket(server.address)
    yield connection
    connection.close()


@pytest.fixture
def frames(server: RunningServer) -> Iterator[FrameSocket]:
    """A connection that speaks frames."""
    connection = FrameSocket(server.address)
    yield connection
    connection.close()


@pytest.fixture
def http(server: RunningServer) -> Iterator[Http]:
    """A kept connection that speaks HTTP."""
    connection = Http(server.http_address)
    yield connection
    connection.close()


@pytest.fixture
def raw(server: RunningServer) -> Iterator[RawHttp]:
    """A bare socket to the HTTP port."""
    with RawHttp(server.http_address) as connection:
        yield connection

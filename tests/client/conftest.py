"""Servers and clients for the tests of this room."""

from collections.abc import Iterator

import pytest

from headrace import BrokerClient
from headrace.testing import RunningServer, running_server


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A server with a directory of its own."""
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    """A client that is connected to it."""
    with server.client(request_timeout=10) as connected:
        yield connected

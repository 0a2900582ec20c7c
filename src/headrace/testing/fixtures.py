"""Brokers for the tests of your own program, as pytest fixtures.

In the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["headrace.testing.fixtures"]

or on the command line, ``pytest -p headrace.testing.fixtures``. Then each test that names a fixture gets
a new one::

    def test_an_order_is_paid(headrace_broker):
        headrace_broker.publish("orders", b"one")
        ...

    def test_over_the_network(headrace_server):
        with headrace_server.client() as client:
            client.publish("orders", b"one")
        headrace_server.restart()
        ...

=================== ==================================================================================
fixture             description
=================== ==================================================================================
``headrace_broker`` an embedded ``Broker`` that keeps everything in memory
``headrace_server`` a ``RunningServer`` on a free port of this machine, with a directory that is removed
                    afterwards; ``.address``, ``.client()``, ``.stop()``, ``.kill()``, ``.restart()``
=================== ==================================================================================

For other settings use ``running_server(...)`` and ``server_process(...)`` of ``headrace.testing``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.broker.embedded import Broker
from headrace.testing.servers import RunningServer, running_server


@pytest.fixture
def headrace_broker() -> Iterator[Broker]:
    """An embedded broker in memory."""
    with Broker.open() as broker:
        yield broker


@pytest.fixture
def headrace_server() -> Iterator[RunningServer]:
    """A server in a thread of this process, on a free port, with a directory of its own."""
    with running_server() as server:
        yield server

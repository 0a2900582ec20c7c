"""One Spark session for all tests of this room, and a broker for those who want one.

Starting a session takes seconds, so there is one: every test that asks for ``spark`` carries the mark
``xdist_group("spark")``, and runs in the one worker that has it.
"""

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from headrace import BrokerClient
from headrace.testing import RunningServer, running_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark 4.0 leaves the sockets to its own JVM to the garbage collector."""
    if version("pyspark").startswith("4.0."):
        leak = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
        for item in items:
            item.add_marker(pytest.mark.filterwarnings(leak))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The session of ``headrace.spark``, made small; a task may fail three times before its job does."""
    from headrace.spark import session

    home = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.driver.memory": "1g",
        "spark.sql.python.filterPushdown.enabled": "false",  # as it is for who makes a session himself
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home / "local"),
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    }
    found = session("headrace-tests", "local[2,4]", log_level="ERROR", **settings)
    yield found
    found.stop()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A broker with a directory of its own."""
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    """A client that is connected to it."""
    with server.client(request_timeout=10) as connected:
        yield connected

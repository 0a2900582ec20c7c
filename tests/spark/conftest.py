"""One Spark session for all tests of this room, and a broker for those who want one.

Starting a session takes seconds, so there is one: every test that asks for ``spark`` carries the mark
``xdist_group("spark")``, and runs in the one worker that has it.
"""

import os
import sys
from collections.abc import Iterator

import pytest

from headrace import BrokerClient
from headrace.testing import RunningServer, running_server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A small session on this machine; a task may fail three times before its job does."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home / "local"),
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2,4]").appName("headrace-tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


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

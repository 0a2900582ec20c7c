"""What every test may use, and how random ones are run.

``make test`` tries the same examples each time, so that what fails there is what was changed.
``HYPOTHESIS_PROFILE=explore`` tries others, more of them, and prints what reproduces a failure
(``@reproduce_failure``, the smallest example); ``=thorough`` is for a night.
"""

import functools
import gc
import inspect
import os
from collections.abc import Callable, Iterator

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from headrace.server.server import collect_seldom
from headrace.testing import RunningServer
from tests.fakes.steady import Steadiness
from tests.fixtures.java import use_archive
from tests.fixtures.kafka import (  # noqa: F401
    _node,
    _secured,
    cluster,
    kafka,
    kafka_node,
    secured_kafka,
)
from tests.fixtures.s3 import s3, s3_proxy, s3_server  # noqa: F401
from tests.fixtures.three_nodes import _three_nodes, three_nodes  # noqa: F401

_COMMON = settings(
    deadline=None,  # a slow machine is not a bug
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("default", _COMMON, max_examples=60, derandomize=True)
settings.register_profile("explore", _COMMON, max_examples=200)
settings.register_profile("thorough", _COMMON, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
GROUPS = ("spark", "kafka", "browser")
use_archive()
# Typer builds all commands anew for each one that is run, and a worker runs a thousand.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture
def steady() -> Iterator[Callable[[RunningServer], None]]:
    """``steady(server)``: the test fails if something keeps the server's loop for too long."""
    steadiness = Steadiness()
    usual = gc.get_threshold()
    collect_seldom()  # as a server does: else the collector walks over everything that pytest has loaded
    yield steadiness.watch
    gc.unfreeze()
    gc.set_threshold(*usual)
    steadiness.check()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that trace memory never share a worker with Kafka.

    Nodes that run there have threads that allocate without the GIL (libuv, librdkafka), and the end of a trace may
    crash the process then (CPython before 3.13.2).
    """
    function = inspect.unwrap(getattr(item, "function", pytest_itemcollected))
    if "tracemalloc" in function.__globals__:
        item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, tests that share a Spark, a Kafka or a browser run in one of them."""
    if getattr(config.option, "loadgroup", False):
        for item in items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                pytest.exit("pytest-xdist does not see groups with this version of pytest", 4)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """The longest groups begin first, each in a worker of its own; else the last worker would be alone with one."""
    group = item.get_closest_marker("xdist_group")
    return GROUPS.index(group.args[0]) if group and group.args[0] in GROUPS else len(GROUPS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was not tried, because a program is missing that the tests could not get."""
    reasons = [str(r.longrepr[-1]) for r in terminalreporter.stats.get("skipped", [])]
    for reason in sorted({r[r.index("NOT TRIED") :] for r in reasons if "NOT TRIED" in r}):
        terminalreporter.write_line(reason, red=True, bold=True)

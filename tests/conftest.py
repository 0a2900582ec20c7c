"""What every test may use, and how random ones are run.

``make test`` tries the same examples each time, so that what fails there is what was changed.
``HYPOTHESIS_PROFILE=explore`` tries others, more of them, and prints what reproduces a failure
(``@reproduce_failure``, the smallest example); ``=thorough`` is for a night.
"""

import functools
import gc
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

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
GROUPS = {
    "spark": ("spark",),
    "kafka": ("_three_nodes", "secured_kafka", "kafka", "_node", "_secured"),
    "spark elsewhere": ("spark",),
    "browser": ("look",),
}
"""Tests that run in one worker, the longest group first, and the fixtures that end with the group."""
ROOM_OF_SPARK = Path(__file__).parent / "spark"
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
    crash the process then (CPython before 3.13.2). Tests with Spark that are not in its room have a session of
    their own, in another worker: with one for all, they would be half of the whole run.
    """
    function = inspect.unwrap(getattr(item, "function", pytest_itemcollected))
    if "tracemalloc" in function.__globals__:
        item.add_marker(pytest.mark.xdist_group("browser"))
    if _group(item) == "spark" and ROOM_OF_SPARK not in item.path.parents:
        item.add_marker(pytest.mark.xdist_group("spark elsewhere"), append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, tests that share a Spark, a Kafka or a browser run in one of them."""
    if getattr(config.option, "loadgroup", False):
        for item in items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                pytest.exit("pytest-xdist does not see groups with this version of pytest", 4)
    items.sort(key=_turn)


def _group(item: pytest.Item) -> str:
    found = item.get_closest_marker("xdist_group")
    return str(found.args[0]) if found else ""


def _turn(item: pytest.Item) -> int:
    """The longest groups begin first, each in a worker of its own; else the last worker would be alone with one."""
    order = list(GROUPS)
    return order.index(_group(item)) if _group(item) in GROUPS else len(order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """What a group shares ends with it. Three nodes of a cluster that nobody needs any more take a third of a worker's
    time."""
    yield
    if nextitem is not None and _group(nextitem) != _group(item):
        for name in GROUPS.get(_group(item), ()):
            for fixture in item.session._fixturemanager._arg2fixturedefs.get(name, ()):
                fixture.finish(item._request)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was not tried, because a program is missing that the tests could not get."""
    reasons = [str(r.longrepr[-1]) for r in terminalreporter.stats.get("skipped", [])]
    for reason in sorted({r[r.index("NOT TRIED") :] for r in reasons if "NOT TRIED" in r}):
        terminalreporter.write_line(reason, red=True, bold=True)

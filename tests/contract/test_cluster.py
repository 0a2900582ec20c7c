"""The contract over three nodes of one cluster, with a real Kafka: every session is at a node that is chosen at random.

``make test`` runs one front end, ``make slow`` the others.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import (
    clients,
    conftest,
    test_jobs,
    test_publishing,
    test_settling,
    test_subscribing,
)
from tests.contract.clients import ServerFrontEnd, ThreadClient
from tests.contract.front_end import FrontEnd
from tests.fixtures.three_nodes import ThreeNodes

QUICK = ThreadClient

globals().update(
    {
        f"{name}__{module.__name__.rpartition('.test_')[2]}": mark(test)
        for module, mark in (
            (test_publishing, lambda test: test),
            (test_settling, lambda test: test),
            (test_subscribing, lambda test: test),
            (test_jobs, lambda test: pytest.mark.slow(test_jobs.pytestmark(test))),
        )
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
)
pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture(
    params=[
        pytest.param(front, marks=[] if front is QUICK else pytest.mark.slow, id=front.name)
        for front in conftest.FRONT_ENDS
        if issubclass(front, ServerFrontEnd)
    ]
)
def front(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FrontEnd]:
    with contextlib.ExitStack() as stack:
        if request.function.__module__ == test_jobs.__name__:
            # Commits have names that a cluster keeps: these tests have one of their own each.
            nodes = stack.enter_context(contextlib.closing(ThreeNodes(kafka, tmp_path / "nodes")))
        else:
            nodes = request.getfixturevalue("three_nodes")
        monkeypatch.setattr(clients, "running_server", lambda _: contextlib.nullcontext(nodes))
        yield from conftest.opened(request, tmp_path)

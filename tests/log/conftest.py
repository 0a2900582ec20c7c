"""Fixtures of this room."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """Where thousands of failures are provoked, their tracebacks are not what one wants to read."""
    logger = logging.getLogger("headrace.log")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)

"""Segments that are rewritten at every opportunity, however small they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace import limits

_LIMITS = {"REWRITE_BATCHES_MIN": 2, "REWRITE_GAIN_MIN": 1, "REWRITE_PIECE_BYTES": 1024}


@contextmanager
def eager_rewriting() -> Iterator[None]:
    """Rewrite segments of a few batches, in many steps."""
    before = {name: getattr(limits, name) for name in _LIMITS}
    try:
        for name, value in _LIMITS.items():
            setattr(limits, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(limits, name, value)

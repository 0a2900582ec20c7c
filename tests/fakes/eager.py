"""Segments and journals that are rewritten at every opportunity, however small they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace import limits
from headrace.log import journal

_VALUES = (
    (limits, "REWRITE_BATCHES_MIN", 2),
    (limits, "REWRITE_GAIN_MIN", 1),
    (limits, "REWRITE_PIECE_BYTES", 1024),
    (limits, "JOURNAL_REWRITE_BYTES_MIN", 512),
    (journal, "RESERVE_BYTES", 4096),
)
"""With less room in reserve, a simulated power cut has fewer sectors to choose from."""


@contextmanager
def eager_rewriting() -> Iterator[None]:
    """Rewrite segments of a few batches, in many steps, and the journal when it has a few entries."""
    before = [(module, name, getattr(module, name)) for module, name, _ in _VALUES]
    try:
        for module, name, value in _VALUES:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)

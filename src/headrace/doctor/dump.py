"""Lists the batches of one segment file for a person to read.

Works on any file of batches: a segment, and also the files that recovery and repair keep beside it
(``.torn-<n>``, ``.damaged-<n>``), whatever offset they begin at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InvalidArgument, NotFound
from headrace.files import Files, Handle
from headrace.log import batch as layout
from headrace.log.batch import HEADER_BYTES, Batch, parse, parse_header
from headrace.log.segment import Damage, scan

FLAG_WORDS = {
    layout.HAS_KEYS: "keys",
    layout.HAS_HEADERS: "headers",
    layout.HAS_TIMES: "times",
    layout.HAS_IDS: "ids",
    layout.HAS_EXPIRY: "expiry",
    layout.HAS_TARGETS: "targets",
    layout.ZSTD: "zstd",
    layout.LOST: "lost",
    layout.STAGED: "staged",
    layout.AFTER_SYNC: "after_sync",
}


@dataclass(frozen=True, slots=True)
class DumpedBatch:
    """A batch, or bytes that are not one. Its header's fields are None if no header can be read."""

    position: int
    bytes: int
    state: str
    """``whole``; ``body_damaged`` (only the header is valid), ``misplaced`` (valid, but its offset
    does not belong there), ``damaged``, or ``zeros``: space that was reserved and never written."""
    first: int | None = None
    end: int | None = None
    count: int | None = None
    flags: tuple[str, ...] = ()
    base_timestamp: int | None = None
    max_timestamp: int | None = None
    producer_id: int | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None


def flag_words(flags: int) -> tuple[str, ...]:
    words = [word for flag, word in FLAG_WORDS.items() if flags & flag]
    unknown = flags & ~sum(FLAG_WORDS)
    return (*words, f"unknown {unknown:#06x}") if unknown else tuple(words)


def dump(path: Path, files: Files | None = None) -> Iterator[DumpedBatch]:
    """Everything in the file, in order. A broker may be writing it meanwhile."""
    files = files or Files()
    if not files.exists(path):
        raise NotFound(f"file {path} does not exist", code="file_not_found")
    if files.is_directory(path):
        raise InvalidArgument(
            f"{path} is a directory; name a segment, for example "
            f"{path / 'orders' / '0' / '00000000000000000000.log'}",
            code="not_a_segment",
        )
    handle = files.open(path)
    try:
        head = parse_header(files.read_at(handle, 0, HEADER_BYTES))
        if head is None and not re.search(r"\.(log|torn-\d+)($|\.)", path.name):
            raise InvalidArgument(
                f"{path} is no file of batches: it does not begin with one and is not named like "
                "a segment",
                code="not_a_segment",
            )
        digits = re.match(r"\d{20}(?=\.log)", path.name)
        base = head[0].base_offset if head else int(digits.group()) if digits else 0
        for part in scan(files, handle, files.size(handle), base_offset=base):
            if isinstance(part, Damage):
                yield from _damage(files, handle, part)
            else:
                yield _piece(part.position, part.size, "whole", part.batch)
    finally:
        handle.close()


def _piece(position: int, size: int, state: str, batch: Batch) -> DumpedBatch:
    return DumpedBatch(
        position,
        size,
        state,
        batch.base_offset,
        batch.end_offset,
        batch.count,
        flag_words(batch.flags),
        batch.base_timestamp,
        batch.max_timestamp,
        batch.producer_id,
        batch.producer_epoch,
        batch.first_sequence,
    )


def _damage(files: Files, handle: Handle, part: Damage) -> Iterator[DumpedBatch]:
    start = part.position
    head = None if part.zeros else parse_header(files.read_at(handle, start, HEADER_BYTES))
    if head is not None:
        batch, body_len = head
        whole = parse(files.read_at(handle, start, HEADER_BYTES + body_len)) is not None
        size = min(HEADER_BYTES + body_len, part.end - start)
        yield _piece(start, size, "misplaced" if whole else "body_damaged", batch)
        start += size
    if start < part.end:
        rest = files.read_at(handle, start, part.end - start)
        yield DumpedBatch(start, len(rest), "damaged" if rest.strip(b"\0") else "zeros")

"""Looking through a topic for a text, a key, a header or a JSON path, a stretch at a time.

::

    search(cursor) ──▶ batches of 256 KiB, at most STRETCH_BYTES or STRETCH_S ──▶ places found, next cursor, messages left

A caller asks again with the next cursor: so it can show its progress and stop, and the broker holds nothing between
two requests.

Rules:
- A whole batch is rejected by one look at its bytes, without decoding it; only batches that may hold a match are
  looked at message by message. Ten million messages of a hundred bytes are a gigabyte, and a few seconds.
- Between two batches, and in a large one that may match, others have their turn (``pace.py``). What a request reads counts against ``memory_limit``.
- The log's cache is not used: a search would drop from it what consumers are about to read.
- Records that a repair has given up are passed over.
- The answer has places, not messages: it stays small, and reading a message asks for the right again.

A text is compared without regard to ASCII case and white space: JSON is found however it was indented.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.batch import LOST
from headrace.log.interface import completed
from headrace.operations import exact_json
from headrace.operations.watching import FoundMessage, SearchPage
from headrace.paging import cursor_text

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.topic import Topic
    from headrace.log.batch import Batch

READ_BYTES = 256 << 10
PIECE, PIECE_BYTES = 256, 64 << 10
"""Messages of a batch that are looked at between two looks at the clock: a batch may hold 50,000 documents."""
STRETCH_BYTES = 64 << 20
STRETCH_S = 0.5
"""A request ends after either, at the next batch."""
_SPACE = b" \t\r\n\v\f"
_LOWER = bytes(byte + 32 if 65 <= byte <= 90 else byte for byte in range(256))

_ONE_SPELLING = re.compile(r"-?[0-9]+|[A-Za-z_@ ][\w@ :-]*", re.ASCII)
"""A whole number, or a text without signs that JSON may escape and that is no number such as 1.50."""

_INDEX = re.compile(r"[0-9]{1,9}")
_ESCAPE = b"\\u"


class Finder(NamedTuple):
    is_in: Callable[[Batch], bool]
    """Whether a batch may have a match, by one look at its bytes."""
    among: Callable[[Batch, int, int], list[int]]
    """The indexes of a batch, from one up to another, that match."""


def finder(kind: str, wanted: str) -> Finder:
    if kind == "key":
        key = _key(wanted)
        return Finder(lambda batch: key in batch.plain(), partial(_by_key, key))
    if kind == "header":
        name, equals, part = wanted.partition("=")
        name, part = name.strip(), part.strip() if equals else ""
        return Finder(lambda batch: name.encode() in batch.plain(), partial(_by_header, name, part))
    if kind == "json":
        return _json_finder(wanted)
    plain = wanted.encode().translate(_LOWER, _SPACE)
    if not plain:
        raise _invalid("a text to search for has more than white space")
    return Finder(partial(_has_text, plain), partial(_by_text, plain))


def _key(wanted: str) -> bytes:
    """A text, or ``base64:…`` for bytes that are none."""
    prefix, colon, rest = wanted.partition(":")
    if prefix != "base64" or not colon:
        return wanted.encode()
    try:
        return base64.b64decode(rest, validate=True)
    except ValueError:
        raise _invalid("a key after base64: is base64") from None


def _has_text(plain: bytes, batch: Batch) -> bool:
    return plain in batch.plain().translate(_LOWER, _SPACE)


def _by_text(plain: bytes, batch: Batch, low: int, high: int) -> list[int]:
    found = {
        index
        for index, value in enumerate(batch.values(low, high), low)
        if plain in value.translate(_LOWER, _SPACE)
    }
    found |= {
        index
        for index, key in enumerate(batch.keys(low, high) or (), low)
        if key is not None and plain in key.translate(_LOWER, _SPACE)
    }
    return sorted(found)


def _by_key(wanted: bytes, batch: Batch, low: int, high: int) -> list[int]:
    keys = batch.keys(low, high) or ()
    return [index for index, key in enumerate(keys, low) if key == wanted]


def _by_header(name: str, part: str, batch: Batch, low: int, high: int) -> list[int]:
    return [
        index
        for index, headers in enumerate(batch.headers(low, high) or (), low)
        if headers and name in headers and part in headers[name]
    ]


def _json_finder(wanted: str) -> Finder:
    place, equals, text = wanted.partition("=")
    words = place.strip().removeprefix("$").removeprefix(".").replace("[", ".").replace("]", "")
    path = words.split(".")
    if not all(path):
        raise _invalid("a JSON path is such as customer.id or items.0.price=12")
    # What must stand in a message as it is, unless it is escaped: names, and a value that has one spelling only.
    needed = [
        word.encode() for word in path if _ONE_SPELLING.fullmatch(word) and not word.isdigit()
    ]
    text = text.strip()
    if equals and _ONE_SPELLING.fullmatch(text):
        needed.append(text.encode())
    value = text if equals else None
    return Finder(partial(_has_words, needed), partial(_by_path, path, needed, value))


def _has_words(needed: list[bytes], batch: Batch) -> bool:
    plain = batch.plain()
    if all(word in plain for word in needed):
        return True
    first = (4 * (batch.count + 1) + 7) & ~7  # after the offsets of the values, which are no text
    return plain.find(_ESCAPE, first, first + batch.value_bytes(0, batch.count)) >= 0


def _by_path(
    path: list[str], needed: list[bytes], text: str | None, batch: Batch, low: int, high: int
) -> list[int]:
    found = []
    for index, value in enumerate(batch.values(low, high), low):
        if all(word in value for word in needed) or _ESCAPE in value:
            try:
                document = exact_json.loads(value)
            except HeadraceError:  # not JSON
                continue
            if _at(document, path, text):
                found.append(index)
    return found


def _at(value: Any, path: list[str], text: str | None) -> bool:
    for word in path:
        if isinstance(value, dict) and word in value:
            value = value[word]
        elif isinstance(value, list) and _INDEX.fullmatch(word) and int(word) < len(value):
            value = value[int(word)]
        else:
            return False
    if text is None:
        return True
    if isinstance(value, str):
        return value in (text, text.removeprefix('"').removesuffix('"'))
    return exact_json.dumps(value) == text.encode()


async def search(
    engine: Engine, topic: Topic, finds: Finder, range_: Mapping[int, tuple[int, int]], limit: int
) -> SearchPage:
    """Look through a stretch of a range: partition -> (from this offset, up to that one)."""
    pace = engine.pace
    positions = {number: first for number, (first, _) in range_.items()}
    found: list[FoundMessage] = []
    scanned = read_bytes = 0
    end, deadline = pace.seconds() + STRETCH_S, pace.deadline()
    engine.budget.take(READ_BYTES)
    try:
        for number, (at, last) in range_.items():
            log = topic.partitions[number].log
            at, last = max(at, log.start_offset), min(last, log.end_offset)
            while at < last and len(found) < limit:
                if read_bytes >= STRETCH_BYTES or pace.is_past(end):
                    break
                for batch in await completed(partial(log.read, at, READ_BYTES)):
                    low, stop = at - batch.base_offset, min(last - batch.base_offset, batch.count)
                    matches: list[int] = []
                    if batch.flags & LOST or not finds.is_in(batch):
                        low = stop
                    while low < stop and len(found) + len(matches) < limit:
                        high = batch.fitting(low, min(low + PIECE, stop), PIECE_BYTES)
                        matches += finds.among(batch, low, high)
                        low = high
                        if pace.is_past(deadline):
                            await pace.turn()
                            deadline = pace.deadline()
                    matches = matches[: limit - len(found)]
                    found += [
                        {"partition": number, "offset": batch.base_offset + each}
                        for each in matches
                    ]
                    full = len(found) >= limit
                    after = batch.base_offset + matches[-1] + 1 if full else batch.end_offset
                    after = min(after, last)
                    scanned += after - at
                    at = after
                    read_bytes += batch.stored_bytes
                    if pace.is_past(deadline):
                        await pace.turn()
                        deadline = pace.deadline()
                    if full or at >= last:
                        break
            positions[number] = at
    finally:
        engine.budget.give(READ_BYTES)
    left = sum(max(range_[number][1] - at, 0) for number, at in positions.items())
    return {"found": found, "next": cursor_text(positions), "scanned": scanned, "left": left}


def _invalid(text: str) -> InvalidArgument:
    return InvalidArgument(text, code="invalid_search")

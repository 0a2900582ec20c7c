"""Checks the headers of a batch from outside, as columns: a batch may have hundreds of thousands.

The rules are those of ``model.check_headers``. Each is checked on a whole column: if all names together are
printable, each is. A text that is valid UTF-8 as a whole is valid item by item if no item begins inside of a
character. Nothing is decoded into a dict here, and the number of headers is bounded before any work that
grows with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, lt, sub

from headrace import limits
from headrace.errors import DataCorrupt, InvalidArgument, TooLarge


def check_count(total: int, most: int) -> None:
    """Of all messages of a batch together."""
    if total > most:
        raise TooLarge(
            f"a batch has at most {most} headers, this one {total}: send fewer messages in one batch",
            code="headers_too_large",
        )


def check_texts(
    plain: bytes, lists: Sequence[int], names_start: int, texts_start: int, total: int
) -> None:
    """Check names and texts; the offsets of both columns have been checked, and ``lists`` says where the
    headers of each message begin."""
    names, name_bytes = _column(plain, names_start, total)
    texts, text_bytes = _column(plain, texts_start, total)
    if not all(map(lt, names, names[1:])):
        raise InvalidArgument("the name of a header is empty", code="invalid_headers")
    joined = _decoded(name_bytes, names)
    if not joined.isprintable() or "=" in joined:
        raise InvalidArgument(
            "the name of a header has '=' or characters that cannot be printed",
            code="invalid_headers",
        )
    _decoded(text_bytes, texts)
    if b"\0" in text_bytes or b"\r" in text_bytes or b"\n" in text_bytes:
        raise InvalidArgument(
            "a header has a NUL or a line end in its value; put such data in the body",
            code="invalid_headers",
        )
    most = limits.HEADER_BYTES_MAX
    if len(name_bytes) + len(text_bytes) > most:
        begins = list(map(add, map(names.__getitem__, lists), map(texts.__getitem__, lists)))
        largest = max(map(sub, begins[1:], begins))
        if largest > most:
            raise TooLarge(
                f"the headers of a message have {largest} bytes, the limit is {most}",
                code="headers_too_large",
            )


def _column(plain: bytes, start: int, count: int) -> tuple[list[int], bytes]:
    """The offsets and the data of a binary column."""
    size = 4 * (count + 1)
    offsets = memoryview(plain)[start : start + size].cast("i").tolist()
    base = start + size + (-size & 7)
    return offsets, plain[base : base + offsets[-1]]


def _decoded(data: bytes, offsets: list[int]) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _not_text() from None
    if not data.isascii() and any(data[at] & 0xC0 == 0x80 for at in offsets if at < len(data)):
        raise _not_text()
    return text


def _not_text() -> DataCorrupt:
    return DataCorrupt("a header is not UTF-8 text", code="invalid_batch")

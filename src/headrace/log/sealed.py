"""Small JSON documents with a checksum: a flipped bit is found, and never taken for another value.

The checksum is the crc32c of the document without it, as compact JSON with sorted names. So a person may
read the file, and the layout does not count.
"""

from __future__ import annotations

from typing import Any

import orjson

from headrace.errors import DataCorrupt
from headrace.log.batch import crc32c

CHECKSUM = "checksum"


def seal(document: dict[str, Any]) -> bytes:
    """The document as JSON for people, with its checksum."""
    whole = {**document, CHECKSUM: _checksum(document)}
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)


def unseal(raw: bytes, unsealed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The document. :class:`DataCorrupt` if its checksum is wrong.

    ``unsealed``: the names in a document of an old version, which had no checksum. A document without a
    checksum is accepted if it has exactly these names.
    """
    try:
        document = orjson.loads(raw)
    except ValueError as error:
        raise DataCorrupt(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise DataCorrupt("it is not a JSON object")
    checksum = document.pop(CHECKSUM, None)
    if checksum is None and document.keys() == unsealed:
        return document
    if checksum != _checksum(document):
        raise DataCorrupt("its checksum is wrong")
    return document


def _checksum(document: dict[str, Any]) -> str:
    return f"{crc32c(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)):08x}"

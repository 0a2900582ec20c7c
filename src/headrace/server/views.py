"""Messages in the shape of ``operations/views.py``, encoded for HTTP, WebSocket and event streams.

Ids, times and headers are put together by hand around the untouched value: a message that fans out is
encoded once (:class:`Views`).
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from headrace.broker.delivery import Delivery
from headrace.broker.pace import Pace
from headrace.budget import Budget, Share
from headrace.contents import TOMBSTONE_HEADER, TOMBSTONE_TEXT, check_key
from headrace.errors import InvalidArgument
from headrace.model import Message, Receipt, topic_hash
from headrace.operations import exact_json
from headrace.operations.views import CONTENT_TYPE, is_json_type, iso, message_view, receipt_view
from headrace.server.operations import ANSWER_COPIES

AT_ONCE = 100
"""Messages that are encoded in one turn of the loop: a millisecond or two, if they are small."""


def value_of(data: Any, encoding: object, headers: Mapping[str, str]) -> bytes:
    """The other way round: what is shown as ``data`` can be published again."""
    if data is None and headers.get(TOMBSTONE_HEADER) == TOMBSTONE_TEXT:
        return b""
    if encoding == "base64":
        try:
            return base64.b64decode(data if isinstance(data, str) else "?", validate=True)
        except ValueError:
            raise InvalidArgument("data is not base64", code="invalid_value") from None
    if encoding is not None:
        raise InvalidArgument("encoding is 'base64', or is left out", code="invalid_value")
    if isinstance(data, str) and not is_json_type(headers.get(CONTENT_TYPE)):
        return data.encode()
    return exact_json.dumps(data)


def key_of(text: str) -> bytes:
    """A key that is no text, as base64."""
    try:
        return check_key(base64.b64decode(text, validate=True))
    except ValueError:
        raise InvalidArgument("key64 is not base64", code="invalid_key") from None


def receipt_json(receipt: Receipt) -> bytes:
    """The JSON of a receipt. That of a message that was just stored is put together by hand, because
    it is made for each publish."""
    offset = receipt.offset
    if offset is None or receipt.duplicate or receipt._id is not None:
        return orjson.dumps(receipt_view(receipt))
    head, middle = _receipt_parts(receipt.topic, receipt.partition)
    high, low = 0x8000 | offset >> 48, offset & 0xFFFF_FFFF_FFFF
    return b"%b%04x-%012x%b%d%b" % (
        head,
        high,
        low,
        middle,
        offset,
        _receipt_end(receipt.timestamp),
    )


@lru_cache(maxsize=4096)
def _receipt_parts(topic: str, partition: int) -> tuple[bytes, bytes]:
    """Up to the part of the id that is the offset, and between the id and the offset."""
    text = f"{topic_hash(topic):012x}"
    head = f'{{"id":"{text[:8]}-{text[8:]}-{0x8000 | partition:04x}-'
    return head.encode(), f'","topic":"{topic}","partition":{partition},"offset":'.encode()


@lru_cache(maxsize=64)
def _receipt_end(timestamp: int) -> bytes:
    return f',"timestamp":"{iso(timestamp)}"}}'.encode()


async def delivery_array(
    deliveries: Sequence[Delivery], pace: Pace, held: Share, *, settle: bool = True
) -> list[bytes]:
    """The JSON of each message. Others have their turn in between: there may be ten thousand. It counts as
    ``held``, also what it takes to make one answer of it."""
    found: list[bytes] = []
    for delivery in deliveries:
        lease = delivery.lease if settle else None
        for part in delivery.parts(AT_ONCE):
            if found:
                await pace.turn()
            async for message in pace.each(part.messages()):
                token = None if lease is None else f"{lease.id}.{message.offset}"
                found.append(orjson.dumps(message_view(message, delivery=token)))
                held.take(ANSWER_COPIES * len(found[-1]))
    return found


async def message_array(messages: Sequence[Message], pace: Pace, held: Share) -> list[bytes]:
    """The same for messages that were read."""
    found: list[bytes] = []
    async for message in pace.each(messages):
        found.append(orjson.dumps(message_view(message)))
        held.take(ANSWER_COPIES * len(found[-1]))
    return found


def json_array(items: Sequence[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)


class Views:
    """Encoded once for many: the bytes of the pieces that were delivered last."""

    KEPT_BYTES_MAX = 16 << 20

    def __init__(self, encode: Callable[[Message], bytes], budget: Budget):
        self._encode = encode
        self._kept: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()
        self._share = Share(budget)

    def of(self, delivery: Delivery) -> bytes:
        """The delivery's messages, encoded one after the other. Not for leased ones."""
        batch, indexes = delivery.batch, delivery.indexes
        # The batch itself would be kept in memory by a reference to it; these tell it as well.
        stamp = (batch.base_offset, batch.base_timestamp, batch.body_crc)
        places = indexes if isinstance(indexes, range) else tuple(indexes)
        key = (delivery.topic, delivery.partition, stamp, places)
        data = self._kept.get(key)
        if data is not None:
            self._kept.move_to_end(key)
            return data
        data = b"".join([self._encode(message) for message in delivery.messages()])
        self._kept[key] = data
        self._share.add(len(data) + _KEPT_OVERHEAD)
        while self._share.size > self.KEPT_BYTES_MAX:
            _, gone = self._kept.popitem(last=False)
            self._share.add(-len(gone) - _KEPT_OVERHEAD)
        return data


_KEPT_OVERHEAD = 600
"""The key and the place of one piece that is kept."""

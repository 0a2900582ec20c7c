"""The bytes of what lies in a Kafka partition: a key that the rule needs, and a value.

Key: ``u32 magic "HRK1", u32 crc32c of the rest, u8 kind, u64 epoch``, then

    C  claim       the node's name, UTF-8
    S  stretch     u64 first offset, u32 records
    K  checkpoint  u64 first offset, u64 number, u32 part, u32 parts, the name of the node, UTF-8

The value of a stretch is one commit: columnar batches as on disk, one after the other (``log/batch.py``), or, in a
journal, framed entries (``log/journal.py``). So a commit is valid as a whole or not at all. Kafka's own checksums
cover the value, and each batch has its own.

Rejected: one Kafka record for each columnar batch. A large publish is several batches, and a claim between two of
them would store half of it.
"""

from __future__ import annotations

import struct

from headrace.engine.kafka.rule import Checkpoint, Claim, Entry, Stretch
from headrace.log.batch import Batch, crc32c, parse

MAGIC = 0x314B5248  # "HRK1"
_PREFIX = struct.Struct("<II")
_HEAD = struct.Struct("<BQ")
_STRETCH = struct.Struct("<QI")
_CHECKPOINT = struct.Struct("<QQII")
_C, _S, _K = b"CSK"


def key_of(entry: Entry, node: str = "") -> bytes:
    """``node`` owns the partition; a reader that begins at a checkpoint has not read its claim."""
    if isinstance(entry, Claim):
        rest = _HEAD.pack(_C, entry.epoch) + entry.node.encode()
    elif isinstance(entry, Stretch):
        rest = _HEAD.pack(_S, entry.epoch) + _STRETCH.pack(*entry[1:])
    else:
        rest = _HEAD.pack(_K, entry.epoch) + _CHECKPOINT.pack(*entry[1:]) + node.encode()
    return _PREFIX.pack(MAGIC, crc32c(rest)) + rest


def entry_of(key: bytes | None) -> Entry | None:
    """None: these bytes are not ours. Whoever reads them skips the record."""
    if key is None or len(key) < _PREFIX.size + _HEAD.size:
        return None
    magic, crc = _PREFIX.unpack_from(key)
    rest = key[_PREFIX.size :]
    if magic != MAGIC or crc32c(rest) != crc:
        return None
    kind, epoch = _HEAD.unpack_from(rest)
    more = rest[_HEAD.size :]
    if kind == _C:
        return Claim(epoch, more.decode(errors="replace"))
    if kind == _S and len(more) == _STRETCH.size:
        return Stretch(epoch, *_STRETCH.unpack(more))
    if kind == _K and len(more) >= _CHECKPOINT.size:
        return Checkpoint(epoch, *_CHECKPOINT.unpack_from(more))
    return None


def owner_in(key: bytes, entry: Checkpoint) -> str | None:
    """The node that wrote a checkpoint; None: an older version did."""
    at = _PREFIX.size + _HEAD.size + _CHECKPOINT.size
    return key[at:].decode(errors="replace") or None


def value_of(batches: list[Batch]) -> bytes:
    pieces: list[bytes] = []
    for batch in batches:
        pieces.append(batch.header())
        pieces.append(batch.body)
    return b"".join(pieces)


def batches_of(value: bytes) -> list[Batch]:
    """The batches of a stretch; ends early at one that fails its checksum."""
    found = []
    at = 0
    while at < len(value):
        batch = parse(value, at)
        if batch is None:
            break
        found.append(batch)
        at += batch.stored_bytes
    return found

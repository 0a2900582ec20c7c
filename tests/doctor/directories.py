"""Data directories for tests: written by the real partition log, then damaged by hand."""

from collections.abc import Sequence
from pathlib import Path

from headrace.files import Files
from headrace.log.batch import LOST, Batch
from headrace.log.sealed import seal
from headrace.log.segment import Found, log_name, scan
from tests.log.rig import Rig

DECADES_MS = 1 << 40
SETTINGS = seal({"name": "orders", "incarnation": 1, "created_ms": 0, "settings": {}})


def value(offset: int) -> bytes:
    """The value of the record at an offset, in every directory made here."""
    return b"record %08d " % offset * 4


def make_partition(
    files: Files, directory: Path, segments: Sequence[int], *, per_batch: int = 10
) -> None:
    """A partition; ``segments`` are the batches in each segment, and the last segment is active."""
    rig = Rig(files, directory)
    for batches in segments:
        rig.log.roll_if_old(rig.clock.now_ms() + DECADES_MS)
        for _ in range(batches):
            rig.loop.advance(1)
            publish(rig, per_batch)
    rig.close()
    files.replace(directory.parent / "topic.json", [SETTINGS])


def publish(rig: Rig, count: int) -> int:
    """Append ``count`` records, each with the value that belongs to its offset."""
    end = rig.log.end_offset
    entry = rig.publish(*map(value, range(end, end + count)))
    assert entry.error is None
    return entry.first_offset


def read_all(files: Files, directory: Path) -> tuple[set[int], set[int]]:
    """The offsets that can be read and those marked as lost, as a consumer finds them.

    Every value must be the one that belongs there, and no offset may be missing.
    """
    rig = Rig(files, directory)
    readable: set[int] = set()
    lost: set[int] = set()
    offset = rig.log.start_offset
    while offset < rig.log.end_offset:
        for batch in rig.log.read(offset):
            assert batch.base_offset == offset
            offsets = range(offset, batch.end_offset)
            if batch.flags & LOST:
                lost.update(offsets)
            else:
                assert batch.values() == list(map(value, offsets))
                readable.update(offsets)
            offset = batch.end_offset
    rig.close()
    return readable, lost


# --- damage -------------------------------------------------------------------------------------
def segment(directory: Path, base: int) -> Path:
    return directory / log_name(base)


def batches_of(files: Files, path: Path) -> list[Found]:
    """The valid batches of a segment, as they lie in the file."""
    handle = files.open(path)
    try:
        parts = list(scan(files, handle, files.size(handle), base_offset=int(path.name[:20])))
    finally:
        handle.close()
    return [part for part in parts if isinstance(part, Found)]


def change(files: Files, path: Path, position: int, content: bytes) -> None:
    """Overwrite some bytes of a file."""
    raw = bytearray(files.read_file(path))
    raw[position : position + len(content)] = content
    files.replace(path, [bytes(raw)])


def flip(files: Files, path: Path, position: int) -> None:
    """Flip one bit."""
    byte = files.read_file(path)[position]
    change(files, path, position, bytes([byte ^ 0x10]))


def flip_body(files: Files, path: Path, number: int) -> None:
    """Destroy the body of a segment's batch; its header stays valid."""
    flip(files, path, batches_of(files, path)[number].position + 80)


def flip_header(files: Files, path: Path, number: int) -> None:
    """Destroy the header of a segment's batch."""
    flip(files, path, batches_of(files, path)[number].position + 20)


def cut(files: Files, path: Path, size: int) -> None:
    """Shorten a file."""
    files.replace(path, [files.read_file(path)[:size]])


def write_batches(files: Files, path: Path, batches: Sequence[Batch]) -> None:
    """A segment made by hand."""
    files.replace(path, [batch.raw() for batch in batches])

"""Looking into one file of batches."""

from pathlib import Path

import pytest

from headrace.doctor.dump import dump, flag_words
from headrace.errors import InvalidArgument, NotFound
from headrace.log.batch import AFTER_SYNC, HAS_KEYS, LOST, ZSTD
from tests.doctor.directories import (
    batches_of,
    cut,
    flip_body,
    flip_header,
    make_partition,
    read_all,
    segment,
)
from tests.fakes import SimulatedFiles
from tests.log.rig import Rig

PARTITION = Path("data/orders/0")
PATH = segment(PARTITION, 50)


@pytest.fixture
def files() -> SimulatedFiles:
    """A disk with one partition of two segments, 50 records in 5 batches each."""
    disk = SimulatedFiles()
    make_partition(disk, PARTITION, [5, 5])
    return disk


def test_every_batch_is_listed(files: SimulatedFiles) -> None:
    """Position, size, offsets and flags are those of the file."""
    pieces = list(dump(PATH, files))
    assert [piece.state for piece in pieces] == ["whole"] * 5
    assert [(piece.first, piece.end) for piece in pieces] == [
        (base, base + 10) for base in range(50, 100, 10)
    ]
    assert pieces[0].flags == ("after_sync",)
    assert [piece.position for piece in pieces] == [
        found.position for found in batches_of(files, PATH)
    ]
    assert sum(piece.bytes for piece in pieces) == files.file_size(PATH)


def test_damage_is_listed_with_what_can_be_known(files: SimulatedFiles) -> None:
    """Where the header is whole, the offsets that are lost are known; zeros are no damage."""
    flip_body(files, PATH, 3)
    flip_header(files, PATH, 1)
    files.replace(PATH, [files.read_file(PATH), bytes(4096)])
    pieces = list(dump(PATH, files))
    assert [piece.state for piece in pieces] == [
        "whole",
        "damaged",
        "whole",
        "body_damaged",
        "whole",
        "zeros",
    ]
    assert pieces[1].first is None
    assert (pieces[3].first, pieces[3].end) == (80, 90)
    assert pieces[5].bytes == 4096


def test_producers_are_listed() -> None:
    """The header of a batch names its producer, epoch and first sequence."""
    files = SimulatedFiles()
    rig = Rig(files, PARTITION)
    rig.publish(b"one", b"two", producer=(7, 3, 0))
    rig.publish(b"three", producer=(7, 3, 2))
    rig.close()
    pieces = list(dump(segment(PARTITION, 0), files))
    assert [
        (piece.producer_id, piece.producer_epoch, piece.first_sequence) for piece in pieces
    ] == [(7, 3, 0), (7, 3, 2)]


def test_what_was_cut_aside_can_be_looked_into(files: SimulatedFiles) -> None:
    """A torn tail is a file of batches too, from whatever offset it begins at."""
    cut(files, PATH, files.file_size(PATH) - 8)
    assert max(read_all(files, PARTITION)[0]) == 89
    [piece] = dump(PARTITION / "00000000000000000050.torn-0", files)
    assert (piece.state, piece.first, piece.end) == ("body_damaged", 90, 100)


def test_flags_are_words() -> None:
    """Every flag has a name, and one from the future is shown as it is."""
    assert flag_words(HAS_KEYS | ZSTD | AFTER_SYNC) == ("keys", "zstd", "after_sync")
    assert flag_words(LOST | 0x0800) == ("lost", "unknown 0x0800")


def test_other_files_are_refused(files: SimulatedFiles) -> None:
    """A file that is none of batches is named as such instead of being called damaged."""
    with pytest.raises(InvalidArgument, match="no file of batches"):
        list(dump(PARTITION.parent / "topic.json", files))
    with pytest.raises(InvalidArgument, match="is a directory"):
        list(dump(PARTITION, files))
    with pytest.raises(NotFound):
        list(dump(PARTITION / "nothing.log", files))

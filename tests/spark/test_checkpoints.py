"""What a checkpoint says about a batch is on the disk before the batch is committed."""

import os
from pathlib import Path

import pytest

from headrace.spark import checkpoints


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The paths that were synced, in order, as seen from the checkpoint."""
    found: list[str] = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        found.append(str(path.relative_to(tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As Spark lays one out."""
    for name in ("offsets/0", "offsets/7", "commits/6", "sources/0/0", "metadata"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1")
    return tmp_path


def test_the_offsets_of_the_batch_are_synced(checkpoint: Path, synced: list[str]) -> None:
    """The file, then its directory; nothing else, because every small batch pays for it."""
    checkpoints.sync_offsets(str(checkpoint), 7)
    assert synced == ["offsets/7", "offsets"]


def test_with_the_first_batch_goes_what_is_written_once(
    checkpoint: Path, synced: list[str]
) -> None:
    """Which query it is, and where its sources began."""
    checkpoints.sync_offsets(f"file://{checkpoint}", 0)
    assert synced == [
        "offsets/0",
        "offsets",
        "metadata",
        "sources/0/0",
        "sources/0",
        "sources",
        ".",
    ]


@pytest.mark.parametrize("location", [None, "", "hdfs://host/path", "s3a://bucket/x", "/not/there"])
def test_other_places_are_left_alone(location: str | None, synced: list[str]) -> None:
    """They promise it themselves, or are none of ours."""
    checkpoints.sync_offsets(location, 7)
    assert synced == []


def test_a_path_with_spaces_and_schemes() -> None:
    """As Spark and people write it."""
    assert checkpoints.local_path("file:/a%20b/c") == Path("/a b/c")
    assert checkpoints.local_path("file:///a/c") == Path("/a/c")
    assert checkpoints.local_path("/a b/c") == Path("/a b/c")

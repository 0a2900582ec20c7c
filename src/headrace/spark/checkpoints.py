"""What Headrace reads of a checkpoint, and syncs before a batch is committed to a sink.

Spark writes the offsets of batch 7 into ``offsets/7`` of the checkpoint, by rename and *without a sync*,
then runs the batch, then asks the sink to commit it. If the power fails after the commit, that file may be
empty or gone. Spark then plans another batch 7 from the records that exist by then; but the sink has
committed a batch 7, and drops the new rows: they are lost. So a sink that remembers numbers of batches
syncs the file, and its directory, first. With batch 0 it also syncs the files that name the query and
the start of its sources, which are written once.

Only for a checkpoint on a disk of the driver's machine. Other file systems (HDFS, object stores) promise
by themselves that a closed file is durable.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import orjson

from headrace.errors import InvalidArgument
from headrace.spark.durable import sync


def sync_offsets(location: str | None, batch_id: int) -> None:
    """Sync the files about the batch; a checkpoint that is not local is left alone."""
    home = local_path(location)
    if home is None:
        return
    offsets = home / "offsets"
    if not (offsets / str(batch_id)).exists():
        return  # not a checkpoint as we know it; Spark will know
    wanted = [offsets / str(batch_id), offsets]
    if batch_id == 0:
        sources = home / "sources"
        wanted += [home / "metadata", *sorted(sources.rglob("*"), reverse=True), sources, home]
    for path in wanted:
        with suppress(
            FileNotFoundError
        ):  # a temporary file that is gone, or a query without sources
            sync(path)


def local_path(location: str | None) -> Path | None:
    """A checkpoint's location as a path of this machine; None if it is elsewhere."""
    if not location:
        return None
    if location.startswith("file:"):
        return Path(unquote(urlparse(location).path))
    return None if "://" in location else Path(location)


def has_begun(home: Path) -> bool:
    """Whether a query has planned a batch here, so that another one would continue from it."""
    return _last(home / "offsets") is not None


def committed_offsets(home: Path) -> tuple[list[Any], bool]:
    """The offsets of each source after the last finished batch, and whether another batch was begun."""
    done, begun = _last(home / "commits"), _last(home / "offsets")
    if done is None:
        raise InvalidArgument(
            f"the checkpoint {home} has no finished batch to continue from",
            code="invalid_checkpoint",
        )
    try:
        version, _, *sources = (home / "offsets" / str(done)).read_text().splitlines()
        if version != "v1":
            raise ValueError(f"its format is {version}")
        found = [None if each == "-" else orjson.loads(each) for each in sources]
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the offsets of batch {done} in {home} cannot be read: {error}",
            code="invalid_checkpoint",
        ) from None
    return found, begun is not None and begun > done


def _last(directory: Path) -> int | None:
    """The greatest number among the files of a directory."""
    if not directory.is_dir():
        return None
    return max(
        (int(each.name) for each in directory.iterdir() if each.name.isdigit()), default=None
    )

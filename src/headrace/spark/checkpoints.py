"""What Spark has written down about a batch, made durable before the batch is committed elsewhere.

Spark writes the offsets of batch 7 into ``offsets/7`` of the checkpoint, by rename and *without a sync*,
then runs the batch, then asks the sink to commit it. If the power fails after the commit, that file may be
empty or gone. Spark then plans another batch 7 from what is there by now, with other rows; but the sink
has committed a batch 7 already, and drops them: they are lost. So a sink that remembers numbers of
batches syncs the file, and its directory, first. With batch 0 go the files that say which query it is and
where its sources began, which are written once.

Only for a checkpoint on a disk of the driver's machine. Other file systems (HDFS, object stores) promise
by themselves that what was closed is durable.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlparse

from headrace.spark.durable import sync


def sync_offsets(location: str | None, batch_id: int) -> None:
    """Sync what the checkpoint says about the batch; nothing, when it is not a local one."""
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
    """A checkpoint's place as a path of this machine; None: it has none, or is elsewhere."""
    if not location:
        return None
    if location.startswith("file:"):
        return Path(unquote(urlparse(location).path))
    return None if "://" in location else Path(location)

"""Begin anew: a pipeline that leaves its checkpoint behind (``--reset``, ``--from``).

The old checkpoint is renamed, not deleted: it is the only place that knows what was written. So are those of the
second query of a pipeline. The subscription that shows the pipeline's progress begins anew as well; otherwise it
would stay ahead, and keep no record that is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument, SubscriptionNotFound
from headrace.files import SharedFiles
from headrace.model import pattern_matches
from headrace.spark.checkpoints import committed_offsets, local_path
from headrace.spark.pipelines.declaration import Pipeline, TopicInput
from headrace.spark.pipelines.identity import FILE, QueryIdentity
from headrace.spark.pipelines.planning import FAILED_SUFFIX
from headrace.spark.source.positions import Positions

CHECKPOINT = "checkpoint"
"""The place at which the old query stopped."""


def beginning_at(pipeline: Pipeline, checkpoint: str, place: str | None) -> tuple[Pipeline, bool]:
    """The pipeline, with the place where its new query begins; None: where its file says.

    The second value tells that the old query had begun a batch that it did not confirm: the rows of that
    batch may be written twice.
    """
    if place is None:
        return pipeline, False
    if place != CHECKPOINT:
        inputs = [
            replace(each, starting=place) if isinstance(each, TopicInput) else each
            for each in pipeline.inputs
        ]
        return replace(pipeline, inputs=tuple(inputs)), False
    home = _home(checkpoint)
    sources, is_unconfirmed = committed_offsets(home)
    known = _stored(home)
    if known is None:
        raise InvalidArgument(
            f"the checkpoint {checkpoint} does not say which source is which input: give --from a time, "
            "or --reset",
            code="invalid_checkpoint",
        )
    positions = {
        source.input: Positions.of(offsets)
        for source, offsets in zip(known.sources, sources, strict=False)
        if offsets is not None
    }
    inputs = [
        replace(each, starting=_offsets(each, positions[each.name]))
        if isinstance(each, TopicInput) and each.name in positions
        else each
        for each in pipeline.inputs
    ]
    return replace(pipeline, inputs=tuple(inputs)), is_unconfirmed


def set_aside(checkpoint: str) -> Path | None:
    """Rename the checkpoint of a pipeline; returns its new path, None if there was none."""
    home = _home(checkpoint)
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    moved = None
    disk = SharedFiles()
    for path in (home.with_name(home.name + FAILED_SUFFIX), home):
        if path.exists():
            moved = path.with_name(f"{path.name}.before-{now}")
            disk.rename(path, moved)
            disk.sync_directory(path.parent)
    return moved


def forget_progress(
    client: BrokerClient, pipeline: Pipeline, checkpoint: str, *, all_of: bool
) -> None:
    """Delete the subscriptions of topics that are not read any more; with ``all_of``, of all topics.

    They would keep their unread records for ever (``retain_unread``).
    """
    home = local_path(checkpoint)
    old = None if home is None else _stored(home)
    for each in pipeline.topics:
        before = {
            topic
            for source in (old.sources if old is not None else ())
            if source.input == each.name
            for topic in source.topics
        }
        dropped = before | set(each.topics) if all_of else before - set(each.topics)
        for topic in sorted(dropped):
            if each.group is not None:
                try:
                    client.delete_subscription(each.group, topic)
                except SubscriptionNotFound:
                    continue


def _home(checkpoint: str) -> Path:
    home = local_path(checkpoint)
    if home is None:
        raise InvalidArgument(
            f"the checkpoint {checkpoint} is not on this machine: move it away there, or give the "
            "pipeline another checkpoint",
            code="invalid_path",
        )
    return home


def _stored(home: Path) -> QueryIdentity | None:
    path = home / FILE
    return QueryIdentity.of_bytes(path.read_bytes()) if path.exists() else None


def _offsets(given: TopicInput, positions: Positions) -> str:
    """As ``startingOffsets`` takes them; of topics that are still read."""
    found = dict(_read(given, positions))
    return orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode()


def _read(given: TopicInput, positions: Positions) -> Iterator[tuple[str, dict[int, int]]]:
    for topic, offsets in positions.offsets.items():
        if any(pattern_matches(pattern, topic) for pattern in given.topics):
            yield topic, offsets

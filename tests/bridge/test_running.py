"""What both directions share."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.bridge.inward import InwardBridge
from headrace.bridge.outward import OutwardBridge
from headrace.bridge.routes import BridgeRoute
from headrace.bridge.running import Bridge
from headrace.errors import OffsetOutOfRange

DIRECTIONS = [
    (InwardBridge, "kafka_records_deleted", "Kafka has deleted offsets 3 to 6 of t/0 before"),
    (OutwardBridge, "records_deleted", "offsets 3 to 6 of t/0 were deleted before"),
]


def bridge(kind: type[Bridge], *skips: str) -> Any:
    place: Any = SimpleNamespace()
    client: Any = None
    return kind(client, place, [BridgeRoute("k", "t")], "copies", skips=frozenset(skips))


@pytest.mark.parametrize(("kind", "code", "sentence"), DIRECTIONS)
def test_deleted_records_end_the_bridge(kind: type[Bridge], code: str, sentence: str) -> None:
    """The sentence says which ones, and how to go on without them."""
    made = bridge(kind)
    with pytest.raises(OffsetOutOfRange) as caught:
        made._after_gap(made.progress.routes[0], "t/0", 3, 7)
    assert caught.value.code == code
    assert caught.value.message.startswith(sentence)
    assert caught.value.message.endswith("to go on without them, start with --skip deleted")


@pytest.mark.parametrize("kind", [InwardBridge, OutwardBridge])
def test_deleted_records_are_skipped_and_counted(kind: type[Bridge]) -> None:
    """With ``--skip deleted``; a position that still exists is kept."""
    made = bridge(kind, "deleted")
    [route] = made.progress.routes
    assert made._after_gap(route, "t/0", 3, 7) == 7
    assert route.skipped == 4
    assert made._after_gap(route, "t/0", 9, 7) == 9
    assert route.skipped == 4

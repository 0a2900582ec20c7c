"""What front ends lack is written down here, so that a change of it is a decision."""

from tests.contract.conftest import FRONT_ENDS
from tests.contract.front_end import (
    ABILITIES,
    CAPITALS,
    CLASSES,
    DEAD_LETTERS,
    DUPLICATE,
    HEADERS,
    JOBS,
    MEMBERSHIP,
    SCHEDULE,
    SEEK,
    STAY,
)

LACKING = {
    "Broker": {STAY},
    "AsyncBroker": {STAY},
    "text": {HEADERS, DEAD_LETTERS, SCHEDULE, SEEK, DUPLICATE, CLASSES, STAY, JOBS},
    "binary": {STAY},
    "BrokerClient": set(),
    "AsyncClient": set(),
    "HTTP": {CAPITALS, CLASSES, MEMBERSHIP, STAY, JOBS},
    "WebSocket": {CLASSES, DEAD_LETTERS, SCHEDULE, SEEK, STAY, JOBS},
}


def test_what_each_front_end_lacks_is_what_is_written_here() -> None:
    """A front end that can less than before shows up in this table."""
    assert {front.name: set(front.cannot) for front in FRONT_ENDS} == LACKING


def test_every_lack_has_a_name_and_a_reason() -> None:
    """The reason is what a skipped test says."""
    for front in FRONT_ENDS:
        for ability, reason in front.cannot.items():
            assert ability in ABILITIES
            assert reason

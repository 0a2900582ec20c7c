"""The scenarios, in the order in which ``make faults`` runs them."""

from __future__ import annotations

from tests.faults import (
    clock_jumps,
    crash_states,
    disk_fills,
    failing_syncs,
    frozen,
    fuzzing,
    kills,
    lives,
    slowloris,
    vanished,
    websockets,
)
from tests.faults.cluster import run as cluster
from tests.faults.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        lives.SCENARIO,
        crash_states.SCENARIO,
        clock_jumps.SCENARIO,
        kills.SCENARIO,
        failing_syncs.SCENARIO,
        disk_fills.SCENARIO,
        frozen.SCENARIO,
        vanished.SCENARIO,
        websockets.SCENARIO,
        slowloris.SCENARIO,
        fuzzing.SCENARIO,
        cluster.SCENARIO,
    )
}

"""The scenarios, in the order in which ``make faults`` runs them."""

from __future__ import annotations

from tests.faults import crash_states, disk_fills, failing_syncs, frozen, fuzzing, kills, lives
from tests.faults.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        lives.SCENARIO,
        crash_states.SCENARIO,
        kills.SCENARIO,
        failing_syncs.SCENARIO,
        disk_fills.SCENARIO,
        frozen.SCENARIO,
        fuzzing.SCENARIO,
    )
}

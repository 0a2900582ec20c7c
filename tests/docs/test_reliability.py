"""docs/reliability.md shows the results of the last runs, and describes every scenario."""

import json

from tests.docs.blocks import read
from tests.faults.report import BEGIN, END, RESULTS, rows
from tests.faults.scenarios import SCENARIOS

TEXT = read("docs/reliability.md")


def test_the_table_is_that_of_the_last_runs() -> None:
    """`python -m tests.faults.report` writes it."""
    shown = TEXT.split(BEGIN)[1].split(END)[0]
    assert shown == rows(json.loads(RESULTS.read_text()))


def test_no_result_has_an_anomaly() -> None:
    """Figures with anomalies are findings, not documentation."""
    found = {name: each["anomalies"] for name, each in json.loads(RESULTS.read_text()).items()}
    assert {name: anomalies for name, anomalies in found.items() if anomalies} == {}


def test_every_scenario_is_described() -> None:
    for name in SCENARIOS:
        assert f"\n**{name}.** " in TEXT, name

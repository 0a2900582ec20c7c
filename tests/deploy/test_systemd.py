"""The unit of systemd: systemd accepts it, and it fits the broker."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import EXIT_UNAVAILABLE, app
from headrace.server import server as serving
from headrace.settings import load
from tests.cli.rig import SCRIPT
from tests.deploy.dockerfile import ROOT

UNIT = ROOT / "deploy" / "headrace.service"


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(UNIT)
    return parsed


def test_it_starts_what_is_there() -> None:
    """The command, its settings and the exit codes in the unit are real."""
    service = unit()["Service"]
    program, command = service["ExecStart"].split()
    assert Path(program).name == "headrace"
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    name, _, value = service["Environment"].partition("=")
    assert load(environment={name: value}).data_dir == "/var/lib/headrace"
    assert service["RestartPreventExitStatus"] == "2"
    comments = UNIT.read_text()
    for code in (EXIT_UNAVAILABLE, serving.EXIT_FAILED):
        assert f"# Exit code {code}: " in comments
    assert float(service["TimeoutStopSec"]) > serving.DRAIN_S


def test_it_is_told_and_waits_for_the_network() -> None:
    """systemd hears that the broker is ready and alive; an address may come up with the network."""
    service, head = unit()["Service"], unit()["Unit"]
    assert (service["Type"], int(service["WatchdogSec"])) == ("notify", 60)
    assert head["After"] == head["Wants"] == "network-online.target"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="SYSTEMD DID NOT CHECK THE UNIT: systemd-analyze is not installed",
)
def test_systemd_accepts_it(tmp_path: Path) -> None:
    """No unknown key and no value that it ignores; a misspelt key is noticed."""
    text = UNIT.read_text().replace("/opt/headrace/.venv/bin/headrace", str(SCRIPT))

    def complaints(content: str) -> str:
        path = tmp_path / "headrace.service"
        path.write_text(content)
        ended = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", path],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return "\n".join(line for line in ended.stderr.splitlines() if path.name in line)

    assert complaints(text) == ""
    assert "Unknown key" in complaints(text.replace("WatchdogSec", "WatchdogSecs"))

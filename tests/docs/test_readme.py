"""The tour of README.md, line by line: what it says you should see is what comes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.settings import SETTINGS
from tests.cli.rig import SCRIPT
from tests.docs.blocks import ROOT, Block, blocks, read, section

TEXT = read("README.md")
TOUR = section(TEXT, "A tour of five minutes")
READY = re.compile(
    r"Headrace is ready: tcp://127\.0\.0\.1:(\d+), http://127\.0\.0\.1:(\d+) \(data: data\)"
)

OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS"}
"""What ``make test`` hands on to its children is not meant for the reader's ``make run``."""


def expected(block: Block) -> list[str]:
    """What stands behind ``#:``."""
    return [line[2:].strip() for line in block.text.splitlines() if line.startswith("#:")]


def matches(wanted: list[str], got: list[str]) -> bool:
    """``…`` stands for anything, and how far columns are apart is for the eye."""
    if len(wanted) != len(got):
        return False
    return all(
        re.fullmatch(re.escape(" ".join(want.split())).replace("…", ".*"), " ".join(line.split()))
        for want, line in zip(wanted, got, strict=True)
    )


class Tour:
    """A reader with two terminals, in a folder of their own."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._ports = ("0", "0")

    def _environment(self) -> dict[str, str]:
        ours = {name for setting in SETTINGS for name in setting.environment}
        clean = {n: v for n, v in os.environ.items() if n not in ours and "HEADRACE" not in n}
        port, http_port = self._ports
        path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
        return clean | {
            "PATH": path,
            "HEADRACE_PORT": port,
            "HEADRACE_HTTP_PORT": http_port,
            "HEADRACE_EVENTS_INTERVAL": "0",  # they come by the clock, and readers differ in speed
        }

    # --- the first terminal -----------------------------------------------------------------
    def make_run(self) -> str:
        """Start the broker as ``make run`` would; the line that says ready."""
        self.end()
        recipe = subprocess.run(
            ["make", "--no-print-directory", "-n", "-o", ".venv/.has-run", "run"],
            cwd=ROOT,
            env={n: v for n, v in os.environ.items() if n not in OF_MAKE},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert recipe == [".venv/bin/headrace", "serve"]
        self._server = subprocess.Popen(
            [SCRIPT, *recipe[1:]],
            cwd=self._folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline().strip()
        found = READY.fullmatch(line)
        assert found, line
        self._ports = (found[1], found[2])
        return line

    def end(self, *, gently: bool = False) -> None:
        server, self._server = self._server, None
        if server is not None:
            (server.terminate if gently else server.kill)()
            code = server.wait(30)
            assert server.stdout is not None
            server.stdout.close()
            assert not gently or code == 0

    # --- the second terminal ----------------------------------------------------------------
    def run(self, block: Block) -> list[str]:
        """The lines that a block prints, with the ports of this broker for those of the text."""
        text = block.text.replace("9999", self._ports[0]).replace("8080", self._ports[1])
        program = ["bash", "-e", "-c"] if block.language == "sh" else [sys.executable, "-c"]
        ended = subprocess.run(
            [*program, text],
            cwd=self._folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert (ended.returncode, ended.stderr) == (0, ""), f"README.md: {block.text}"
        return ended.stdout.splitlines()


@pytest.fixture
def tour(tmp_path: Path) -> Iterator[Tour]:
    tour = Tour(tmp_path)
    yield tour
    tour.end()


@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_the_tour(tour: Tour) -> None:
    """From the first line to the last, as a reader would paste them."""
    steps = blocks(TOUR)
    assert [step.language for step in steps] == [
        "", "", *["sh"] * 5, "python", "", "sh", "python", "sh",
    ]  # fmt: skip
    assert steps[0].text == "make run\n"
    assert steps.pop(8).text == "make spark\n"  # it is installed here already
    ready = tour.make_run()
    ports = re.compile(r"(?<=:)\d+(?=[, ])")
    assert ports.sub("#", ready) == ports.sub("#", steps[1].text.strip())
    for step in steps[2:]:
        if "doctor" in step.text:
            tour.end(gently=True)
        got = tour.run(step)
        assert matches(expected(step), got), f"README.md says {expected(step)}, and there is {got}"
        if "kill -9" in step.text:
            tour.make_run()


def test_the_commands_are_real() -> None:
    """Everything that is said of make is in the Makefile."""
    makefile = read("Makefile")
    for target in set(re.findall(r"make ([a-z]+)\b", TEXT)) - {"and"}:
        assert f"\n{target}:" in makefile, target


def test_a_line_that_differs_is_noticed() -> None:
    """The test itself: another word, a line too many and one too few."""
    assert matches(["a  b …"], ["a b c"])
    assert not matches(["a"], ["b"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "b"], ["a"])


def test_it_is_the_description_of_the_package() -> None:
    """Who looks at the package sees this text."""
    assert 'readme = "README.md"' in read("pyproject.toml")

"""The tour of README.md, line by line: each command prints what the text says."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.settings import SETTINGS
from headrace.testing import running_server
from tests.cli.rig import SCRIPT
from tests.docs.blocks import ROOT, Block, blocks, read, section

TEXT = read("README.md")
TOUR = section(TEXT, "A tour of five minutes")
READY = re.compile(
    r"Headrace is ready: tcp://127\.0\.0\.1:(\d+), http://127\.0\.0\.1:(\d+) \(data: data\)"
)

OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHON"}
"""Variables that ``make test`` passes to its children and that a reader's ``make run`` does not have."""
STAND_IN = Path(__file__).with_name("curl.py")


def expected(block: Block) -> list[str]:
    """The lines after ``#:``."""
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
        self._commands = folder / "commands"
        self._commands.mkdir()
        curl = self._commands / "curl"
        curl.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        curl.chmod(0o755)
        self._server: subprocess.Popen[str] | None = None
        self._ports = ("0", "0")

    def _environment(self) -> dict[str, str]:
        ours = {name for setting in SETTINGS for name in setting.environment}
        clean = {n: v for n, v in os.environ.items() if n not in ours and "HEADRACE" not in n}
        port, http_port = self._ports
        # The stand-in comes last: where curl is installed, the tour uses curl.
        path = [str(SCRIPT.parent), os.environ["PATH"], str(self._commands)]
        return clean | {
            "PATH": os.pathsep.join(path),
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
        "sh", "", *["sh"] * 5, "python", "sh", "sh", "python", "sh",
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


def test_the_stand_in_answers_like_curl() -> None:
    """The lines of the tour that call curl also work on a machine without it."""
    with running_server() as server:
        at = f"http://{server.http_address.host}:{server.http_address.port}"
        lines = [
            ["-s", "-X", "POST", f"{at}/publish/visits", "-d", '{"page": "/"}'],
            ["-s", f"{at}/consume/visits"],
        ]
        answers = [
            json.loads(subprocess.check_output([sys.executable, STAND_IN, *line])) for line in lines
        ]
    assert (answers[0]["topic"], answers[0]["offset"]) == ("visits", 0)
    assert answers[1]["data"] == {"page": "/"}


def test_the_supported_pythons_are_those_of_the_package() -> None:
    """README.md, the classifiers and ``requires-python`` name the same versions."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    classifier = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    versions = [found[1] for text in project["classifiers"] if (found := classifier.match(text))]
    *others, last = versions
    assert f"Python {', '.join(others)} or {last}" in " ".join(TEXT.split())
    minor = int(last.removeprefix("3."))
    assert project["requires-python"] == f">={versions[0]},<3.{minor + 1}"
    assert versions == [f"3.{number}" for number in range(minor - len(others), minor + 1)]


def test_the_commands_are_real() -> None:
    """Every target of make that the text names is in the Makefile."""
    makefile = read("Makefile")
    for target in set(re.findall(r"make ([a-z]+(?:-[a-z]+)*)\b", TEXT)) - {"and"}:
        assert f"\n{target}:" in makefile, target


def test_a_line_that_differs_is_noticed() -> None:
    """The comparison notices another word, an additional line and a missing line."""
    assert matches(["a  b …"], ["a b c"])
    assert not matches(["a"], ["b"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "b"], ["a"])


def test_it_is_the_description_of_the_package() -> None:
    """The package shows this text as its description."""
    assert 'readme = "README.md"' in read("pyproject.toml")

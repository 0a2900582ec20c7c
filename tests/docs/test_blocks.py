"""Every block of code of every page is run, or at least understood, by a test.

The table says how. A block of a new kind, or on a new page, fails here until somebody decides.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import RunningServer, running_server
from tests.docs.blocks import ROOT, Block, blocks, read
from tests.docs.test_cli import COMMANDS

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
HOW: dict[tuple[str, str], str] = {
    ("README.md", "python"): "test_readme",
    ("README.md", "sh"): "test_readme",
    ("CONTRIBUTING.md", "sh"): "commands",
    ("docs/architecture.md", "python"): "test_architecture",
    ("docs/cli.md", "sh"): "test_cli",
    ("docs/format.md", "json"): "json",
    ("docs/http.md", "json"): "json",
    ("docs/http.md", "js"): "node",
    ("docs/http.md", "sh"): "curl",
    ("docs/operations.md", "json"): "test_operations",
    ("docs/operations.md", "sh"): "commands",
    ("docs/pipelines.md", "python"): "syntax",
    ("docs/pipelines.md", "toml"): "toml",
    ("docs/protocol.md", "text"): "test_protocol",
    ("docs/protocol.md", "frames"): "test_protocol",
    ("docs/protocol.md", "hex"): "test_protocol",
    ("docs/python.md", "python"): "test_python",
    ("docs/reliability.md", "sh"): "commands",
    ("docs/security.md", "json"): "json",
    ("docs/security.md", "sh"): "commands",
    ("docs/security.md", "text"): "text",
    ("docs/spark.md", "python"): "syntax",
    ("docs/spark.md", "sh"): "commands",
    ("docs/spark.md", "toml"): "toml",
}
"""(page, language) -> the test file that runs them, or what is checked here. ``syntax``: they need Spark."""


def found(how: str) -> list[tuple[str, Block]]:
    return [
        (page, block)
        for page in PAGES
        for block in blocks(read(page))
        if HOW.get((page, block.language)) == how
    ]


def named(how: str) -> object:
    cases = found(how)
    ids = [f"{page}:{block.line}" for page, block in cases]
    return pytest.mark.parametrize("block", [block for _, block in cases], ids=ids)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_every_block_has_a_test() -> None:
    """Each language of each page is in the table; drawings and output have no language."""
    here = {(page, b.language) for page in PAGES for b in blocks(read(page)) if b.language}
    assert here == set(HOW)
    for how in HOW.values():
        assert not how.startswith("test_") or Path(__file__).with_name(f"{how}.py").is_file()


@named("json")  # type: ignore[operator]
def test_json_is_json(block: Block) -> None:
    """A reader can paste it."""
    json.loads(block.text)


@named("toml")  # type: ignore[operator]
def test_toml_is_toml(block: Block) -> None:
    """A reader can paste it."""
    assert tomllib.loads(block.text)["pipeline"]


@named("syntax")  # type: ignore[operator]
def test_python_is_python(block: Block) -> None:
    """It compiles, and the names that it imports from Headrace exist."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
            exec(compile(ast.Module([node], []), "block", "exec"), {})


@named("commands")  # type: ignore[operator]
def test_commands_exist(block: Block) -> None:
    """Bash understands the block, each ``headrace`` command its arguments, and make has each target."""
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    for line in block.text.replace("\\\n", " ").replace("&&", "\n").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["headrace"]:
            name = next(n for n in COMMANDS if words[1 : 1 + len(n.split())] == n.split())
            COMMANDS[name].make_context(
                name, words[1 + len(name.split()) :], resilient_parsing=False
            )
        elif words[:1] == ["make"]:
            assert f"\n{words[1]}:" in read("Makefile")


def test_the_commands_with_curl_run(server: RunningServer, tmp_path: Path) -> None:
    """One after the other, against a broker; none fails."""
    curl = tmp_path / "curl"
    curl.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("curl.py")}" "$@"\n'
    )
    curl.chmod(0o755)
    outputs = []
    for page, block in found("curl"):
        at = f"localhost:{server.http_address.port}"
        ran = subprocess.run(
            ["bash", "-e", "-c", block.text.replace("localhost:8080", at)],
            env={
                **os.environ,
                "PATH": f"{os.environ['PATH']}{os.pathsep}{tmp_path}",
                "NO_PROXY": "*",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, (page, block.line, ran.stderr)
        outputs.append(ran.stdout)
    assert json.loads(outputs[0])["topic"] == "user.events"
    assert outputs[1].startswith("{")
    assert outputs[1].endswith("[]")
    assert "x-cursor: 0:1" in outputs[2].lower()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_scripts_run(server: RunningServer) -> None:
    """In node, with what a browser has: each prints the message that the second one publishes."""
    at = f"localhost:{server.http_address.port}"
    script = "\n".join(block.text for _, block in found("js"))
    script = script.replace("localhost:8080", at).replace('"/stream', f'"http://{at}/stream')
    script += "\nsetTimeout(() => process.exit(1), 20000);\n"
    has = subprocess.run(
        ["node", "--experimental-eventsource", "-p", "typeof EventSource + typeof WebSocket"],
        capture_output=True,
        text=True,
    )
    if has.stdout.strip() != "functionfunction":
        pytest.skip("this node has no WebSocket or EventSource")
    process = subprocess.Popen(
        ["node", "--experimental-eventsource", "-e", script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = ""
        while not ("Received:" in lines and lines.count("userId: 123") >= 2):
            line = process.stdout.readline()
            assert line, lines
            lines += line
    finally:
        process.kill()
        process.communicate()

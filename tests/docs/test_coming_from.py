"""The pages for those who come from another broker: every command and program prints what its page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.testing import running_server
from tests.docs.blocks import ROOT, blocks, read
from tests.docs.tables import COMMANDS
from tests.docs.terminal import Terminal
from tests.docs.test_python import expected as printed
from tests.docs.test_python import finished, program, start
from tests.docs.test_readme import expected, matches

PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("from-*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands and programs run one after the other, against a new broker for each kind."""
    found = blocks(read(page))
    assert {block.language for block in found} == {"sh", "python"}
    for block in found:
        with running_server() as server:
            if block.language == "python":
                process = start(program(block, server), tmp_path)
                out, err = finished(process)
                assert (process.returncode, out) == (0, printed(block)), err
                continue
            monkeypatch.setenv("HEADRACE_SERVER", f"127.0.0.1:{server.port}")
            folder = tmp_path / f"line-{block.line}"
            folder.mkdir()
            terminal = Terminal(folder, monkeypatch, capsys, ("0", "0"))
            monkeypatch.setenv("HEADRACE_SERVER", f"127.0.0.1:{server.port}")
            lines = [line for text in terminal.run(block) for line in text.splitlines()]
            assert matches(expected(block), [line.rstrip() for line in lines]), lines


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_tables_exist(page: str) -> None:
    """A command that stands in a table has its name and its options from the source."""
    for text in re.findall(r"`headrace ([^`]+)`", read(page)):
        words = text.split()
        if any(each.startswith(f"{text} ") for each in COMMANDS):
            continue  # a group of commands
        name = next((each for each in COMMANDS if words[: len(each.split())] == each.split()), None)
        assert name, text
        options = {each for parameter in COMMANDS[name].params for each in parameter.opts}
        for word in words[len(name.split()) :]:
            assert not re.match(r"--?[a-z]", word) or word in options, text

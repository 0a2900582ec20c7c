"""docs/cli.md describes every command. ``test_commands.py`` runs its examples."""

import re

import pytest

from tests.docs.blocks import blocks, read, section
from tests.docs.tables import COMMANDS

TEXT = read("docs/cli.md")


def test_every_command_has_its_place() -> None:
    """A heading each, and a mention in the list at the top."""
    assert len(COMMANDS) > 20
    headings = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)
    top = TEXT[: TEXT.index("## Common options")]
    assert {name for name in COMMANDS if f"`{name}`" not in top} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str) -> None:
    """Under its heading stands a line that begins with it."""
    examples = [block.text for block in blocks(section(TEXT, name)) if block.language == "sh"]
    assert re.search(rf"headrace {name}\b", "".join(examples))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_is_named_exists(name: str) -> None:
    """Every option that the text names exists."""
    text = section(TEXT, name)
    options = {text for parameter in COMMANDS[name].params for text in parameter.opts}
    for word in set(re.findall(r"`(--?[a-z][a-z-]*)", text)):
        assert word in options, word


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_a_help_keep_their_lines(name: str) -> None:
    """The mark for that is one character (backspace), which is not printed; two characters would be."""
    text = COMMANDS[name].help or ""
    assert "\\b" not in text
    assert ("Example" in text) == ("\b" in text)


def test_the_options_that_all_share() -> None:
    """Commands that connect take an address and a token; commands that show something take --json."""
    for name, command in COMMANDS.items():
        options = {text for parameter in command.params for text in parameter.opts}
        if name not in (
            "serve",
            "config",
            "doctor",
            "restore",
            "verify",
            "cluster import",
            "pipeline list",
            "archive list",
            "archive show",
            "archive compact",
        ):
            assert {"--server", "--token", "--ca"} <= options, name
    for name in ("topics", "describe", "groups", "fetch", "tail", "dlq list", "scheduled list",
                 "pipeline list", "pipeline status"):  # fmt: skip
        options = {text for parameter in COMMANDS[name].params for text in parameter.opts}
        assert "--json" in options, name

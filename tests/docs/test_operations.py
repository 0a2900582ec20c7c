"""docs/operations.md: its tables are those of the source, and its procedures work."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import EXIT_UNAVAILABLE, app
from headrace.log.directory import SUSPECT
from headrace.model import SubscriptionSettings, TopicSettings
from headrace.server import server as serving
from headrace.settings import load
from headrace.testing import running_server
from tests.docs.blocks import ROOT, blocks, read, section, table
from tests.docs.tables import SETTINGS_HEAD, defaults, server_settings

TEXT = read("docs/operations.md")
SOURCE = ROOT / "src" / "headrace"


# --- tables -----------------------------------------------------------------------------------------
def test_the_table_of_settings_is_current() -> None:
    """It is what the source says; ``python -m tests.docs.tables`` prints it."""
    start = TEXT.index("| " + " | ".join(SETTINGS_HEAD))
    assert TEXT[start:].split("\n\n")[0] == server_settings()


@pytest.mark.parametrize(
    ("title", "settings"),
    [
        ("Settings of a topic", TopicSettings),
        ("Settings of a subscription", SubscriptionSettings),
    ],
)
def test_the_tables_of_topics_and_subscriptions_are_current(
    title: str, settings: type[TopicSettings] | type[SubscriptionSettings]
) -> None:
    """Every setting with its default, in the order of the source."""
    rows = table(section(TEXT, title), "setting", "default", "meaning")
    assert {row[0].strip("`"): row[1] for row in rows} == defaults(settings)


def test_the_config_file_can_be_used(tmp_path: Path) -> None:
    """The example is a file that the broker takes."""
    [example] = [b for b in blocks(TEXT) if b.language == "json" and '"storage"' in b.text]
    path = tmp_path / "config.json"
    path.write_text(example.text)
    settings = load(config=path)
    assert (settings.port, settings.retention_hours) == (9999, 72)


def test_exit_codes_are_those_of_the_source() -> None:
    """The codes of a broker that cannot listen or that stopped itself stand in the table."""
    rows = table(TEXT, "exit code", "meaning", "what to do")
    own = [str(EXIT_UNAVAILABLE), str(serving.EXIT_FAILED)]
    assert [row[0] for row in rows] == ["0", "2", *own, "137"]


def log_lines() -> list[tuple[str, str]]:
    """(level, pattern) of every line that the source can log."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ):
                    parts = re.split(r"%(?:\.\d+)?[sdrf]", text)
                    found.append((level, ".*".join(map(re.escape, parts))))
    return found


def test_every_line_of_the_log_that_is_explained_exists() -> None:
    """The source logs every line of the table, at that level."""
    rows = table(TEXT, "level", "line", "meaning")
    assert len(rows) > 15
    known = log_lines()
    invented = []
    for level, line, _ in rows:
        example = line.strip("`").replace("…", "x 1 y")
        levels = {"error": {"error", "exception"}}.get(level, {level})
        if not any(spoken in levels and re.match(text, example) for spoken, text in known):
            invented.append(f"{level}: {line}")
    assert invented == [], "nothing in the source says this"


# --- procedures -------------------------------------------------------------------------------------
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "snapshot"])
def test_a_copy_of_the_directory_is_a_broker(tmp_path: Path, killed: bool) -> None:
    """As it is left by a stop or, as in a snapshot, by the end of the power."""
    with running_server(tmp_path / "original") as server:
        with server.client() as client:
            client.publish_many("orders", [b"one", b"two"])
            client.create_subscription("email", "orders", 1)
        (server.kill if killed else server.stop)()
        shutil.copytree(tmp_path / "original", tmp_path / "copy")
    examined = CliRunner().invoke(app, ["doctor", str(tmp_path / "copy")])
    assert examined.exit_code == 0, examined.output
    with running_server(tmp_path / "copy") as copy, copy.client() as client:
        assert client.fetch_values("orders") == [b"one", b"two"]
        assert client.subscription_stats("email")["lag"] == 1


def test_the_names_of_files_are_right() -> None:
    """The text uses the real names of files."""
    assert f"`{SUSPECT}`" in TEXT
    assert "@subscriptions.journal.damaged" in read("docs/format.md")

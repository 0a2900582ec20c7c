"""docs/protocol.md is normative, so its conversations are held and its tables compared."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import errors
from headrace.client import link
from headrace.errors import HeadraceError
from headrace.operations.catalog import OPERATIONS
from headrace.server.arguments import PUBLISH_OPTIONS
from headrace.server.text import HELP, VERBS
from headrace.testing import RunningServer, running_server
from headrace.wire.binary import Type
from tests.docs.blocks import ROOT, Block, blocks, read, table
from tests.docs.sessions import TIMEOUT_S, Conversation

TEXT = read("docs/protocol.md")
SESSIONS = [block for block in blocks(TEXT) if "session" in block.words]
SOURCE = ROOT / "src" / "headrace"
MADE = {
    "f'invalid_{name}'": {
        "invalid_delay", "invalid_ttl", "invalid_seconds", "invalid_timeout", "invalid_wait",
    },
    "f'invalid_{kind}'": {"invalid_topic", "invalid_subscription", "invalid_pipeline", "invalid_principal"},
}  # fmt: skip
"""Codes that are put together."""


# --- the conversations ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, RunningServer]]:
    """One broker without a token and one with, for the whole text: what is said first stays."""
    with running_server() as plain, running_server(token="swordfish") as guarded:
        yield {False: plain, True: guarded}


def hold(block: Block, server: RunningServer, timeout: float = TIMEOUT_S) -> None:
    conversation = Conversation(server.address, timeout)
    try:
        getattr(conversation, block.language)(block.text)
    except AssertionError as error:
        raise AssertionError(f"docs/protocol.md, line {block.line}: {error}") from error
    finally:
        conversation.close()


def test_the_conversations_happen_as_written(servers: dict[bool, RunningServer]) -> None:
    """Every session in the text, from top to bottom, with one broker."""
    assert len(SESSIONS) > 15
    for block in SESSIONS:
        hold(block, servers["token" in block.words])


def test_a_wrong_conversation_is_noticed(servers: dict[bool, RunningServer]) -> None:
    """The test itself: another answer, a missing one and one too many all fail."""
    server = servers[False]
    for text in (
        "> PING\\r\\n\n< PANG\\r\\n\n",
        "> QUIT\\r\\n\n< OK bye\\r\\n\n< OK\\r\\n\n",
        "> PING\\r\\n\n> QUIT\\r\\n\n< OK bye\\r\\n\n= closed\n",
    ):
        with pytest.raises(AssertionError):
            hold(Block("text session", text, 1), server, timeout=0.1)


# --- the tables -------------------------------------------------------------------------------------
def test_every_verb_is_described() -> None:
    """Each verb has its place under a heading, and so has each line of HELP."""
    headings = " ".join(re.findall(r"^### (.+)$", TEXT, re.MULTILINE))
    assert {verb for verb in VERBS if verb not in re.split(r"[ ,]+", headings)} == set()
    helped = set(re.findall(r"\b[A-Z]{3,}\b", " ".join(HELP)))
    assert helped == set(VERBS)


def test_every_frame_type_is_described() -> None:
    """The table has each type with its number."""
    rows = table(TEXT, "number", "type", "who sends it", "what it is")
    assert {(int(row[0]), row[1].strip("`")) for row in rows} == {(t.value, t.name) for t in Type}


def test_every_operation_is_described() -> None:
    """The table has each operation."""
    rows = table(TEXT, "operation", "arguments", "answer")
    assert {row[0].strip("`") for row in rows} == set(OPERATIONS)


def test_every_argument_of_an_operation_is_described() -> None:
    """What an operation takes stands in its row, and the row names nothing else."""
    rows = {r[0].strip("`"): r[1] for r in table(TEXT, "operation", "arguments", "answer")}
    for name, row in rows.items():
        described = set(re.findall(r"`([a-z]+)`", re.sub(r"\([^)]*\)", "", row)))
        operation = OPERATIONS[name]
        taken = set(operation.arguments) | ({"settings"} if operation.settings else set())
        assert described == taken, name


def test_the_error_codes_of_an_operation_exist() -> None:
    """What a declaration names is raised somewhere."""
    known = set(raised()) | {each.code for each in classes().values()}
    for operation in OPERATIONS.values():
        assert set(operation.errors) <= known, operation.name


SPARK = SOURCE / "spark"


def is_of_spark(path: Path, text: str) -> bool:
    """The room and its commands: their errors never travel, and docs/spark.md has them."""
    return SPARK in path.parents or (path.parent.name == "cli" and "headrace.spark" in text)


def raised(*, spark: bool = False) -> dict[str, set[str]]:
    """Every code in the source, with the names of the classes that carry it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if is_of_spark(path, text) == spark:
            for node in ast.walk(ast.parse(text, str(path))):
                for code, name in codes_of(node):
                    for each in MADE.get(code, {code}):
                        found[each].add(name)
    return found


def codes_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
            for keyword in keywords:
                if keyword.arg == "code" and hasattr(errors, name):
                    match keyword.value:
                        case ast.Constant(value=str(code)):
                            yield code, name
                        case ast.JoinedStr():
                            yield ast.unparse(keyword.value), name


def classes() -> dict[str, type[HeadraceError]]:
    rooms = [vars(errors), vars(link)]
    return {
        name: value
        for room in rooms
        for name, value in room.items()
        if isinstance(value, type) and issubclass(value, HeadraceError)
    }


def test_every_kind_of_error_is_described() -> None:
    """Each class with its code, and whether trying again may help."""
    rows = {row[1].strip("`"): row for row in table(TEXT, "code", "class", "retryable", "meaning")}
    assert set(rows) == set(classes())
    for name, cls in classes().items():
        assert rows[name][0] == f"`{cls.code}`"
        assert rows[name][2] == ("yes" if cls.retryable else "no")


def test_every_code_is_described() -> None:
    """Each code in the source stands in a table, under its kind; and none that is not there."""
    kinds = {cls.code: cls for cls in classes().values()}
    rows = {row[0].strip("`"): row for row in table(TEXT, "code", "kind", "where", "meaning")}
    found = raised()
    missing = sorted(set(found) - set(rows) - set(kinds))
    assert missing == [], "add a row to the table in docs/protocol.md for these"
    assert sorted(set(rows) - set(found)) == [], "these stand in docs/protocol.md and nowhere else"
    for code, row in rows.items():
        kind = kinds[row[1].strip("`")]
        raised_as = [classes()[name] for name in found[code]]
        assert kind in raised_as, code
        assert set(row[2].split(", ")) <= {
            "any",
            "text",
            "binary",
            "http",
            "client",
            "serve",
            "doctor",
            "backup",
            "nodes",
        }


def test_every_option_of_a_publish_is_described() -> None:
    """The table under PUB has what the broker knows."""
    rows = table(TEXT[TEXT.index("### PUB") :], "option", "meaning")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(PUBLISH_OPTIONS)


def test_links_lead_somewhere() -> None:
    """Every link in the documentation to a file or a heading here has its end."""
    texts = {path: path.read_text(encoding="utf-8") for path in documents()}
    broken = []
    for path, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            end = (path.parent / name).resolve() if name else path
            if not end.exists() or (anchor and anchor not in anchors(end)):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def anchors(path: Path) -> set[str]:
    """The headings of a file, as they are linked to."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title.lower()).strip()
        found.add(re.sub(r"\s", "-", plain))
    return found

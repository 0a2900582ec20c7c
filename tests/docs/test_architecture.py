"""docs/architecture.md: what it says of the house is how the house is."""

import inspect
import re

from headrace.broker import state
from headrace.log.interface import Log
from tests.docs.blocks import ROOT, blocks, read, section
from tests.test_imports import ALLOWED, BASICS, may_import

TEXT = read("docs/architecture.md")
SOURCE = ROOT / "src" / "headrace"


def test_every_room_is_in_the_house() -> None:
    """Each package and each basic module is named where the house is drawn."""
    house = blocks(section(TEXT, "The house"))[0].text
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {room for room in rooms if f"  {room}/" not in house} == set()
    basics = {path.name for path in SOURCE.glob("*.py") if path.stem in BASICS}
    assert {name for name in basics if name not in house} == set()


def test_imports_go_as_drawn() -> None:
    """The arrows of the drawing are in the table of the test, and those against them are not."""
    arrows = (("broker", "log"), ("doctor", "log"), ("server", "wire"), ("server", "broker"))
    for room, other in arrows:
        assert may_import(room, (other,))
        assert not may_import(other, (room,))
    assert may_import("client", ("log", "batch"))
    assert may_import("client", ("log", "columns"))
    assert not may_import("client", ("log", "segment"))
    assert not may_import("log", ("wire",))
    assert not may_import("wire", ("log",))
    assert ALLOWED["cli"] == ALLOWED["testing"] == {"*"}


def test_the_interface_of_the_log_is_as_shown() -> None:
    """Every method and attribute of the protocol, and no other."""
    [shown] = [block.text for block in blocks(TEXT) if block.language == "python"]
    methods = {name for name, _ in inspect.getmembers(Log, inspect.isfunction) if name[0] != "_"}
    assert set(re.findall(r"def (\w+)", shown)) == methods
    properties = {name for name, _ in inspect.getmembers(Log, lambda m: isinstance(m, property))}
    attributes = set(re.findall(r"^    (\w+):", shown, re.MULTILINE))
    assert attributes == set(Log.__annotations__) | properties


def test_every_file_that_is_named_exists() -> None:
    """A file that was moved is noticed."""
    named = set(re.findall(r"`((?:src/headrace/|tests/)?[a-z_]+/[a-z_]+\.py)`", TEXT))
    assert len(named) > 8
    places = (ROOT, SOURCE)
    assert {
        name for name in named if not any((place / name).is_file() for place in places)
    } == set()


def test_what_is_said_of_acks_is_in_force() -> None:
    """The window in which a crash costs acknowledgements."""
    assert f"{state.FLUSH_S * 1000:.0f} ms" in TEXT

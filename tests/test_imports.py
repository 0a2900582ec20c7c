"""Imports go one way, and these tests say so.

The rules are the two tables below. A room is a package or module directly under src/headrace; the
basics are the modules that every room may use. The source is read with `ast`, never imported, so an
import inside a function or under TYPE_CHECKING counts like any other: it is knowledge all the same.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace

SOURCE = Path(__file__).resolve().parents[1] / "src"
LINES_MAX = 700  # above this, a file is two things
LINE_COUNTED = {".py", ".html", ".css", ".js"}

BASICS = frozenset(
    {
        "budget", "model", "errors", "limits", "settings", "checking", "channels", "clock", "files",
        "contents", "forking", "notation", "partitioning", "publication", "shell", "times", "tracing",
        "misspelt", "working",
    }
)  # fmt: skip
ANYTHING = frozenset({"*"})

# room -> what it may import of headrace, besides itself
ALLOWED: dict[str, frozenset[str]] = {
    **dict.fromkeys(BASICS, BASICS),
    "operations": BASICS,
    "access": BASICS,
    "log": BASICS,
    "engine": BASICS | {"log"},
    "doctor": BASICS | {"log"},
    "backup": BASICS | {"access", "client", "log"},
    "wire": BASICS,
    "paging": BASICS | {"log.batch"},
    "facade": BASICS | {"log.batch", "operations", "paging"},
    "broker": BASICS | {"access", "facade", "log", "operations", "paging"},
    "console": BASICS | {"access", "wire"},
    "cluster": BASICS
    | {"access", "broker", "client.address", "client.link", "engine", "log", "operations", "wire"},
    "server": BASICS
    | {
        "access",
        "cluster.node",
        "engine",
        "log",
        "wire",
        "broker",
        "console",
        "operations",
        "paging",
    },
    "client": BASICS
    | {"facade", "wire", "operations", "paging", "log.batch", "log.columns", "log.run"},
    "moving": BASICS | {"backup", "broker", "log"},
    "bridge": BASICS | {"client", "log.batch", "log.columns"},
    "spark": BASICS | {"client", "log", "operations"},
    "bench": BASICS | {"client"},
    "cli": ANYTHING,
    "testing": ANYTHING,
    "__init__": ANYTHING,
    "__main__": ANYTHING,
}

# room -> what it may not import from outside
FORBIDDEN: dict[str, frozenset[str]] = {
    "wire": frozenset({"asyncio", "socket", "ssl"}),
    "access": frozenset({"socket", "ssl"}),
    "broker": frozenset({"socket", "ssl"}),
    "console": frozenset({"asyncio", "socket", "ssl"}),
    "log": frozenset({"socket", "ssl"}),
}
ONLY_IN_SPARK = frozenset({"pyarrow"})

# The broker knows logs by ``log.interface`` and opens them through ``log.storage``, so that another
# engine needs no edits in these rooms.
ENGINES = frozenset({"log.partition", "log.memory"})
NO_ENGINES = frozenset({"broker", "server"})


def module_parts(path: Path, package: Path) -> tuple[str, ...]:
    """log/batch.py -> ("log", "batch"); log/__init__.py -> ("log",); __init__.py -> ()."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(tree: ast.AST, containing: tuple[str, ...]) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line, module, name) for each import; name is None where a module itself is named.

    `containing` is the absolute name of the package the file lies in, for relative imports.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name, None
            case ast.ImportFrom():
                base = containing[: len(containing) - node.level + 1] if node.level else ()
                module = ".".join((*base, node.module) if node.module else base)
                for alias in node.names:
                    yield node.lineno, module, alias.name
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module, None


def violations(source: Path) -> list[str]:
    """Every import under source/headrace that the tables do not allow, as `file:line: what`."""
    package = source / "headrace"
    files = sorted(package.rglob("*.py"))
    modules = {module_parts(path, package) for path in files}
    found = []
    for path in files:
        parts = module_parts(path, package)
        room = parts[0] if parts else "__init__"
        where = path.relative_to(source.parent)
        if room not in ALLOWED:
            found.append(f"{where}:1: {room!r} is no known room; give it a place in {__file__}")
            continue
        containing = ("headrace", *path.relative_to(package).parent.parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, module, name in imports(tree, containing):
            top, *inner = module.split(".")
            if top != "headrace":
                forbidden = FORBIDDEN.get(room, frozenset())
                if room != "spark":
                    forbidden |= ONLY_IN_SPARK
                if top in forbidden:
                    found.append(f"{where}:{line}: {room} may not import {module}")
                continue
            # `from headrace.log import batch` names the module log.batch if there is one.
            if name is not None and ((*inner, name) in modules or (not inner and name in ALLOWED)):
                inner = [*inner, name]
            if not may_import(room, tuple(inner)):
                target = ".".join(("headrace", *inner))
                found.append(f"{where}:{line}: {room} may not import {target}")
    return found


def may_import(room: str, target: tuple[str, ...]) -> bool:
    """Whether a room may know headrace.<target>; the empty target is the public face itself."""
    allowed = ALLOWED[room]
    if allowed is ANYTHING:
        return True
    prefixes = {".".join(target[:length]) for length in range(1, len(target) + 1)}
    if room in NO_ENGINES and prefixes & ENGINES:
        return False
    return bool(prefixes & (allowed | {room}))


def too_long(source: Path) -> list[str]:
    """Every file under source with more than LINES_MAX lines."""
    found = []
    for path in sorted(source.rglob("*")):
        if path.suffix in LINE_COUNTED and path.is_file():
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LINES_MAX:
                found.append(f"{path.relative_to(source.parent)}: {lines} lines")
    return found


def named_twice(source: Path) -> list[str]:
    """Every class name under source that more than one file, or one file more than once, declares."""
    places: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(source.parent)))
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def plant(tmp_path: Path, files: dict[str, str]) -> Path:
    """Write a source tree with a small room of each kind, and `files` on top of it."""
    source = tmp_path / "src"
    house = dict.fromkeys(
        ["__init__.py", "errors.py", "log/__init__.py", "log/batch.py", "log/segment.py"], ""
    )
    for name, text in {**house, **files}.items():
        path = source / "headrace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return source


def test_imports_go_one_way() -> None:
    """No module of Headrace knows a room that it has no business to know."""
    assert (SOURCE / "headrace" / "__init__.py").is_file(), "there is nothing here to check"
    assert violations(SOURCE) == []


def test_no_file_is_too_long() -> None:
    """Every source file is short enough to be one thing."""
    assert too_long(SOURCE) == []


def test_no_class_name_exists_twice() -> None:
    """A reader who searches for a class finds one."""
    assert named_twice(SOURCE) == []


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    """The check names both files."""
    source = plant(tmp_path, {"log/a.py": "class Part: ...", "wire/a.py": "class Part: ..."})
    assert named_twice(source) == ["Part: src/headrace/log/a.py, src/headrace/wire/a.py"]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("errors.py", "import headrace.log", "errors may not import headrace.log"),
        ("model.py", "from .wire import text", "model may not import headrace.wire"),
        ("log/a.py", "import headrace.wire.text", "log may not import headrace.wire.text"),
        ("log/a.py", "from headrace import Broker", "log may not import headrace"),
        ("log/a.py", "import ssl", "log may not import ssl"),
        ("wire/a.py", "from headrace.log import batch", "wire may not import headrace.log.batch"),
        ("wire/a.py", "from ..log.batch import B", "wire may not import headrace.log.batch"),
        ("wire/b/a.py", "from ...log import batch", "wire may not import headrace.log.batch"),
        ("wire/__init__.py", "from .. import log", "wire may not import headrace.log"),
        ("wire/a.py", "import asyncio.streams", "wire may not import asyncio.streams"),
        ("wire/a.py", "import struct, socket", "wire may not import socket"),
        ("wire/a.py", "from ssl import SSLContext", "wire may not import ssl"),
        ("broker/a.py", "def f():\n    import socket", "broker may not import socket"),
        ("broker/a.py", "from headrace import wire", "broker may not import headrace.wire"),
        ("broker/a.py", "import headrace.log.memory", "broker may not import headrace.log.memory"),
        ("server/a.py", "import headrace.log.memory", "server may not import headrace.log.memory"),
        ("broker/a.py", "from headrace.server import tcp", "broker may not import headrace.server"),
        ("server/a.py", "import headrace.client", "server may not import headrace.client"),
        ("server/a.py", "import headrace.testing", "server may not import headrace.testing"),
        ("server/a.py", "import pyarrow as pa", "server may not import pyarrow"),
        ("client/a.py", "import headrace.broker", "client may not import headrace.broker"),
        ("client/a.py", "import headrace.log", "client may not import headrace.log"),
        ("client/a.py", "from ..log import segment", "client may not import headrace.log.segment"),
        ("spark/a.py", "import headrace.wire", "spark may not import headrace.wire"),
        ("log/a.py", "from headrace.doctor import dump", "log may not import headrace.doctor"),
        ("doctor/a.py", "import headrace.broker", "doctor may not import headrace.broker"),
        ("cli/a.py", "import pyarrow.ipc", "cli may not import pyarrow.ipc"),
        (
            "wire/a.py",
            "if TYPE_CHECKING:\n    from headrace.broker import Topic",
            "wire may not import headrace.broker",
        ),
        (
            "log/a.py",
            "import importlib\nimportlib.import_module('headrace.server')",
            "log may not import headrace.server",
        ),
        ("attic/a.py", "", "'attic' is no known room"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    """Each rule catches the import it is there to catch, and says where it stands."""
    found = violations(plant(tmp_path, {name: text}))
    assert len(found) == 1
    where, _, what = found[0].partition(": ")
    assert where == f"src/headrace/{name}:{max(1, len(text.splitlines()))}"
    assert what == complaint or (complaint.endswith("room") and what.startswith(complaint))


def test_every_room_exists() -> None:
    """The tables above and the tree of CONTRIBUTING name no room that the source does not have."""
    package = SOURCE / "headrace"
    for room in ALLOWED:
        assert (package / room).is_dir() or (package / f"{room}.py").is_file(), room
    tree = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```")[3]
    named = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    assert named == [room for room in ALLOWED if room in named]
    assert {path.name for path in package.iterdir() if (path / "__init__.py").is_file()} == {*named}


def test_a_house_in_order_passes(tmp_path: Path) -> None:
    """What the tables allow is allowed in every way of writing it."""
    source = plant(
        tmp_path,
        {
            "__init__.py": "from headrace.broker import Broker\nfrom .client import BrokerClient",
            "model.py": "from headrace import errors\nfrom .errors import HeadraceError",
            "log/segment.py": "import asyncio\nfrom . import batch\nfrom headrace import errors",
            "wire/text.py": "import struct\nfrom ..errors import HeadraceError",
            "broker/topic.py": "import asyncio\nfrom headrace.log import segment",
            "server/tcp.py": "import socket, ssl\nfrom headrace import broker, log, wire",
            "client/sync.py": "import socket\nfrom headrace.log import batch\nimport headrace.wire",
            "client/wide.py": "from headrace.log.batch import Batch",
            "spark/source.py": "import pyarrow\nfrom headrace import client, log",
            "doctor/dump.py": "from headrace.limits import X\nfrom headrace.log import batch",
            "cli/serve.py": "from headrace.server import tcp\nfrom headrace import __version__",
            "testing/fixture.py": "import headrace.server, headrace.client",
        },
    )
    assert violations(source) == []


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    """The bound is exact: 700 lines pass, 701 do not."""
    source = plant(tmp_path, {"log/a.py": "\n" * LINES_MAX, "log/b.py": "\n" * (LINES_MAX + 1)})
    assert too_long(source) == [f"src/headrace/log/b.py: {LINES_MAX + 1} lines"]


@pytest.mark.parametrize(
    "program", ["from headrace import BrokerClient, Message", "import headrace.cli"]
)
def test_who_needs_no_broker_does_not_load_it(program: str) -> None:
    """A client and a command start without the broker's and the server's modules."""
    asked = f"{program}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", asked], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not [name for name in loaded if name.startswith(("headrace.broker", "headrace.server"))]


def test_every_public_name_is_there() -> None:
    """Names that are imported when they are used."""
    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
        assert name in dir(headrace)
    with pytest.raises(AttributeError, match="no attribute 'Brocker'"):
        headrace.Brocker  # noqa: B018

"""A TOML or Python file becomes pipelines.

A Python file is run, and every function in it with ``@pipeline`` is a pipeline. The file does not stay
among the imported modules under its own name: its functions and classes are sent to executors by value,
and so is every module that it imports from its own folder. So a UDF beside the file needs no
``--py-files``, on one machine or on a cluster.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import HeadraceError
from headrace.spark.pipelines.declaration import Pipeline, path_from, read_pipeline
from headrace.spark.pipelines.functions import DECLARED
from headrace.spark.pipelines.lines import python_lines, toml_lines
from headrace.spark.pipelines.sections import InvalidPipeline, Section, gathered, raise_all

SETTINGS = "SETTINGS"
"""In a Python file, a dictionary of this name holds the keys at the head of a TOML file."""
STATE_SUFFIX = ".state"


@dataclass(frozen=True)
class PipelineFile:
    """The pipelines and settings of a file."""

    path: Path
    pipelines: tuple[Pipeline, ...]
    servers: str | None = None
    checkpoint_dir: str | None = None
    spark: Mapping[str, str] = field(default_factory=dict)

    @property
    def state_dir(self) -> Path:
        """The default directory of checkpoints: beside the file.

        Not in the home or the working directory: a run from cron, or from another directory, must
        find the same checkpoints.
        """
        return self.path.with_name(self.path.name + STATE_SUFFIX)

    def choose(self, names: Iterable[str]) -> tuple[Pipeline, ...]:
        """Those with these names, or all of them."""
        known = {each.name: each for each in self.pipelines}
        chosen = list(dict.fromkeys(names)) or list(known)
        for name in chosen:
            if name not in known:
                raise InvalidPipeline(
                    f"{self.path} has no pipeline {name!r}; it has {', '.join(known)}"
                )
        return tuple(known[name] for name in chosen)


def load(path: str | Path) -> PipelineFile:
    """Read a file; :class:`InvalidPipeline` names all mistakes and their places."""
    path = Path(path)
    if path.suffix not in (".toml", ".py"):
        raise InvalidPipeline(f"{path} is neither a .toml nor a .py file")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPipeline(f"{path} cannot be read: {_reason(error)}") from None
    where = str(path)
    path = path.absolute()
    mistakes: list[InvalidPipeline] = []
    read = _from_python if path.suffix == ".py" else _from_toml
    head, pipelines = read(path, where, content, mistakes)
    if not pipelines and not mistakes:
        mistakes.append(
            InvalidPipeline(
                f"{where} declares no pipeline: write [pipeline.NAME], or @pipeline(…) in Python"
            )
        )
    names = [each.name for each in pipelines]
    mistakes += [
        InvalidPipeline(f"{where} has two pipelines {name!r}")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    given_dir = head.text("checkpoint_dir")
    found = PipelineFile(
        path,
        tuple(pipelines),
        head.text("servers"),
        None if given_dir is None else path_from(path.parent, given_dir),
        head.options("spark", "spark."),
    )
    head.end()
    with gathered(mistakes):
        head.finish()
    raise_all(mistakes)
    return found


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# --- TOML -----------------------------------------------------------------------------------------
def _from_toml(
    path: Path, where: str, content: str, mistakes: list[InvalidPipeline]
) -> tuple[Section, list[Pipeline]]:
    try:
        document = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise InvalidPipeline(f"{where} is no TOML: {error}") from None
    head = Section(document, where, lines=toml_lines(content))
    found = []
    for name, section in head.sections("pipeline").items():
        with gathered(mistakes):
            found.append(read_pipeline(name, section.labelled(f"pipeline {name}"), path.parent))
    return head, found


# --- Python ---------------------------------------------------------------------------------------
def _from_python(
    path: Path, where: str, content: str, mistakes: list[InvalidPipeline]
) -> tuple[Section, list[Pipeline]]:
    module = run_python(path, where)
    head = module.__dict__.get(SETTINGS, {})
    if not isinstance(head, Mapping):
        raise InvalidPipeline(f"{where}: {SETTINGS} is a dictionary, not {head!r}")
    lines = python_lines(content)
    found = []
    for value in list(module.__dict__.values()):
        for name, declaration in getattr(value, DECLARED, ()):
            keys = ("pipeline", name)
            section = Section(declaration, where, f"pipeline {name}", lines=lines, keys=keys)
            with gathered(mistakes):
                found.append(read_pipeline(name, section, path.parent, value))
    return Section(head, where, SETTINGS), found


def run_python(path: Path, where: str) -> ModuleType:
    """Run a file as a module of its own."""
    name = f"headrace_pipelines_{path.stem}".replace("-", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with importing_from(path.parent):
        sys.modules[name] = module  # dataclasses and pickle look for it there
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            sys.modules.pop(name, None)
            raise InvalidPipeline(f"{where} failed: {_place(error, path)}") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """The exception, and the line of the file that raised it."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    return f"line {line}: {text}" if line else text


@contextmanager
def importing_from(folder: Path) -> Any:
    """Modules are found in this folder first; those are sent to executors by value."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            _send_by_value(sys.modules[name], folder)


def _send_by_value(module: ModuleType, folder: Path) -> None:
    try:
        from pyspark import cloudpickle
    except ImportError:
        return  # then nothing is sent at all
    origin = getattr(module, "__file__", None)
    if origin is not None and Path(origin).is_relative_to(folder):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]

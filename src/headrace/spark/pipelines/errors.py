"""What Spark says when something is wrong, in a sentence and with the place in the file."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import (
    Conflict,
    DataCorrupt,
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
    Unauthenticated,
)
from headrace.spark.pipelines.sections import InvalidPipeline, Section

SENTENCE_CHARS_MAX = 600
_STATE = re.compile(r"\s*SQLSTATE: \w+")
_CLASS = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_STACK = re.compile(r"\n\s+at [\w.$]+\(|\nJVM stacktrace:|\n== |\n\n\t?JVM")
_PYTHON_ERROR = re.compile(r"^([A-Za-z_][\w.]*): (.*)", re.MULTILINE)
_HERE = "Traceback (most recent call last)"
_QUERY = "=== Streaming Query ==="
"""Behind this, Spark describes the query, at length."""
_DEFINITE = (
    Conflict, DataCorrupt, Forbidden, InvalidArgument, NotFound, OffsetOutOfRange, Unauthenticated,
)  # fmt: skip


@contextmanager
def analysed(section: Section, key: str) -> Iterator[None]:
    """What goes wrong in here is a mistake at this place of the file."""
    _say_it_once()
    try:
        yield
    except InvalidPipeline:
        raise
    except HeadraceError as error:
        raise section.wrong(key, error) from error
    except Exception as error:
        raise section.wrong(key, sentence(error)) from error


def _say_it_once() -> None:
    """PySpark writes every error of analysis to standard error, too, as a line of JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def sentence(error: BaseException) -> str:
    """What went wrong, without stack traces and plans."""
    if isinstance(error, HeadraceError):
        return error.message
    text = str(error).partition(_QUERY)[0]
    raised = _raised(text)
    if raised is not None:
        name, what = raised
        return _clipped(what if name.startswith("headrace.") else f"{name.split('.')[-1]}: {what}")
    desc = getattr(error, "desc", None)
    return _shortened(str(desc).partition(_QUERY)[0] if desc else text or type(error).__name__)


def is_definite(error: BaseException) -> bool:
    """Whether trying again cannot help, as far as that can be told: an error of ours that says so."""
    raised = _raised(str(error).partition(_QUERY)[0])
    name = type(error).__name__ if raised is None else raised[0].rpartition(".")[2]
    return name in _names(*_DEFINITE)


def _names(*classes: type[HeadraceError]) -> set[str]:
    below = [cls for each in classes for cls in each.__subclasses__()]
    return {each.__name__ for each in classes} | (_names(*below) if below else set())


def _raised(text: str) -> tuple[str, str] | None:
    """What a Python worker raised: the last line of its traceback that is an error."""
    if _HERE not in text:
        return None
    traceback = _STACK.split(text[text.rindex(_HERE) :])[0]
    found = [match for match in _PYTHON_ERROR.finditer(traceback) if match[1] != "SQLSTATE"]
    return (found[-1][1], found[-1][2]) if found else None


def _shortened(text: str) -> str:
    text = _STACK.split(text.strip())[0]
    text = re.split(r";?\s*\n'?(?:Project|Aggregate|Join|Filter|Sort|Union|\+-|'[A-Z])", text)[0]
    text = _CLASS.sub("", _STATE.sub("", text))
    return _clipped(text)


def _clipped(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SENTENCE_CHARS_MAX else text[: SENTENCE_CHARS_MAX - 1] + "…"

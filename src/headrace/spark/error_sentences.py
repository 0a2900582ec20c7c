"""Errors of Spark as one sentence: no plan, no stack of Java, no traceback.

An error of Spark has a condition (``UNRESOLVED_COLUMN.WITH_SUGGESTION``), a sentence, and after it a dump of the
plan, the stack or the query. The sentence is kept, with the place in the query. An error that was raised in
Python, by a task or by the planning of the source, arrives as the text of its traceback: if it was an error of
Headrace, it becomes that error again.

Everything here reads public properties and text, so it works for a local session and over Spark Connect.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

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

try:
    from py4j.protocol import Py4JError
except ImportError:  # a client of Spark Connect alone
    Py4JError = ConnectionError

SPARK_GONE = (Py4JError, ConnectionError, EOFError)
"""What a call to a Spark that has ended raises."""
SENTENCE_CHARS_MAX = 600
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w{5}")
_CONDITION = re.compile(r"^\s*\[[A-Z0-9_.]+\]\s*")
_PLACE = re.compile(r";?\s*\(?line (\d+),? pos (\d+)\)?|SQL \(line (\d+), position (\d+)\)")
_DUMP = re.compile(
    r"\n\tat |\n\s+at [\w.$/]+\(|\n+\s*JVM stacktrace:|\n== |\n?=== Streaming Query ===|\nDriver stacktrace:"
    r"|;?\s*\n'?(?:Project|Aggregate|Join|Filter|Sort|Union|\+-|'[A-Z])"
)
"""Here Spark begins to describe the stack, the statement, the query or the plan, at length."""
_TRACEBACK = "Traceback (most recent call last)"
_RAISED = re.compile(r"^([A-Za-z_][\w.]*): ", re.MULTILINE)
_OURS = re.compile(r"^(headrace(?:\.\w+)+)\.(\w+): ", re.MULTILINE)
_CAUSE = re.compile(r"^(?:Caused by|): [\w.$]+(?:: |$)", re.MULTILINE)
_FIRST_LINE_ONLY = ("INVALID_IDENTIFIER", "TABLE_OR_VIEW_NOT_FOUND")
"""Conditions whose first line says it; the other lines only add length."""
_DEFINITE = (
    Conflict, DataCorrupt, Forbidden, InvalidArgument, NotFound, OffsetOutOfRange, Unauthenticated,
)  # fmt: skip
_STATE = re.compile(r"SQLSTATE: (\w{2})\w{3}")
_DEFINITE_STATES = ("0A", "21", "22", "42")
"""Classes of Spark's errors that every repetition of the batch would have: unsupported features, values that
cannot be computed (a division by zero), queries and state that do not fit each other."""
_OTHER_SOURCES = re.compile(r"There are \[\d+\] sources in the checkpoint offsets")


class InvalidSql(HeadraceError, code="invalid_sql"):
    """The query cannot be parsed, or names something that does not exist."""


class QueryFailed(HeadraceError, code="query_failed"):
    """The query is valid, and could not be answered."""


class QueryCancelled(HeadraceError, code="cancelled"):
    """A user cancelled the query."""


# --- for callers --------------------------------------------------------------------------------------
def error_of(error: Any) -> HeadraceError:
    """Any error, as one of ours."""
    if isinstance(error, HeadraceError):
        return error
    text = str(error)
    if isinstance(error, Py4JError):
        return _from_java(text, has_cause=hasattr(error, "java_exception"))
    if isinstance(error, ConnectionError):
        return _spark_ended()
    raised, condition = text, ""
    kind: type[HeadraceError] = QueryFailed
    if _is_sparks(error):
        condition = error.getCondition() or ""
        parameters = error.getMessageParameters() or {}
        raised = next((p for p in parameters.values() if _TRACEBACK in str(p)), text)
        text = error.getMessage() or text
        if type(error).__name__ in ("AnalysisException", "ParseException"):
            kind = InvalidSql
    if _TRACEBACK in raised:
        return from_traceback(raised)
    return kind(_cleaned(text, condition) + _place(str(error)) or type(error).__name__)


def sentence(error: BaseException) -> str:
    return error_of(error).message


def is_definite(error: BaseException) -> bool:
    """Whether a retry cannot help, as far as that can be told by our errors and by Spark's codes."""
    found = error_of(error)
    if isinstance(found, _DEFINITE) or found.code == "data_loss":
        return not found.retryable
    text = str(error)
    if not _is_sparks(error) or _TRACEBACK in text:
        return isinstance(found, InvalidSql)
    states = {each[1] for each in _STATE.finditer(text)}
    return not states.isdisjoint(_DEFINITE_STATES) or _OTHER_SOURCES.search(text) is not None


@contextmanager
def in_words() -> Iterator[None]:
    """Errors of Spark that are raised inside become sentences. A bug of ours keeps its traceback."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (HeadraceError, *SPARK_GONE)) or _is_sparks(error):
            raise error_of(error) from None
        raise


def be_quiet() -> None:
    """PySpark logs every mistake in a query, with its plan and stack, before it raises it."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


# --- reading ------------------------------------------------------------------------------------------
def _is_sparks(error: Any) -> bool:
    from pyspark.errors import PySparkException

    return isinstance(error, PySparkException)


def _spark_ended() -> HeadraceError:
    return QueryFailed(
        "Spark ended while the query ran. Perhaps it had too little memory: give it more with "
        "--conf spark.driver.memory=8g",
        code="spark_ended",
    )


def from_traceback(text: str) -> HeadraceError:
    """The error at the end of a traceback."""
    text = text[max(text.rfind(_TRACEBACK), 0) :]
    text = _DUMP.split(_SQLSTATE.sub("", text))[0].strip()
    found = list(_OURS.finditer(text))
    if not found:
        raised = list(_RAISED.finditer(text))
        said = text[raised[-1].start() :] if raised else text.splitlines()[-1]
        name, separator, message = said.partition(": ")
        return QueryFailed(_shortened(name.rpartition(".")[2] + separator + message))
    module, name = found[-1].groups()
    message = text[found[-1].end() :]
    try:
        kind = getattr(import_module(module), name, None)
    except ImportError:
        kind = None
    if isinstance(kind, type) and issubclass(kind, HeadraceError):
        return kind(_shortened(message))
    return QueryFailed(_shortened(f"{name}: {message}"))


def _from_java(text: str, *, has_cause: bool) -> HeadraceError:
    """An exception of Java that has no condition: the innermost cause that says something."""
    if not has_cause or "SparkContext was shut down" in text:
        return _spark_ended()
    if "SPARK_JOB_CANCELLED" in text:  # on Spark's own page, for example
        return QueryCancelled("the query was cancelled")
    if _TRACEBACK in text:
        return from_traceback(text)
    causes = [_DUMP.split(each)[0].strip() for each in _CAUSE.split(text)[1:]]
    return QueryFailed(_cleaned(next((each for each in reversed(causes) if each), text), ""))


def _cleaned(text: str, condition: str) -> str:
    text = _DUMP.split(_SQLSTATE.sub("", _CONDITION.sub("", text.strip())))[0]
    lines = [line.strip() for line in _PLACE.sub("", text).splitlines() if line.strip()]
    if condition.startswith(_FIRST_LINE_ONLY):
        lines = lines[:1]
    return _shortened(" ".join(lines).rstrip(".; "))


def _shortened(text: str) -> str:
    return text if len(text) <= SENTENCE_CHARS_MAX else text[: SENTENCE_CHARS_MAX - 1] + "…"


def _place(text: str) -> str:
    """Where in the query it is, counted from 1."""
    found = _PLACE.search(text)
    if found is None:
        return ""
    line, position = found[1] or found[3], found[2]
    column = int(position) + 1 if position is not None else int(found[4])
    return f" (line {line}, position {column})"

"""What went wrong with a query, in one sentence: no plan, no stack of Java, no traceback.

Spark's errors have a condition (``UNRESOLVED_COLUMN.WITH_SUGGESTION``), a sentence, and behind it a dump of
the plan or of the stack; here the sentence is kept, with the place in the query. What a task or the
planning of the source raised in Python comes as the text of its traceback: if it was an error of
Headrace, it is that error again.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from headrace.errors import HeadraceError

_SQLSTATE = re.compile(r"\s*SQLSTATE: \w{5}")
_CONDITION = re.compile(r"^\s*\[[A-Z0-9_.]+\]\s*")
_PLACE = re.compile(r"\(?line (\d+),? pos (\d+)\)?|SQL \(line (\d+), position (\d+)\)")
_OURS = re.compile(r"^(headrace(?:\.\w+)+)\.(\w+): ", re.MULTILINE)
_CHARS_MAX = 600
FIRST_LINE_ONLY = ("INVALID_IDENTIFIER", "TABLE_OR_VIEW_NOT_FOUND")
"""Conditions whose first line says it, and whose other lines say it at length."""


class InvalidSql(HeadraceError):
    """The query is not one: it cannot be read, or names what is not there."""

    code = "invalid_sql"


class QueryFailed(HeadraceError):
    """The query was well, and could not be answered all the same."""

    code = "query_failed"


class Cancelled(HeadraceError):
    """Somebody asked the query to end."""

    code = "cancelled"


def sentence(error: BaseException) -> HeadraceError:
    """An error of Spark, as one of ours. What is none of Spark's is raised again."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, PySparkException):
        condition = error.getCondition() or ""
        raised = _raised_in_python(error)
        if raised is not None:
            return raised
        kind = InvalidSql if isinstance(error, AnalysisException | ParseException) else QueryFailed
        return kind(_clean(error.getMessage() or str(error), condition) + _place(str(error)))
    if isinstance(error, Py4JJavaError):
        return _from_java(error)
    if isinstance(error, Py4JError | ConnectionError):
        return _ended()
    raise error


def _ended() -> HeadraceError:
    return QueryFailed(
        "Spark ended while it worked, perhaps for want of memory: give it more with "
        "--conf spark.driver.memory=8g",
        code="spark_ended",
    )


def _raised_in_python(error: Any) -> HeadraceError | None:
    """What the source raised, in a task or in planning."""
    parameters = error.getMessageParameters() or {}
    text = parameters.get("traceback") or parameters.get("msg") or ""
    if "Traceback (most recent call last)" not in text:
        return None
    return from_traceback(text)


def from_traceback(text: str) -> HeadraceError:
    """The error at the end of a traceback."""
    text = text.split("\n\tat ")[0].strip()
    found = list(_OURS.finditer(text))
    if not found:
        return QueryFailed(_shortened(text.splitlines()[-1]))
    module, name = found[-1].groups()
    message = text[found[-1].end() :]
    try:
        kind = getattr(import_module(module), name, None)
    except ImportError:
        kind = None
    if isinstance(kind, type) and issubclass(kind, HeadraceError):
        return kind(_shortened(message))
    return QueryFailed(_shortened(f"{name}: {message}"))


def _from_java(error: Any) -> HeadraceError:
    """An exception of Java that Spark has no word for: the innermost cause that says something."""
    from pyspark.errors.exceptions.captured import convert_exception

    exception = error.java_exception
    text = ""
    for _ in range(20):
        text = exception.getMessage() or text or exception.toString()
        if "SparkContext was shut down" in text:
            return _ended()
        if "SPARK_JOB_CANCELLED" in text:  # on Spark's own page, say
            return Cancelled("the query was cancelled")
        if exception.getCause() is None:
            break
        exception = exception.getCause()
        converted = convert_exception(exception)
        if converted.getCondition():
            return sentence(converted)
    if "Traceback (most recent call last)" in text:
        return from_traceback(text)
    return QueryFailed(_clean(text, ""))


def _clean(message: str, condition: str) -> str:
    text = _SQLSTATE.sub("", _CONDITION.sub("", message.strip()))
    text = text.split("\n\nJVM stacktrace:")[0].split("\n== SQL")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if condition.startswith(FIRST_LINE_ONLY):
        lines = lines[:1]
    return _shortened(" ".join(lines).rstrip(".;"))


def _shortened(text: str) -> str:
    return text if len(text) <= _CHARS_MAX else text[:_CHARS_MAX] + " …"


def _place(text: str) -> str:
    """Where in the query it is, counted from 1."""
    found = _PLACE.search(text)
    if found is None:
        return ""
    line, position = found[1] or found[3], found[2]
    column = int(position) + 1 if position is not None else int(found[4])
    return f" (line {line}, position {column})"

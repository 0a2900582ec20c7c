"""What Spark says when something is wrong, in a sentence and with the place in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import HeadraceError
from headrace.spark.pipelines.sections import InvalidPipeline, Section

SENTENCE_CHARS_MAX = 600
_STATE = re.compile(r"\s*SQLSTATE: \w+")
_CLASS = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_STACK = re.compile(r"\n\s+at [\w.$]+\(|\nJVM stacktrace:|\n== |\n\n\t?JVM")
_PYTHON_ERROR = re.compile(r"^([A-Za-z_][\w.]*): (.*)", re.MULTILINE)
_HERE = "Traceback (most recent call last)"


@contextmanager
def analysed(section: Section, key: str) -> Iterator[None]:
    """What goes wrong in here is a mistake at this place of the file."""
    try:
        yield
    except InvalidPipeline:
        raise
    except HeadraceError as error:
        raise section.wrong(key, error) from error
    except Exception as error:
        raise section.wrong(key, sentence(error)) from error


def sentence(error: BaseException) -> str:
    """What went wrong, without stack traces and plans."""
    text = str(error)
    if _HERE in text:
        return _of_python(text) or _shortened(text)
    desc = getattr(error, "desc", None)
    return _shortened(str(desc) if desc else text or type(error).__name__)


def _of_python(text: str) -> str | None:
    """What a Python worker raised: the last line of its traceback that is an error."""
    traceback = text[text.rindex(_HERE) :]
    traceback = _STACK.split(traceback)[0]
    found = [match for match in _PYTHON_ERROR.finditer(traceback) if match[1] != "SQLSTATE"]
    if not found:
        return None
    name, what = found[-1][1].rpartition(".")[2], found[-1][2]
    ours = found[-1][1].startswith("headrace.")
    return _clipped(what if ours else f"{name}: {what}")


def _shortened(text: str) -> str:
    text = _STACK.split(text)[0]
    text = re.split(r";?\s*\n'?(?:Project|Aggregate|Join|Filter|Sort|Union|\+-|'[A-Z])", text)[0]
    text = _CLASS.sub("", _STATE.sub("", text))
    return _clipped(text)


def _clipped(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SENTENCE_CHARS_MAX else text[: SENTENCE_CHARS_MAX - 1] + "…"

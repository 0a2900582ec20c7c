"""Errors of Spark as sentences: their text, and the end of a traceback."""

import pytest

from headrace.errors import RequestTimeout, TopicNotFound
from headrace.spark.error_sentences import (
    SENTENCE_CHARS_MAX,
    error_of,
    from_traceback,
    is_definite,
    sentence,
)
from headrace.spark.source.positions import DataLoss

WORKER = """Error from python worker: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform latestOffset: Traceback (most recent call last):
  File "pyspark/sql/streaming/python_streaming_source_runner.py", line 197, in main
    latest_offset_func(reader, outfile)
  File "headrace/spark/source/stream.py", line 10, in latestOffset
    raise KeyError(1)
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "headrace/client/link.py", line 145, in ask
    return await future
           ^^^^^^^^^^^^
{error}
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: copy [id = 3d0d393f, runId = c5a0abf9]
Current Committed Offsets: {{}}

Current State: INITIALIZING
Thread State: RUNNABLE
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `amout` cannot be resolved. "
            "Did you mean one of the following? [`amount`]. SQLSTATE: 42703; line 1 pos 7;\n"
            "'Project ['amout]\n+- SubqueryAlias orders\n",
            "A column with name `amout` cannot be resolved. Did you mean one of the following? "
            "[`amount`] (line 1, position 8)",
        ),
        (
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'FORM'. SQLSTATE: 42601 (line 1, pos 9)\n"
            "\n== SQL ==\nSELECT * FORM orders\n---------^^^\n",
            "Syntax error at or near 'FORM' (line 1, position 10)",
        ),
        (
            WORKER.format(error="headrace.errors.TopicNotFound: there is no topic 'orders'"),
            "there is no topic 'orders'",
        ),
        (WORKER.format(error="ValueError: no such luck"), "ValueError: no such luck"),
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted.\n"
            "\tat org.apache.spark.Some.thing(Some.scala:1)\n",
            "Query [id = 1] terminated with exception: Job aborted",
        ),
        ("", "Exception"),
    ],
)
def test_a_sentence(text: str, said: str) -> None:
    """Without the stack, the plan, the class of error and the description of the query."""
    assert sentence(Exception(text)) == said


def test_a_sentence_has_an_end() -> None:
    assert len(sentence(Exception("x" * 100_000))) == SENTENCE_CHARS_MAX


def test_some_errors_do_not_go_away() -> None:
    """Those of ours that say so, whichever side of Spark they were raised on."""
    lost = "headrace.spark.source.positions.DataLoss: offsets 3 to 7 are gone"
    gone = "headrace.errors.OffsetOutOfRange: offsets 3 to 7 are gone"
    assert is_definite(TopicNotFound("there is no topic"))
    assert is_definite(Exception(WORKER.format(error="headrace.errors.TopicNotFound: there")))
    assert is_definite(Exception(WORKER.format(error=gone)))
    assert is_definite(Exception(WORKER.format(error=lost)))
    assert not is_definite(Exception(WORKER.format(error="ConnectFailed: no broker answers")))
    assert not is_definite(Exception("Python worker failed to connect back."))


TRACEBACK = """Traceback (most recent call last):
  File "/somewhere/data_source.py", line 93, in read_span
    store.close()
headrace.errors.OffsetOutOfRange: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/somewhere/reader.py", line 168, in _recover
    raise RequestTimeout(
{last}
"""


def test_an_error_of_ours_is_that_error_again() -> None:
    """The last one, with its code."""
    text = TRACEBACK.format(last="headrace.errors.RequestTimeout: no answer: is it\nrunning?")
    found = from_traceback(text)
    assert type(found) is RequestTimeout
    assert (found.message, found.code) == ("no answer: is it\nrunning?", "timeout")
    text = TRACEBACK.format(
        last="headrace.spark.source.positions.DataLoss: gone\n\tat org.apache.Spark"
    )
    found = from_traceback(text)
    assert type(found) is DataLoss
    assert found.message == "gone"


def test_an_error_of_others_is_one_sentence() -> None:
    """Its last line, and no path of anybody's machine."""
    text = TRACEBACK.replace("headrace.errors.OffsetOutOfRange", "ValueError")
    found = from_traceback(text.format(last="MemoryError: no room"))
    assert (found.message, found.code) == ("MemoryError: no room", "query_failed")
    found = from_traceback(text.format(last="headrace.no_such.Thing: odd"))
    assert (found.message, found.code) == ("Thing: odd", "query_failed")


def test_what_is_ours_already_stays_as_it_is() -> None:
    error = RequestTimeout("late")
    assert error_of(error) is error


FAILED = """[STREAM_FAILED] Query [id = 3d0d393f, runId = c5a0abf9] terminated with exception: {error} SQLSTATE: XXKST
=== Streaming Query ===
Identifier: copy"""


@pytest.mark.parametrize(
    ("error", "definite"),
    [
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012", True),
        (
            "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match. SQLSTATE: 42K06",
            True,
        ),
        ("There are [1] sources in the checkpoint offsets and now there are [2] sources", True),
        ("[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred. SQLSTATE: 58030", False),
        ("Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times", False),
    ],
)
def test_failures_of_spark_that_cannot_heal(error: str, definite: bool) -> None:
    """Its codes tell values and queries that cannot be computed from machines that were busy."""
    from pyspark.errors import StreamingQueryException

    assert is_definite(StreamingQueryException(FAILED.format(error=error))) is definite

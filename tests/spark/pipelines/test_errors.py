"""What Spark says, in a sentence."""

import pytest

from headrace.errors import TopicNotFound
from headrace.spark.pipelines.errors import SENTENCE_CHARS_MAX, analysed, is_definite, sentence
from headrace.spark.pipelines.sections import InvalidPipeline, Section

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
            "[`amount`].; line 1 pos 7",
        ),
        (
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'FORM'. SQLSTATE: 42601 (line 1, pos 9)\n"
            "\n== SQL ==\nSELECT * FORM orders\n---------^^^\n",
            "Syntax error at or near 'FORM'. (line 1, pos 9)",
        ),
        (
            WORKER.format(error="headrace.errors.TopicNotFound: there is no topic 'orders'"),
            "there is no topic 'orders'",
        ),
        (WORKER.format(error="ValueError: no such luck"), "ValueError: no such luck"),
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted.\n"
            "\tat org.apache.spark.Some.thing(Some.scala:1)\n",
            "Query [id = 1] terminated with exception: Job aborted.",
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
    assert not is_definite(Exception(WORKER.format(error=lost)))
    assert not is_definite(Exception(WORKER.format(error="ConnectFailed: no broker answers")))
    assert not is_definite(Exception("Python worker failed to connect back."))


def test_what_goes_wrong_has_a_place() -> None:
    """Errors of ours keep their sentence; those that have a place already keep that."""
    section = Section({}, "a.toml, pipeline p", "to.")
    with (
        pytest.raises(InvalidPipeline, match=r"^a\.toml, pipeline p: to\.table: no$"),
        analysed(section, "table"),
    ):
        raise TopicNotFound("no")
    with pytest.raises(InvalidPipeline, match=r"^there$"), analysed(section, "table"):
        raise InvalidPipeline("there")

"""Errors that need no Spark to be read: the end of a traceback."""

from headrace.errors import RequestTimeout
from headrace.spark.source.positions import DataLoss
from headrace.spark.sql.errors import from_traceback, sentence

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
    assert sentence(error) is error

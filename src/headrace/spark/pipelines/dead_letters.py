"""Rows that failed become messages that say why.

A dead letter of a pipeline looks as one of the broker: the message as it was, and headers that say where
it came from and what was wrong with it. So the commands for dead letters work on both. The names of
the headers are the broker's (``broker/dead_letters.py``; a test holds the two together).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from headrace.model import DEAD_LETTER_HEADERS
from headrace.spark.pipelines.inputs import REASON
from headrace.spark.record_headers import with_headers

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TOPIC, PARTITION, OFFSET, ID, SUBSCRIPTION, REASON_HEADER, ATTEMPTS, TIME = DEAD_LETTER_HEADERS
REASON_CHARS_MAX = 1000


def letters_of_input(bad: DataFrame, subscription: str, topic: str) -> DataFrame:
    """Records that failed before the transformation, as messages."""
    origin = {TOPIC: "topic", PARTITION: "partition", OFFSET: "offset", ID: "id"}
    named = {header: F.col(column) for header, column in origin.items()}
    named[TIME] = F.unix_millis(F.col("timestamp"))
    return bad.select(
        F.col("key").cast("binary").alias("key"),
        F.col("value").cast("binary").alias("value"),
        letter_headers(F.col("headers"), F.col(REASON), subscription, named).alias("headers"),
        F.lit(topic).alias("topic"),
    )


def letter_headers(
    headers: Column | None,
    reason: Column,
    subscription: str,
    named: dict[str, Column] | None = None,
) -> Column:
    """The message's own headers, and after them those of a dead letter."""
    added = {
        **(named or {}),
        SUBSCRIPTION: F.lit(subscription),
        REASON_HEADER: one_line(reason),
        ATTEMPTS: F.lit("1"),
    }
    return with_headers(headers, added, DEAD_LETTER_HEADERS)


def one_line(reason: Column) -> Column:
    """As a header can carry it, whatever a function wrote."""
    text = F.regexp_replace(reason.cast("string"), r"[\s\p{Cc}]+", " ")
    return F.substring(F.trim(text), 1, REASON_CHARS_MAX)

"""Spark reads and writes topics: source, sink, pipelines, lake tables, and a session for all of it.

::

    pyspark_headrace*      what Spark finds by itself for format("headrace…"); it only points here
    source/                the batch and the streaming reader
    sink/                  the writers: staged on executors, committed once by the driver
    lake/                  Delta and Iceberg tables written exactly once
    pipelines/             queries that a file declares
    builtin/               archive and replay
    sql/                   topics as views
    history/               a log and its archive as one table
    letters                dead letters as a table, and back
    report/                what a broker did, as a page with plots
    sessions/              a tuned session in one line, and the Java it needs
    options  connection    options by name, and how a broker is reached
    notation               how users write times, durations, ranges and schemas
    error_sentences        errors of Spark, and of Python in its workers, as one sentence
    mentioned_columns      which columns a statement can read, by the names in its text
    json_texts             Arrow columns as JSON, for the sink and for results of SQL
    record_headers         headers of records as a column
    checkpoints            what Spark wrote about a batch, on disk before the batch is committed
    durable                files that survive a power cut, and locks

Rules: only the command line imports this room, and it does so late. PySpark is imported where it is used,
so that ``import headrace.spark`` costs nothing and never fails; the public names are imported when they
are asked for. A reader or writer is pickled to executors: it holds options and positions, never a
connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.late_imports import late_imports

if TYPE_CHECKING:
    from headrace.spark.sessions.builder import package_zip, session
    from headrace.spark.sessions.java import use_java

__all__ = ["package_zip", "session", "use_java"]

__getattr__ = late_imports(
    __name__,
    {
        "session": "sessions.builder",
        "package_zip": "sessions.builder",
        "use_java": "sessions.java",
    },
)

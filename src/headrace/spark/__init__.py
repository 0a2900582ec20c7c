"""Spark reads and writes topics: source, sink, pipelines, lake tables, and a session for all of it.

::

    pyspark_headrace       what Spark finds by itself for format("headrace"); it only points here
    options  positions     what a user may say, and offsets per topic and partition
    stores   directory     where records are read: a live broker, or a data directory with no broker
    arrow    outgoing      columnar batches to Arrow and back, with no work per record
    rows     json_values   from a schema to columns; the fields of JSON values as typed columns
    source   stream        the batch and the streaming reader
    filters  group         filters as narrower ranges; a stream's progress as a subscription
    sink                   the writers: staged on executors, committed once by the driver
    lake/                  Parquet, Delta and Iceberg tables written exactly once
    pipelines/             what a file declares, run
    builtin/               archive, traffic and replay
    handing_over           how Spark hands rows to Python, fast
    sessions java  sql     a tuned session in one line, the Java it needs, topics as views

Rules: nothing here is imported by the rest of Headrace but the command line, which imports it late.
PySpark is imported where it is used, so that ``import headrace.spark`` costs nothing and fails for
nobody; what is public here is fetched when it is asked for. A reader or writer is pickled to
executors: it holds options and positions, never a connection.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.sessions import package_zip, session

__all__ = ["package_zip", "session"]

_PUBLIC = {"session": "sessions", "package_zip": "sessions"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"headrace.spark.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

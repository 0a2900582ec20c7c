"""Pipelines: a small file declares them, Spark runs them until a user stops them.

::

    sections         values of a declaration, read strictly: errors name the file, the pipeline, the key
    declaration      what a pipeline is: inputs, a transformation, an output
    files            a TOML or Python file becomes pipelines
    functions        ``@pipeline`` and ``each_row`` for Python files
    inputs           topics and tables become DataFrames; rows that fail are set apart
    outputs          a DataFrame becomes messages or a table
    dead_letters     rows that failed become messages that say why
    planning         a pipeline becomes queries, checked but not started
    running          starts them, watches over them, stops them after a whole batch
    reporting        how they get on: for the terminal and for the broker

A file in TOML, with everything that can be said. Only ``from`` (or ``inputs``) and ``to`` are needed::

    servers = "127.0.0.1:9999"              # for all pipelines of the file
    checkpoint_dir = "/var/lib/pipelines"   # a folder for each pipeline; default: <file>.state beside it

    [spark]                                 # settings of the session
    "spark.sql.shuffle.partitions" = 4

    [pipeline.revenue]                      # from JSON messages, through SQL, to a topic
    from = "orders"                         # a topic, a list, a wildcard: orders.*  orders.>
    format = "json"                         # binary (default), text, json
    schema = "id STRING, customer STRING, amount DOUBLE, at TIMESTAMP"
    starting = "earliest"                   # where the first run begins: earliest (default), latest, a time
    watermark = "at 10 minutes"             # rows that are older than the newest by more than this are late
    deduplicate = ["id"]                    # a repeated id within the watermark is dropped
    expect = ["amount > 0"]                 # rows of which this is not true have failed
    sql = '''
      SELECT customer, window(at, '1 hour').start AS hour, sum(amount) AS revenue
      FROM orders GROUP BY customer, window(at, '1 hour')
    '''
    ensure = ["revenue IS NOT NULL"]        # the same for rows that come out
    to = { topic = "revenue", key = "customer" }
    failed = "revenue.dlq"                  # where rows that failed go; true: <pipeline>.dlq
    trigger = "10 seconds"                  # default: as soon as there is something; "once" for cron
    mode = "append"                         # or complete: all groups again with every batch, into a topic
    group = "revenue"                       # the subscription that shows its lag; default: the pipeline
    checkpoint = "/state/revenue"           # instead of a folder in checkpoint_dir
    options = { maxBytesPerTrigger = "256MB" }          # of the source; to = { …, options = { … } }: of the sink
    restarts = 3                            # restarts in a row after an error
    spark = { "spark.sql.ansi.enabled" = false }

    [pipeline.shipped]                      # two topics and a table, joined, into a lake table
    sql = '''
      SELECT o.id, o.customer, c.country, s.at AS shipped_at, to_date(s.at) AS day
      FROM orders o
      JOIN shipments s ON o.id = s.order_id AND s.at BETWEEN o.at AND o.at + INTERVAL 7 DAYS
      LEFT JOIN customers c ON o.customer = c.id
    '''
    to = { table = "lake/shipped", format = "delta", partition_by = ["day"] }
    [pipeline.shipped.inputs.orders]
    from = "orders"
    format = "json"
    schema = "id STRING, customer STRING, at TIMESTAMP"
    watermark = "at 1 hour"
    [pipeline.shipped.inputs.shipments]
    from = ["shipments.eu", "shipments.us"]
    format = "json"
    schema = "order_id STRING, at TIMESTAMP"
    watermark = "at 1 hour"
    [pipeline.shipped.inputs.customers]
    table = "customers.parquet"             # read when the query starts, and not again
    format = "parquet"                      # parquet, csv, json, orc, delta, iceberg

The same in Python, where a function takes the place of the SQL (in TOML: ``function = "module:name"``)::

    from headrace.spark.pipelines import pipeline

    @pipeline(from_="orders", format="json", schema="id STRING, amount DOUBLE", to="large", failed=True)
    def large_orders(orders):
        return orders.where("amount > 1000")

    SETTINGS = {"checkpoint_dir": "/var/lib/pipelines"}     # what stands at the head of a TOML file

What a row looks like
=====================
Of a ``binary`` or ``text`` topic the columns are those of the source: ``key, value, topic, partition,
offset, timestamp, headers, id``. Of a ``json`` topic they are the fields of the schema, and the record's
own with an underscore in front (``_key, _value, _topic, _partition, _offset, _timestamp, _headers,
_id``), so that no field is mistaken for them. Columns with an underscore in front do not leave a pipeline:
name them (``_offset AS offset``) to keep them. A single input is the view ``input``, and has the name of
its topic too, where that has no dot and is one; of several, each has the name under ``inputs``.

Into a topic goes a JSON object of all columns. Where all columns are columns of a record, and
``value`` is one of them, they are the message itself (``key, value, headers, deliver_at``;
where a record came from means nothing elsewhere). ``to`` can say which column is what: ``to = { topic =
"t", key = "customer", value = "body", headers = …, partition = …, timestamp = …, deliver_at = … }``, or
``topic_from = "column"`` instead of a topic. Without SQL and function, records go on as they came.

Rows that fail
==============
With ``failed``, these rows go to that topic, with the reason, and the query goes on:

- a message that is not JSON of the schema (a field that lacks is null and no failure);
- a row of which a condition in ``expect`` or ``ensure`` is not true (false, or null);
- a row that comes out of the transformation with a reason in a column ``_failed``: SQL of one's own
  (``CASE WHEN try_cast(x AS INT) IS NULL THEN 'x is no number' END AS _failed``), or :func:`each_row`,
  which calls a Python function for each row and makes a reason of what it raises;
- a message for a topic that is larger than the broker takes, or whose value is null.

A dead letter is the message as it was, with the same headers that the broker gives to its own (the
origin's topic, partition, offset and id, the reason), so ``headrace dlq list|show|redrive PIPELINE`` work on
a topic ``<pipeline>.dlq``. Of a row that came out, it is the row as JSON.

An expression that raises is *not* a row that fails. Spark's SQL is strict by default, so ``CAST('x'
AS INT)`` or a division by zero ends the query, and every restart of it, at the same row. Use
``try_cast`` and ``try_divide``, or switch the strictness off for the pipeline (``spark`` above: then
the result is null, and ``ensure`` can tell). The same holds for Python functions that are called by
Spark in other ways than ``each_row``.

Exactly once
============
Into a topic, good rows and dead letters are written by *one* query, in one atomic commit. Into a
table, dead letters are written by a second query (``<pipeline>.failed``) with a checkpoint of its own,
so each row goes exactly once to one of the two, but not at the same moment; the topic is read twice. A
stateful transformation is then done twice as well, and where rows come too late for a watermark the two
need not agree on which: prefer ``expect`` to ``ensure`` there.

All of it hangs on the checkpoint: it knows what was read, and the query's id by which sinks know what
was committed. With a lost or another checkpoint a pipeline begins anew, and writes again what it had
written.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.pipelines.files import PipelineFile, load
    from headrace.spark.pipelines.functions import each_row, pipeline

__all__ = ["PipelineFile", "each_row", "load", "pipeline"]

_PUBLIC = {
    "PipelineFile": "files",
    "each_row": "functions",
    "load": "files",
    "pipeline": "functions",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

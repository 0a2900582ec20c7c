"""Pipelines that a small file declares and Spark runs until they are stopped.

::

    sections         values of a declaration, read strictly: errors name the file, the pipeline, the key
    declaration      a pipeline: inputs, a transformation, an output
    files            a TOML or Python file becomes pipelines
    functions        ``@pipeline`` and ``each_row`` for Python files
    inputs           topics and tables become DataFrames; rows that fail are set apart
    outputs          a DataFrame becomes messages or a table
    dead_letters     rows that failed become messages with the reason
    planning         a pipeline becomes queries, checked but not started
    running          starts them, watches over them, stops them after a whole batch
    reporting        their progress, for the terminal and for the broker

A file in TOML with all keys. Only ``from`` (or ``inputs``) and ``to`` are required::

    servers = "127.0.0.1:9999"              # for all pipelines of the file
    checkpoint_dir = "/var/lib/pipelines"   # a folder for each pipeline; default: <file>.state beside it

    [spark]                                 # settings of the session
    "spark.sql.shuffle.partitions" = 4

    [pipeline.revenue]                      # from JSON messages, through SQL, to a topic
    from = "orders"                         # a topic, a list, a wildcard: orders.*  orders.>
    format = "json"                         # binary (default), text, json
    schema = "id STRING, customer STRING, amount DOUBLE, at TIMESTAMP"
    starting = "earliest"                   # where the first run begins: earliest (default), latest, a time
    watermark = "at 10 minutes"             # rows that are older than the newest by more are too late
    deduplicate = ["id"]                    # a repeated id within the watermark is dropped
    expect = ["amount > 0"]                 # a row for which this is not true fails
    sql = '''
      SELECT customer, window(at, '1 hour').start AS hour, sum(amount) AS revenue
      FROM orders GROUP BY customer, window(at, '1 hour')
    '''
    ensure = ["revenue IS NOT NULL"]        # the same for rows of the result
    to = { topic = "revenue", key = "customer" }
    failed = "revenue.dlq"                  # the topic for rows that fail; true: <pipeline>.dlq
    trigger = "10 seconds"                  # default: as soon as there are records; "once" for cron
    mode = "append"                         # or complete: all groups again with every batch, into a topic
    group = "revenue"                       # the subscription that shows its lag; default: the pipeline
    checkpoint = "/state/revenue"           # instead of a folder in checkpoint_dir
    options = { maxBytesPerTrigger = "256MB" }          # of the source; to = { …, options = { … } }: of the sink
    restarts = 3                            # how often in a row it is restarted after an error
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

    SETTINGS = {"checkpoint_dir": "/var/lib/pipelines"}     # the keys at the head of a TOML file

Columns
=======
The columns of a ``binary`` or ``text`` topic are those of the source: ``key, value, topic, partition,
offset, timestamp, headers, id``. The columns of a ``json`` topic are the fields of the schema, and the
record's own with an underscore in front (``_key, _value, _topic, _partition, _offset, _timestamp,
_headers, _id``), so that no field is mistaken for them. Columns with an underscore in front do not leave a
pipeline: rename them (``_offset AS offset``) to keep them. A single input is the view ``input``, and also
has its topic's name if that is one name without a dot; several inputs have their names under ``inputs``.

A row becomes a message whose value is a JSON object of all columns. If all columns of the result are
columns of a record, and ``value`` is one of them, they are the message itself (``key, value, headers,
deliver_at``; the record's origin is left out). ``to`` can name the columns: ``to = { topic = "t", key =
"customer", value = "body", headers = …, partition = …, timestamp = …, deliver_at = … }``, or ``topic_from =
"column"`` instead of a topic. Without SQL and function, records are copied as they are.

Rows that fail
==============
With ``failed``, these rows go to that topic, with the reason, and the query continues:

- a message that is not JSON of the schema (a missing field is null and no failure);
- a row for which a condition in ``expect`` or ``ensure`` is not true (false, or null);
- a row of the result with a reason in a column ``_failed``: from your SQL
  (``CASE WHEN try_cast(x AS INT) IS NULL THEN 'x is no number' END AS _failed``), or :func:`each_row`,
  which calls a Python function for each row and takes the exception as the reason;
- a message for a topic that is larger than the broker takes, or whose value is null.

A dead letter is the unchanged message, with the headers of the broker's own dead letters (the
origin's topic, partition, offset and id, the reason), so ``headrace dlq list|show|redrive PIPELINE`` work on
a topic ``<pipeline>.dlq``. The dead letter of a row of the result is the row as JSON.

An expression that raises is *not* a row that fails. Spark's SQL is strict by default, so ``CAST('x'
AS INT)`` or a division by zero ends the query, and every restart of it, at the same row. Use
``try_cast`` and ``try_divide``, or switch the strictness off for the pipeline (``spark`` above: then
the result is null, and ``ensure`` can check it). The same holds for Python functions that Spark calls in
other ways than ``each_row``.

Exactly once
============
Into a topic, good rows and dead letters are written by *one* query, in one atomic commit. Into a
table, dead letters are written by a second query (``<pipeline>.failed``) with a checkpoint of its own,
so each row goes exactly once to one of the two, but not at the same moment; the topic is read twice. A
stateful transformation is then done twice as well, and the two may differ in which rows are too late for a
watermark: prefer ``expect`` to ``ensure`` there.

All of this depends on the checkpoint: it holds the offsets that were read, and the query's id by which
sinks know which batches were committed. With a lost or another checkpoint a pipeline begins anew, and
writes its rows again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.late_imports import late_imports

if TYPE_CHECKING:
    from headrace.spark.pipelines.files import PipelineFile, load
    from headrace.spark.pipelines.functions import each_row, pipeline

__all__ = ["PipelineFile", "each_row", "load", "pipeline"]

__getattr__ = late_imports(
    __name__,
    {"PipelineFile": "files", "each_row": "functions", "load": "files", "pipeline": "functions"},
)

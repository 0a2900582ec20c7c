"""Reading topics with Spark: batch queries and streams.

::

    options                 the options of reading
    data_source  stream     what Spark asks of a source: the batch and the streaming reader
    positions               offsets per topic and partition
    stores  directory       where records are read: a live broker, or a data directory with no broker
    arrow                   columnar batches to Arrow, with no work per record
    rows  json_values       from a schema to columns; the fields of JSON values as typed columns
    filters  group          filters as narrower ranges; a stream's progress as a subscription
"""

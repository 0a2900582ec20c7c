"""Pipelines that are there without being written: archive, traffic, replay.

::

    archive      topics into a lake table, exactly once, with a manifest of offset ranges
    verifying    whether an archive and the log hold the same records
    traffic      what goes through topics and subscriptions, minute by minute
    replay       a topic or a table back into a topic, at a rate
    repeating    work that is done in rounds, watched and stopped like a query
    copying      records from the log into files, past Spark's rows

Each is a function that takes a Spark session and plain arguments; the commands over them are in
``headrace.cli``. What runs on is a job for the runner of ``headrace.spark.pipelines``.
"""

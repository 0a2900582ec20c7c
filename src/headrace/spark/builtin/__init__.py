"""Ready-made pipelines: archive and replay.

::

    archive      topics into a lake table, exactly once, with a manifest of offset ranges
    verifying    whether an archive and the log hold the same records
    replay       a topic or a table back into a topic, in numbered steps, at a rate
    copying      records from the log into files, past Spark's rows

Each is a function that takes a Spark session and plain arguments; the commands over them are in
``headrace.cli``. What runs on is a job for the runner of ``headrace.spark.pipelines``.
"""

"""Ready-made pipelines: archive and replay.

::

    archive           topics into a lake table, exactly once, with a manifest of offset ranges
    archive_source    records from the log straight into files, without Spark's rows
    archive_verify    whether an archive and the log hold the same records
    offset_ranges     the records at some offsets, of topics and of tables
    replay            a topic or a table back into a topic, in numbered steps, at a rate

Each is a function that takes a Spark session and plain arguments; the commands over them are in
``headrace.cli``. The runner of ``headrace.spark.pipelines`` runs an archive as a job.
"""

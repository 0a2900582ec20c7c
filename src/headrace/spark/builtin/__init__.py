"""Pipelines that are there without being written: archive, traffic, replay.

::

    archive      topics into a lake table, exactly once, with a manifest of offset ranges
    verifying    whether an archive and the log hold the same records
    traffic      what goes through topics and subscriptions, minute by minute
    replay       a topic or a table back into a topic, at a rate
    watching     how long-running work is shown: jobs and queries as progress

Each is a function that takes a Spark session and plain arguments; the commands over them are in
``headrace.cli``.
"""

"""A Spark session that is set up for Headrace, and what runs around one.

::

    builder  java           a tuned session in one line, and the Java that it needs
    shell_scripts           scripts that stand between Spark and a program that it starts
    active_session          the session in which a thread looks for sources
    arrow_batches           how large the Arrow batches are that Spark hands to Python
    stop_flag               how a signal handler or a thread asks for an end

The room is not called ``session``: a module hides a function of its name in its package, and
``headrace.spark.session`` is a function.
"""

"""Writing topics with Spark: rows are staged by executors and committed once by the driver.

::

    writers                 what Spark asks of a sink: staging, commit, abort
    outgoing                from rows to the pieces that are sent to the broker
    encoding                Arrow columns to columnar batches
"""

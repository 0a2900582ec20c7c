"""What Spark finds by itself: ``spark.read.format("headrace")`` and the same for streams and writes.

Spark imports every top-level module named ``pyspark_*`` and takes its ``DefaultSource``; one that fails
at import would hide all the others, so nothing is imported here that could be missing.
"""

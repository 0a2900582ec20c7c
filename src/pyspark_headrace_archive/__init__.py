"""``format("headrace_archive")``, which Spark finds by itself (see ``pyspark_headrace``)."""

from pyspark_headrace import default_source

__getattr__ = default_source("headrace.spark.builtin.archive_source", "ArchiveSource")

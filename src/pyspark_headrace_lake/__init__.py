"""``format("headrace_lake")``, which Spark finds by itself (see ``pyspark_headrace``)."""

from pyspark_headrace import default_source

__getattr__ = default_source("headrace.spark.lake.sink", "LakeSource")

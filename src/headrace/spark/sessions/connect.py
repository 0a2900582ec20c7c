"""Spark Connect: sessions whose Spark is a server elsewhere (``sc://host:15002``).

The client has no JVM, and needs ``pyspark[connect]``. Formats run in the server and its executors, so
these need the package, reach the broker, and see the tables' directories by the same paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace import limits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_connect(spark: SparkSession) -> bool:
    return ".connect." in type(spark).__module__


def connected(address: str, settings: Mapping[str, str]) -> SparkSession:
    """A session on the server. Settings that only a start of Spark can take are left as they are there."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(address).getOrCreate()
    for name, value in settings.items():
        if name.startswith("spark.sql.") and spark.conf.isModifiable(name):
            spark.conf.set(name, value)
    return spark


def cores_of(spark: SparkSession) -> int:
    """How many tasks run at once; Spark Connect does not say."""
    return limits.cores() if is_connect(spark) else spark.sparkContext.defaultParallelism

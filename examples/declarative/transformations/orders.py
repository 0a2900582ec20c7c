"""From topic to table, and from table to topic: each record once, however often you run it."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()

ORDERS = "id STRING, country STRING, amount DOUBLE, _offset BIGINT, _timestamp TIMESTAMP, _corrupt STRING"


@dp.table(
    comment="The orders, as they were published. Each run appends the orders since the last run."
)
def orders() -> DataFrame:
    return (
        spark.readStream.format("headrace")
        .options(topic="orders", startingOffsets="earliest", valueFormat="json")
        .schema(ORDERS)
        .load()
        .where("_corrupt IS NULL")
        .drop("_corrupt")
    )


# Rows without a column "value" are written as JSON objects.
dp.create_sink("large_orders", "headrace", {"topic": "orders.large", "keyColumn": "country"})


@dp.append_flow(target="large_orders")
def find_large_orders() -> DataFrame:
    """Write large orders to the topic, for people who check them."""
    return spark.readStream.table("orders").where("amount >= 100").select("id", "country", "amount")

"""A batch query: the records that a topic holds now, as a DataFrame.

    make spark && . .venv/bin/activate
    headrace serve                      in another terminal
    python examples/spark/batch.py

It publishes some orders and computes the revenue by country. If a topic is read as JSON, its fields
are columns. To get the record's own columns too, name them with an underscore, like ``_offset``.
"""

import os

from pyspark.sql import functions as F

from headrace import BrokerClient
from headrace.spark import session

SERVERS = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999")
ORDERS = "country STRING, amount DOUBLE, _offset BIGINT, _corrupt STRING"


def publish() -> None:
    host, _, port = SERVERS.partition(":")
    with BrokerClient(host, int(port)) as client:
        countries = ("de", "fr", "it")
        orders = [f'{{"country": "{countries[n % 3]}", "amount": {n}.5}}' for n in range(300)]
        client.publish_many("shop-orders", [*map(str.encode, orders), b"this is no JSON"])


def main() -> None:
    publish()
    spark = session("batch")
    orders = (
        spark.read.format("headrace")
        .options(servers=SERVERS, topic="shop-orders", valueFormat="json")
        .schema(ORDERS)
        .load()
    )
    good = orders.where("_corrupt IS NULL")
    revenue = good.groupBy("country").agg(
        F.count("*").alias("orders"), F.sum("amount").alias("sum")
    )
    for row in revenue.orderBy("country").collect():
        print(f"{row.country}: {row.orders} orders, {row['sum']:.2f}")
    for row in orders.where("_corrupt IS NOT NULL").collect():
        print(f"no order, at offset {row._offset}: {row._corrupt}")


if __name__ == "__main__":
    main()

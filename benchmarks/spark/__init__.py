"""What Spark costs with Headrace: ``make bench-spark``, or ``python -m benchmarks.spark [NAME…]``.

::

    scan      count and sum(length(value)) of a topic, beside a bare Python source that yields the same
              Arrow batches from memory, Parquet, and Spark's own Kafka connector on a real Kafka
    sink      rows a second into a topic, beside a bare Arrow writer that keeps nothing
    trigger   how long a small batch takes from source to sink
    archive   a topic into a lake table
    upsert    a topic merged into a lake table by key, beside delta-rs with rows in memory
    history   log and archive as one table, beside each of the two alone
    growth    the same work with 1, 10 and 50 times as many records

A live broker in a process of its own, ``local[2]``, records of 100 random bytes. Cases of one benchmark
are interleaved, and each is run once before it counts. The raw numbers go into ``results/spark_*.json``.
"""

"""A notebook: a session in one line, topics as tables, results as DataFrames.

headrace serve                      in another terminal
python examples/spark/notebook.py   or cell by cell, in an editor that knows "# %%"
"""

# %%
import os

from headrace import BrokerClient
from headrace.spark import session
from headrace.spark.sql import TopicSql

SERVERS = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999")
spark = session("notebook")

# %% Publish some data: a thousand requests to a web site.
host, _, port = SERVERS.partition(":")
with BrokerClient(host, int(port)) as client:
    requests = [
        f'{{"path": "/page/{n % 7}", "status": {500 if n % 50 == 0 else 200}, "ms": {n % 90}}}'
        for n in range(1000)
    ]
    client.publish_many("requests", [text.encode() for text in requests])

# %% Each topic is a table with its name. Its columns are inferred from a sample of its records.
topics = TopicSql(spark, {"servers": SERVERS}, note=print)
slowest = topics.query("""
    SELECT path, count(*) AS requests, max(ms) AS slowest
    FROM requests GROUP BY path ORDER BY path LIMIT 3
""")
slowest.show()

# %% The result is a DataFrame like any other.
errors = topics.query("SELECT path, _offset FROM requests WHERE status = 500")
print(f"{errors.count()} errors, the first at offset {errors.agg({'_offset': 'min'}).first()[0]}")

# %%
topics.close()

"""Exactly once under real faults: drivers, JVMs, Python workers and brokers are killed at work.

::

    producer ──▶ topic "in" ──▶ Spark: source, transform, sink ──▶ topic, or table
                    ▲                     ▲
               SIGKILL broker      SIGKILL driver, JVM, worker

``runner.py`` starts, kills and starts again; ``driver.py`` is the process that runs the query, and is told
what to run by ``pipelines.py``. In the end what came out must be what went in, each record once.
``make faults-spark`` kills thirty times, an ordinary test three times.
"""

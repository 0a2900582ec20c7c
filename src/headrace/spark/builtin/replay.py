"""A topic or a lake table back into a topic, at a rate, exactly once. (Being written.)

::

    offsets ──▶ steps (numbered, fixed at the first run) ──▶ rounds of steps: one Spark job each
                                                              │ reads, filters, stages per step
                target topic ◀── commit (name, step) at the rate ◀──┘

- What is replayed is a set of offset ranges, cut into numbered steps when the replay is first run; the
  plan is kept in a file under the replay's name. A step takes the same share of every partition, so
  partitions move on together as they did at first.
- A step is a commit ``(name, number)`` in the broker, which does it once, however often it is tried.
- Each record gets the header ``headrace-replayed-from``: ``topic/partition@offset``.
"""

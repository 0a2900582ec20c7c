"""The whole broker in one thread, on a clock, a disk and a loop that a seed decides.

A *life* is one seed: the real ``Engine`` with its log, journal, schedule, dead letters, staged commits and retention,
on the fakes of ``tests/fakes``; clients that use its features in any combination (``clients.py``); disk jobs that end
in any order, or not before the power is cut; restarts, kills, power cuts at any disk operation, failing writes
and syncs, clock jumps. The oracle (``logs.py``: what stands in the topics; ``groups.py``: what is delivered) is
a plain model of what may and what must happen. At the end of a life the faults stop, and everything has to arrive.

Rules:
- Same seed, same life, in any process: only ``Random(seed)`` decides. A failing seed is printed with the last
  steps, and ``python -m tests.faults simulation --seed N`` repeats it.
- Each life uses a random subset of the features with random weights (swarm testing): a life that does only
  three things does them in depth.
- What is asked for is noted before the call, what is answered in the answer. A call that a cut interrupted
  is *unknown*: it may have happened or not, and the oracle accepts both, but not a mixture.
- The oracle reads the broker's answers, deliveries and logs. It looks at internals (positions, queues) only for
  liveness at the end.

Rejected: hypothesis (a life of a hundred steps shrinks slowly, and its state is not a value); checking
against a second implementation (it would have to make the same choices: which member, which batch).
"""

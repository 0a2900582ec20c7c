"""Break a broker on purpose, in every way that we know of, and look for what it lost.

``make faults`` runs all of it, ``python -m tests.faults kills crash-states --quick`` a part. Each kind of fault
is a *scenario* (``scenarios.py`` lists them). A run ends with a table: scenario, amount, anomalies, seconds,
and the command that repeats it; the same goes as JSON into a file, from which docs/reliability.md is written.

Rules:
- A scenario has an oracle of its own: it never asks the broker whether the broker was right.
- Safety and liveness. After the faults stop everything is delivered: in flight 0, lag 0; memory and open files
  are back, and retention has shrunk the disk.
- Everything that is random follows from one seed, which is printed first. The simulation and the crash states
  replay exactly; where real processes, sockets and signals take part, the load replays and its timing does not.
- An absent tool or right (strace, root) is said, in the table as well, and never counts as success.
- Every process that is started is stopped, by its pid.

Rejected: one big soak test with all faults at once (a finding is hard to read, and cannot be replayed); fault
injection inside of the broker (what is tested is what is shipped).
"""

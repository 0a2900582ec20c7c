"""What tests start instead of the real thing: time, threads and disks that do as they are told.

Everything that Headrace takes from the machine goes into constructors, and each of these fits where
the real one does:

======================  ======================  =================================================
fake                    instead of              what it is for
======================  ======================  =================================================
:class:`FakeLoop`       an asyncio loop         timers run when the test says that time has passed
:class:`FakeClock`      ``clock.Clock``         the wall clock follows the loop, or jumps
:class:`InlineWorkers`  ``log.workers.Workers`` disk jobs without threads, held back on demand
:class:`FaultyFiles`    ``files.Files``         counts every call and lets the Nth of them fail
:class:`SimulatedFiles` ``files.Files``         a disk in memory that can lose power
======================  ======================  =================================================
"""

from headrace.testing.faults import Call, Fault, FaultyFiles
from headrace.testing.simulated import SimulatedFiles
from headrace.testing.time import FakeClock, FakeLoop
from headrace.testing.workers import InlineWorkers

__all__ = [
    "Call",
    "FakeClock",
    "FakeLoop",
    "Fault",
    "FaultyFiles",
    "InlineWorkers",
    "SimulatedFiles",
]

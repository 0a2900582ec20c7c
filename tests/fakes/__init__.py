"""Time, threads and disks that do as they are told.

Everything that Headrace takes from the machine goes into constructors, and each of these fits where
the real one does:

======================  ======================  =================================================
fake                    instead of              what it is for
======================  ======================  =================================================
:class:`FakeLoop`       an asyncio loop         timers run when the test says that time has passed
:class:`RunningLoop`    the same                the loop that runs here: reads in it do not wait for the disk
:class:`FakeClock`      ``clock.Clock``         the wall clock follows the loop, or jumps
:class:`InlineWorkers`  ``log.workers.Workers`` disk jobs without threads, held back on demand
:class:`FaultyFiles`    ``files.Files``         counts every call and lets the Nth of them fail
:class:`SimulatedFiles` ``files.Files``         a disk in memory that can lose power
:class:`Mains`          ``files.Files``         the power fails at a planned operation of that disk
:class:`SlowStorage`    ``log.storage``         logs whose reads complete later, as over a network
======================  ======================  =================================================
"""

from tests.fakes.faults import Call, Fault, FaultyFiles
from tests.fakes.power import Mains, PowerFailed
from tests.fakes.simulated import SimulatedFiles
from tests.fakes.slow import SlowStorage
from tests.fakes.time import FakeClock, FakeLoop, RunningLoop
from tests.fakes.workers import InlineWorkers

__all__ = [
    "Call",
    "FakeClock",
    "FakeLoop",
    "Fault",
    "FaultyFiles",
    "InlineWorkers",
    "Mains",
    "PowerFailed",
    "RunningLoop",
    "SimulatedFiles",
    "SlowStorage",
]

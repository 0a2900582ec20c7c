"""What tests start: real servers, and time, threads and disks that do as they are told.

``running_server()`` and ``server_process()`` start a real broker on a free port of this machine, in a
thread or as a process; ``headrace.testing.fixtures`` has them as pytest fixtures.

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
:class:`SlowStorage`    ``log.storage``         logs whose reads complete later, as over a network
======================  ======================  =================================================
"""

from headrace.testing.faults import Call, Fault, FaultyFiles
from headrace.testing.servers import (
    Address,
    DidNotStart,
    RunningServer,
    ServerProcess,
    running_server,
    server_process,
    wait_until,
)
from headrace.testing.simulated import SimulatedFiles
from headrace.testing.slow import SlowStorage
from headrace.testing.time import FakeClock, FakeLoop
from headrace.testing.workers import InlineWorkers

__all__ = [
    "Address",
    "Call",
    "DidNotStart",
    "FakeClock",
    "FakeLoop",
    "Fault",
    "FaultyFiles",
    "InlineWorkers",
    "RunningServer",
    "ServerProcess",
    "SimulatedFiles",
    "SlowStorage",
    "running_server",
    "server_process",
    "wait_until",
]

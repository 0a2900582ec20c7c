"""Real brokers for tests.

``running_server()`` and ``server_process()`` start a real broker on a free port of this machine, in a
thread or as a process; ``headrace.testing.fixtures`` has them as pytest fixtures.
"""

from headrace.testing.servers import (
    Address,
    DidNotStart,
    RunningServer,
    ServerProcess,
    running_server,
    server_process,
    wait_until,
)

__all__ = [
    "Address",
    "DidNotStart",
    "RunningServer",
    "ServerProcess",
    "running_server",
    "server_process",
    "wait_until",
]

"""Bytes on disk: batches, segments, partitions, group commit, recovery.

The broker uses ``interface.Log`` and ``interface.Storage``; ``storage`` opens the two engines,
``partition.PartitionLog`` (disk) and ``memory.MemoryLog``. This package has no subscriptions and no sockets.
"""

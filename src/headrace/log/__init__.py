"""Bytes on disk: batches, segments, partitions, group commit, recovery.

The broker knows ``interface.Log`` and ``interface.Storage``; ``storage`` opens the two engines,
``partition.PartitionLog`` (disk) and ``memory.MemoryLog``. Nothing here knows subscriptions or sockets.
"""

"""Bytes on disk: batches, segments, partitions, group commit, recovery.

``interface.Log`` is all that the broker knows of this room; ``partition.PartitionLog`` (disk) and
``memory.MemoryLog`` are the two engines behind it. Nothing here knows topics, subscriptions or
sockets.
"""

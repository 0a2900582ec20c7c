"""Moving a whole broker into a cluster and back: topics, messages, subscriptions, positions, producers.

    importing.py   a data directory, or a generation of a backup → a cluster
    digest.py      counts and checksums of messages, the same however they are batched

The way back is a backup of the cluster (``headrace.backup``), restored as a data directory; ``cli/moving.py`` does that.

Offsets, ids, times, keys, headers, positions, attempts, delayed messages, dead letters, staged batches and named producers
are the same afterwards, so clients notice nothing but the new address.
"""

"""A bound on everything. Each has its unit in its name, and its reason below it.

Some are the defaults or ceilings of settings that a user may change. The others follow from the format
or protect against hostile input. A bound is checked *before* memory is allocated.
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from functools import cache

# --- names -----------------------------------------------------------------------------------
TOPIC_NAME_CHARS_MAX = 249
"""A topic is a directory; file systems stop at 255 bytes, and suffixes need room."""
SUBSCRIPTION_NAME_CHARS_MAX = 200
"""Leaves room for ``.dlq`` after it in a topic name."""

# --- the model ---------------------------------------------------------------------------------
PARTITIONS_PER_TOPIC_MAX = 4096
"""The partition has 12 bits in a derived message id."""
OFFSET_MAX = (1 << 62) - 1
"""The offset has 62 bits in a derived message id."""
PARTITIONS_TOTAL_MAX = 10_000
PARTITIONS_RESERVED = 1_000
"""Of these, the last are for topics that somebody creates on purpose: not by publishing or subscribing."""
PARTITIONS_AUTO_BURST = 1_000
PARTITIONS_AUTO_RATE = 20.0
"""Partitions of topics that publishing and subscribing create: so many at once, then so many a second."""
"""Each durable partition in use holds one open file."""
SUBSCRIPTIONS_MAX = 100_000
POSITIONS_MAX = 250_000
"""Of all subscriptions together, before a new wildcard is refused: it has one in each partition, of a kilobyte."""
OFFSETS_PER_REQUEST_MAX = 100_000
"""Dead letters that one request may name."""
LISTED_MAX = 10_000
"""Items that one request may ask for."""
TIMESTAMP_MS_MAX = (1 << 53) - 1
"""Exact as a JSON number; the year 287396."""

# --- messages ------------------------------------------------------------------------------------
MESSAGE_BYTES_DEFAULT = 1 << 20
MESSAGE_BYTES_CEILING = 64 << 20
"""The largest value of the setting ``max_message_size``: a batch must hold one message."""
KEY_BYTES_MAX = 64 << 10
HEADERS_PER_MESSAGE_MAX = 1_000
HEADER_BYTES_MAX = 64 << 10
"""All header names and values of one message together."""

# --- batches ------------------------------------------------------------------------------------
BATCH_RECORDS_MAX = 1 << 20
BATCH_BYTES_MAX = 128 << 20
"""Of the stored or unpacked body. Offsets in a batch are int32, so the format allows 2 GiB; this is less."""
CLIENT_BATCH_RECORDS_MAX = 50_000
"""Of one batch that a client made. The broker looks at all of them in one turn of its loop."""
BATCH_HEADERS_MAX = 75_000
"""Of all messages of one batch that a client made, for the same reason."""
CLIENT_BATCH_BYTES_MAX = 16 << 20
"""Of one batch that a client made, packed or not, besides one message of any size: to unpack and check more takes
the loop too long."""
SPREAD_RECORDS_MAX = 10_000
SPREAD_HEADERS_MAX = 15_000
"""Of a batch whose records the broker itself sorts into partitions, by their keys: each of them is decoded."""
BATCH_BYTES_TARGET = 1 << 20
"""The size at which the group commit closes a gathered batch and begins the next one."""
BATCH_RECORDS_TARGET = 10_000
SMALL_BATCH_RECORDS = 64
SMALL_BATCH_BYTES = 16 << 10
"""Readers get neighbouring batches of at most this size as one batch (``log/run.py``)."""
RUN_RECORDS = 1_024
RUN_BYTES = 256 << 10
"""Of small batches that are joined on the event loop at once: a full lease, and about two milliseconds."""
COMPRESS_BYTES_MIN = 256
"""Smaller bodies are stored without compression, even if the topic has compression."""

# --- the log -----------------------------------------------------------------------------------
SEGMENT_BYTES_DEFAULT = 128 << 20
SEGMENT_BATCHES_MAX = 16_384
"""A segment also rolls at this number of batches, so that recovery's scan of the last one is bounded, and small
batches are soon in a closed segment, which can be rewritten."""
REWRITE_BATCH_RECORDS = 1_024
REWRITE_BATCH_BYTES = 64 << 10
"""Batches of at most this size are joined when a closed segment is rewritten; more than ``SMALL_BATCH_*``, because
it is done once, and not on the event loop."""
REWRITTEN_BYTES_TARGET = 3 << 19
"""The size at which a rewritten batch is closed; enough for ``BATCH_RECORDS_TARGET`` records of 100 bytes."""
REWRITE_BATCHES_MIN = 32
"""A closed segment with fewer batches is not rewritten."""
REWRITE_IDLE_BATCHES = 2_048
"""An active segment with this many small batches to which nothing was appended for ten seconds is closed."""
REWRITE_GAIN_MIN = 4
"""... nor one that would still have more than one in four of its batches."""
REWRITE_BYTES_PER_S = 32 << 20
"""Read by the one rewrite that runs at a time, at most."""
REWRITE_SHARE = 0.25
"""Of the time, a rewrite works; the loop has the interpreter for itself in between."""
REWRITE_PIECE_BYTES = 64 << 10
"""Read and joined in one step, in half a millisecond: the loop waits for the interpreter no longer."""
INDEX_INTERVAL_BYTES = 16 << 10
PREALLOCATE_BYTES_MIN = 64 << 10
PREALLOCATE_BYTES_MAX = 32 << 20
READ_BYTES_DEFAULT = 1 << 20
READ_KEPT_S = 10.0
"""How long a log keeps records that it has fetched for a waiting reader."""
FETCHES_MAX = 4
"""Reads that wait for a disk at the same time, each in a disk thread; the other threads are for commits."""
RESOLVED_AT_ONCE = 500
"""Partitions whose logs begin to look for a time in one turn of the loop."""
COMMIT_BYTES_MAX = 16 << 20
"""The most that one commit writes; the rest waits for the next commit."""
COMMIT_QUEUE_BYTES_MAX = 256 << 20
"""Unwritten bytes waiting in one partition before publishes are refused (retryable)."""
OPEN_READERS_MAX = 512
"""Closed segments kept open for reading, all partitions together."""
PRODUCERS_PER_PARTITION_MAX = 10_000
PRODUCER_BATCHES_KEPT = 5
"""How far back a retried batch of an idempotent producer is recognised."""
BATCH_CACHE_BYTES = 96 << 20
"""Recently written or read batches, by all the memory that they may take when they are decoded; at most
a quarter of ``memory_limit``."""
BATCH_CACHE_COUNT = 4096
DISK_RESERVE_BYTES_DEFAULT = 64 << 20
"""Publishes are refused below this much free space; acks and positions are still written."""

# --- deliveries ---------------------------------------------------------------------------------
CHANNEL_CAPACITY_DEFAULT = 100
PREFETCH_DEFAULT = 500
PREFETCH_MAX = 2_000_000
PREFETCH_BYTES_MAX = 32 << 20
"""Unsettled bytes per member; one message is always allowed."""
LEASE_RECORDS_MAX = 1024
SHARED_LEASES_MAX = 4
"""Full leases dealt out in one step; more members get fewer messages each."""
LEASE_BYTES_MAX = 4 << 20
"""Of the values that are handed out in one step, besides one of any size."""
SETTLED_AT_ONCE_MAX = 10_000
"""Deliveries that one request in JSON may settle."""
REDRIVES_MAX = 1_000
"""Redrives of dead letters that run at the same time."""
REDRIVES_KEPT_MAX = 100
"""Redrives that have ended, and whose counts can still be asked for."""
REDRIVE_WAIT_S_MAX = 60.0
REDRIVE_LEASE_S = 30.0
"""A redrive of a client stops when the client has been gone for so long."""
REDRIVE_LEASE_S_MAX = 86_400.0
ORDERED_PARKED_MAX = 10_000
"""Messages an ordered group may set aside while their key is busy, per partition."""
ACK_TIMEOUT_S_MAX = 12 * 3600.0
DELAY_S_MAX = 366 * 86400.0
MAX_DELIVERIES_MAX = 1_000_000
REQUEST_S_MAX = 3600.0
REQUESTS_MAX = 50_000
REQUESTS_PER_CALLER_MAX = 10_000
"""Requests that wait for their replies."""
REQUEST_BYTES = 1 << 10
"""About what a request takes while it waits."""
REQUESTS_KEPT_MAX = 1_000
REQUESTS_KEPT_S = 30.0
REQUESTS_KEPT_BYTES_MAX = 16 << 20
"""Requests that are kept after their reply, for a requester that lost its connection just then: so many, for so long, and
with so many bytes together."""
QUEUE_SIZE_MEMORY_DEFAULT = 10_000
SCHEDULED_MAX = 10_000_000
JOURNAL_REWRITE_BYTES_MIN = 1 << 20
"""The subscription journal is rewritten as a snapshot when it is four times as large as the last
snapshot, but never below this size."""
STAGED_KEPT_S = 24 * 3600
"""How long a staged batch waits for its commit."""
STAGED_MEMORY_BYTES_MAX = 256 << 20
"""Staged batches that wait in a broker without a disk."""
COMMIT_PIECES_MAX = 100_000
"""Staged batches in one commit: one entry of the journal lists them."""
COMMIT_RECORDS_MAX = (1 << 32) - 1
"""Of one commit in one topic: a producer's sequence has 32 bits."""
COMMIT_WINDOW_BYTES = 16 << 20
"""The bytes that a commit holds in memory while it copies staged batches to the partitions."""
COMMIT_NAMES_KEPT_S = 30 * 24 * 3600
"""How long the last commit of a name is remembered after its last use, to recognize a repetition."""
COMMIT_NAMES_MAX = 100_000
"""Names of commits that are remembered; those used longest ago are forgotten first."""
PRODUCER_NAMES_MAX = 100_000
"""Named producers whose epochs are remembered; those named longest ago are forgotten first."""
EPOCH_MAX = (1 << 32) - 1

# --- the broker's own events ----------------------------------------------------------------------
EVENTS_INTERVAL_S_DEFAULT = 10.0
EVENTS_INTERVAL_S_MAX = 86_400.0
EVENTS_KEPT_HOURS = 7 * 24.0
EVENTS_BYTES_MAX = 256 << 20
"""Of the topic ``__events``; compressed, a week of a hundred busy subscriptions needs far less."""
GRANTS_MAX = 1_000
"""Of one user or token."""
AUDIT_KEPT_HOURS = 365 * 24.0
AUDIT_BYTES_MAX = 1 << 30
"""Of the topic ``__audit``."""

# --- pipelines ------------------------------------------------------------------------------------
PIPELINES_MAX = 1_000
"""Pipelines whose last report is kept; those that ended longest ago are forgotten first."""
PIPELINES_BYTES_MAX = 16 << 20
"""All reports together: they are also one answer."""
PIPELINE_REPORT_BYTES_MAX = 64 << 10
PIPELINE_QUERIES_MAX = 50
"""Each query is a set of time series."""
PIPELINE_TEXT_CHARS_MAX = 200
"""The name of a query, which is a label of metrics, and the id of a run."""
PIPELINE_STALE_S = 30.0
"""A running pipeline that has not reported for this long may be dead."""

# --- connections ----------------------------------------------------------------------------------
UNANSWERED_BYTES_HIGH = 8 << 20
UNANSWERED_BYTES_LOW = 2 << 20
UNANSWERED_COUNT_HIGH = 10_000
UNANSWERED_COUNT_LOW = 2_500
WRITE_BYTES_HIGH = 1 << 20
WRITE_BYTES_LOW = 256 << 10
WRITE_BYTES_HARD = 192 << 20
"""One answer may be a whole fetch of 128 MiB; more than this is never held for one client."""
COUNTED_BYTES_MIN = 16 << 10
"""A request of this size or more counts against the broker's memory by itself."""
UNSENT_BYTES_MIN = 256 << 10
"""Unsent answers of one client count against the broker's memory from this size on."""
UNAUTHENTICATED_BYTES_MAX = 64 << 10
"""Of an incomplete command that is kept for a client that has not authenticated."""
HELD_SHOWN_MAX = 20
"""Subscriptions of one connection that a list of connections names; all of them are counted."""
CLIENT_ID_CHARS_MAX = 200
OWNERS_KNOWN_MAX = 200_000
"""Partitions of a cluster whose owners one client remembers."""
OWNER_LINKS_MAX = 64
"""Connections of one client to nodes of a cluster, besides the first. Partitions of more nodes are reached through that one."""
FOLLOWED_PARTITION_BYTES = 256
"""The memory that following one partition takes. It counts in ``memory_limit``."""

# --- backups ----------------------------------------------------------------------------------------
BACKUP_LEASE_S = 60.0
BACKUP_PAGE_BYTES = 256 << 10
BACKUP_PAGE_PARTITIONS = 2_000

MEMORY_BYTES_MIN = 16 << 20
"""The smallest ``memory_limit``: one batch of any size must fit."""

# --- the process ----------------------------------------------------------------------------------
OPEN_FILES_MAX = 1 << 20
"""The limit of open files is raised to this, or to what the system allows."""
OPEN_FILES_SPARE = 2_000
"""Kept from connections: logs, readers, listeners."""
OPEN_FILES_BASE = 700
"""Kept from connections and partitions: closed segments that are being read, journals, listeners."""


def allow_open_files(wanted: int) -> int:
    """Raise the limit of open files (often 1,024) as far as needed and possible; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS has a bound that it does not report
        return soft
    return most


def cores() -> int:
    """How many of the machine's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


FREED_BYTES_KEPT = 64 << 20
"""The most freed memory that the process keeps for later allocations."""
BLOCK_BYTES_GIVEN_BACK = 8 << 20
"""A block of this size or more is returned to the system as soon as it is freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def keep_freed_memory() -> None:
    """Make the C library keep a few freed megabytes instead of returning them to the system at once.

    This is for a process that allocates blocks of megabytes, such as fetched or staged batches. By default
    each block is returned when it is freed, and the next block gets pages that the system has to clear
    first. Measured: a broker spends 42 ns instead of 165 on a fetched record of 100 bytes, a
    Spark task that reads it 43 instead of 92. Without glibc this does nothing.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, FREED_BYTES_KEPT)
        library.mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES_GIVEN_BACK)

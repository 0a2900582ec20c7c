"""Headrace beside Redis Streams, NATS JetStream, RabbitMQ and Kafka: the same work, on one machine, in one run.

``make bench-peers`` fetches the peers, starts each as a process on loopback with its data on the real disk, drives
all of them, and writes ``benchmarks/results/peers.json``, plots and ``benchmarks/REPORT.md``.

Rules:
- A peer is used as its own documentation advises, through its best Python client (``redis.py`` and so on), and
  through its own load tool where it has one (``native.py``), so that neither side hides behind the other's client.
- Each work runs in a new process with new topics. Peers take turns, and each round begins with another peer, so a slow
  minute of the machine hits all of them. Medians and spread are reported, and ratios of the same run.
- Two kinds of durability, never mixed in a comparison: the peer's default, and a sync of the disk before each answer.
- A peer that cannot be had is reported as missing. A work that a peer cannot do is a dash. Neither is a zero.

Rejected: containers (none can run on many machines, and they hide the settings); peers with a memory disk (the disk is
the point); one long process for all works (what one work leaves in the heap slows the next).
"""

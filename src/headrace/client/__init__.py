"""Talking to a server: ``BrokerClient`` for threads, ``AsyncClient`` for asyncio, one link under both.

Knows the wire and the batch, not the broker.
"""

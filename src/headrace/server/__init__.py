"""Sockets to broker: connections, flow control, the front ends, starting and stopping."""

"""Bytes to commands and back, without I/O: no sockets, no loop, no broker."""

"""Connections: HTTP over TCP, with limits on bytes, time and file descriptors."""

"""Connections: limits on what a TCP connection may use: bytes, seconds and file descriptors."""

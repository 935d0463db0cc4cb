"""Connections: what a TCP connection may take of the server, in bytes, seconds and descriptors."""

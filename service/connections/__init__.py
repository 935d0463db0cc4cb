"""Connections: limits on the bytes, seconds and file descriptors that TCP connections may use."""

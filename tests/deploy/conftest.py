"""A port for programs that cannot report which one they use."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A free loopback port. Another program might take it before the test does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

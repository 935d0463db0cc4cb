"""A port for programs that cannot report which one they use."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """Free port of the loopback; another program might take it before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

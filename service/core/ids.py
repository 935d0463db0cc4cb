"""Ids of requests and replies."""

import uuid


def new_id(kind: str) -> str:
    """An id that nobody can guess: it names a request towards the engine."""
    return f"{kind}-{uuid.uuid4().hex}"

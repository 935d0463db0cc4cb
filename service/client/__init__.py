"""The Python client: `Client`, `AsyncClient`, their results and their errors.

Import it as `logitd`. It needs httpx and NumPy, but neither torch nor modules of the server.
"""

# ruff: noqa: F403
from logitd.service.client.client import AsyncClient as AsyncClient
from logitd.service.client.client import Client as Client
from logitd.service.client.errors import *
from logitd.service.client.fields import *
from logitd.service.client.frames import heat_map as heat_map
from logitd.service.client.results import *
from logitd.service.client.streaming import AsyncStream as AsyncStream
from logitd.service.client.streaming import Stream as Stream

_ALIASES = ("TokenIds", "OnePrompt", "ManyPrompts", "Prompt", "OneOrManyIds")
_FUNCTIONS = ("heat_map",)
# Not `__all__`: mypy reads only literals there, and would hide all other names.
NAMES = [
    name
    for name, value in vars().copy().items()
    if name in (*_ALIASES, *_FUNCTIONS)
    or (isinstance(value, type) and value.__module__.startswith(__name__))
]
"""Public names: all classes of the client, and the type aliases and functions listed above."""

"""The Python client: `Client`, `AsyncClient`, their results and their errors.

Import it as `logitd`. It needs httpx and NumPy, but neither torch nor modules of the server.
"""

# ruff: noqa: F403
from logitd.service.client import arrays, errors, fields, results
from logitd.service.client.arrays import *
from logitd.service.client.async_client import AsyncClient as AsyncClient
from logitd.service.client.client import Client as Client
from logitd.service.client.errors import *
from logitd.service.client.fields import *
from logitd.service.client.results import *
from logitd.service.client.streaming import AsyncStream as AsyncStream
from logitd.service.client.streaming import Stream as Stream

# Not __all__: mypy reads only its literals, and hides all other names.
NAMES = ["Client", "AsyncClient", "Stream", "AsyncStream"]
NAMES += arrays.__all__ + errors.__all__ + fields.__all__ + results.__all__

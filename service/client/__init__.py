"""The Python client: `Client`, `AsyncClient`, their results and their errors.

Import it as `logitd`. It needs httpx and NumPy, but neither torch nor modules of the server.
"""

from logitd.service.client import arrays, errors, fields, results
from logitd.service.client.arrays import *  # noqa: F403
from logitd.service.client.async_client import AsyncClient
from logitd.service.client.client import Client
from logitd.service.client.errors import *  # noqa: F403
from logitd.service.client.fields import *  # noqa: F403
from logitd.service.client.results import *  # noqa: F403
from logitd.service.client.streaming import AsyncStream, Stream

__all__ = ["Client", "AsyncClient", "Stream", "AsyncStream"]
__all__ += arrays.__all__
__all__ += errors.__all__
__all__ += fields.__all__
__all__ += results.__all__

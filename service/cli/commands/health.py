"""`logitd health`: asks whether a server answers requests, for container checks and scripts.

The command runs every few seconds alongside the server. To start quickly, it imports only the
standard library and a few of logitd's modules.
"""

import json
import urllib.error
import urllib.request
from http.client import HTTPException

from logitd.service.cli.terminal import say, tell
from logitd.service.settings.tools import HealthSettings

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps each address that means all interfaces to an address at which the server can be reached from
its own machine."""
ERRORS = ()
LONGEST = 65_536
"""Maximum number of bytes read from a reply."""
FOREIGN = "an answer that is not logitd's"


def run(settings: HealthSettings) -> int:
    """Print the server's status, or the reason why it is unknown."""
    url = f"{base_url(settings)}/health{'/live' if settings.live else ''}"
    # Ignore proxies: the server may be up even if the proxy is down.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=settings.timeout) as reply:
            if (status := _status(reply.read(LONGEST))) is not None:
                say(status)
                return 0
        problem = FOREIGN
    except urllib.error.HTTPError as error:
        with error:
            problem = f"{error.code} {_status(error.read(LONGEST)) or FOREIGN}"
    except HTTPException:  # the reply is not HTTP
        problem = FOREIGN
    except (OSError, ValueError) as error:  # no connection, a timeout, or a wrong URL
        problem = str(getattr(error, "reason", error))
    tell("health", f"{url}: {problem}")
    return 1


def base_url(settings: HealthSettings) -> str:
    if settings.url is not None:
        return settings.url.rstrip("/")
    return local_url(settings.host, settings.port)


def local_url(host: str, port: int) -> str:
    """The URL of a server on this machine that is bound to `host`."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _status(body: bytes) -> str | None:
    """The status in a reply of logitd; None if the reply is not logitd's."""
    try:
        reply = json.loads(body)
    except ValueError:
        return None
    if not isinstance(reply, dict) or "status" not in reply:
        return None
    return ": ".join(str(reply[key]) for key in ("status", "reason") if reply.get(key))

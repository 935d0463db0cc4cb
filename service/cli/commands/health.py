"""`logitd health`: ask a server if it answers requests, for container checks and scripts.

It runs every few seconds next to the server, so it imports the standard library alone.
"""

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

from logitd.service.cli.terminal import say
from logitd.service.settings.tools import HealthSettings

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that bind all interfaces, and those that reach the server from its own machine."""
ERRORS = ()
LONGEST = 65_536
"""Bytes that are read of a reply."""
FOREIGN = "an answer that is not logitd's"


def run(settings: HealthSettings) -> int:
    """Print the server's status, or why there is none."""
    url = f"{base_url(settings)}/health{'/live' if settings.live else ''}"
    # Without proxies: a proxy that is down is not a server that is down.
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
    except HTTPException:  # another protocol
        problem = FOREIGN
    except (OSError, ValueError) as error:  # no server, too late, no URL
        problem = str(getattr(error, "reason", error))
    say(f"logitd health: {url}: {problem}", file=sys.stderr)
    return 1


def base_url(settings: HealthSettings) -> str:
    """The URL of the server."""
    if settings.url is not None:
        return settings.url.rstrip("/")
    host = ANY_ADDRESS.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _status(body: bytes) -> str | None:
    """The status in a reply of logitd; None for other replies."""
    try:
        reply = json.loads(body)
    except ValueError:
        return None
    if not isinstance(reply, dict) or "status" not in reply:
        return None
    return ": ".join(str(reply[key]) for key in ("status", "reason") if reply.get(key))

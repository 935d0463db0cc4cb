"""`logitd health`: asks a server whether it answers requests, for container checks and scripts.

With the standard library alone, because it runs every few seconds beside the server.
"""

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

from logitd.service.cli.terminal import say
from logitd.service.settings.tools import HealthSettings

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What a server binds to be reached by all, and where it is reached from its own machine."""
ERRORS = ()
LONGEST = 65_536
"""Bytes of a reply that are read."""
STRANGER = "an answer that is not logitd's"


def run(settings: HealthSettings) -> int:
    """Print the server's status, or why there is none."""
    url = f"{base_url(settings)}/health{'/live' if settings.live else ''}"
    # No proxy: a proxy that is down is not a server that is down.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=settings.timeout) as reply:
            said = _status(reply.read(LONGEST))
    except urllib.error.HTTPError as error:
        with error:
            said = _status(error.read(LONGEST))
            say(f"logitd health: {url}: {error.code} {said or STRANGER}", file=sys.stderr)
        return 1
    except HTTPException:  # it does not speak HTTP
        said = None
    except (OSError, ValueError) as error:  # nobody listens, too late, no URL
        say(f"logitd health: {url}: {getattr(error, 'reason', error)}", file=sys.stderr)
        return 1
    if said is None:
        say(f"logitd health: {url}: {STRANGER}", file=sys.stderr)
        return 1
    say(said)
    return 0


def base_url(settings: HealthSettings) -> str:
    """Of the server that is asked."""
    if settings.url is not None:
        return settings.url.rstrip("/")
    host = ANY_ADDRESS.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _status(body: bytes) -> str | None:
    """What a reply of ours says; None of another."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    if not isinstance(said, dict) or "status" not in said:
        return None
    return ": ".join(str(said[key]) for key in ("status", "reason") if said.get(key))

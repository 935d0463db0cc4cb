"""HostCheck: refuses requests whose Host header names another server, is repeated or is missing.

An attacker can make the domain of a web page resolve to 127.0.0.1 (DNS rebinding). The browser then
treats a server on this machine as part of the page's origin and lets the page read its replies;
only the Host header still has the page's domain. If the server has API keys, the attack is
harmless, because the page has no key. Pages of other origins cannot send requests with a body: a
body must be application/json, which browsers send only if the server allows it in a CORS preflight.
"""

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from logitd.model.operations.prompts import clip
from logitd.service.errors import ApiError, bad_request
from logitd.service.settings.serve import ServeSettings

ANY = "*"
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?")
"""A bracketed IPv6 address or another host, in lower case, with an optional port."""


class HostCheck:
    """ASGI middleware that answers 403 if the Host header is not accepted, and 400 if an HTTP/1.1
    request does not have exactly one Host header, as RFC 9112 requires."""

    def __init__(self, app: ASGIApp, names: Iterable[str] | None, addresses: bool) -> None:
        """If `names` is None, every host is accepted. Otherwise these names and all loopback names
        and addresses are accepted. With `addresses`, every IP address is accepted too, because DNS
        rebinding works only with a name."""
        self._app = app
        self._names = None if names is None else {"localhost", *map(str.lower, names)}
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and (error := self._problem(scope)) is not None:
            app = error.response()
        await app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for host in hosts:
            if not self._accepts(host):
                message = (
                    f"the Host {clip(host)!r} is not a name of this server; use localhost, or "
                    "add this name to --allowed-hosts"
                )
                return ApiError(403, "permission_error", message, None, "host_not_allowed")
        if scope["http_version"] == "1.1" and len(hosts) != 1:
            found = f"{len(hosts)} Host headers" if hosts else "no Host header"
            return bad_request(f"the request has {found}; HTTP/1.1 requires exactly one")
        return None

    def _accepts(self, header: str) -> bool:
        if self._names is None:
            return True
        match = _HOST.fullmatch(header.strip().lower())
        if match is None:
            return False
        host = match[1] or match[2]
        if host in self._names or _is_loopback(host):
            return True
        return self._addresses and _address(host) is not None


def host_check(settings: ServeSettings) -> dict[str, Any]:
    """The arguments of HostCheck that follow from the settings."""
    hosts = settings.allowed_hosts
    keyless = settings.api_keys is None and settings.api_key_file is None
    loopback = binds_loopback(settings.host)
    if ANY in hosts or not (hosts or (keyless and loopback)):
        return {"names": None, "addresses": True}
    return {"names": (settings.host, *hosts), "addresses": not loopback}


def binds_loopback(host: str) -> bool:
    """True if a server that listens on this host can be reached only from its own machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # such a host cannot be bound either
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback

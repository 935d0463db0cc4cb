"""Callers: whose request it is, where several share what there is of the server.

By the name of the API key, or where that is not asked for by the client's address: an IPv4 address,
or the first 64 bits of an IPv6 address, which is what a network is given. Behind a proxy on this
machine that is the address which the proxy says (X-Forwarded-For). A name is for counting and for
taking turns; who may ask is decided by the API keys (`service/access/auth.py`).
"""

import ipaddress

from starlette.requests import HTTPConnection

from logitd.service.access.auth import CALLER, NO_KEY

NETWORK_BITS = 64
"""Of an IPv6 address: a client can have as many addresses below that as it likes."""


def caller_of(connection: HTTPConnection) -> str:
    """The name of whoever sent a request; the same for requests that should share."""
    key = connection.scope.get(CALLER, NO_KEY)
    if key != NO_KEY:
        return f"key {key}"
    return "" if connection.client is None else f"address {network_of(connection.client.host)}"


def network_of(host: str) -> str:
    """An address, shortened to what one client has; what is not an address, as it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))

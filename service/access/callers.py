"""Callers: names for the clients among which the engine is shared fairly.

A caller has the name of its API key. If the server has no keys, the caller's name is its address:
IPv4, or the first 64 bits of IPv6, the usual size of a network. Behind a proxy on this machine, the
address comes from X-Forwarded-For. The names are used only for counting and fairness; `auth.py`
controls access.
"""

import ipaddress

from starlette.requests import HTTPConnection

from logitd.service.access.auth import CALLER, NO_KEY

NETWORK_BITS = 64
"""Number of leading bits of an IPv6 address that identify a client; the client can choose the
rest."""


def caller_of(connection: HTTPConnection) -> str:
    key = connection.scope.get(CALLER, NO_KEY)
    if key != NO_KEY:
        return f"key {key}"
    return "" if connection.client is None else f"address {network_of(connection.client.host)}"


def network_of(host: str) -> str:
    """Shorten an address to the part that identifies a client. A text that is not an address is
    returned unchanged."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))

"""Callers: requests count as one caller if they have the same key, or if they have no key and come
from the same network."""

from typing import Any

import pytest
from starlette.requests import HTTPConnection

from logitd.service.access.auth import CALLER, NO_KEY
from logitd.service.access.callers import caller_of


def name(host: str | None, **scope: Any) -> str:
    client = None if host is None else (host, 4711)
    return caller_of(HTTPConnection({"type": "http", "client": client, **scope}))


def test_caller_is_the_name_of_the_key() -> None:
    assert name("10.0.0.1", **{CALLER: "ci"}) == name("10.0.0.2", **{CALLER: "ci"}) == "key ci"


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("testclient", "testclient"),
    ],
)
def test_caller_without_a_key_is_the_network(host: str, network: str) -> None:
    assert name(host) == name(host, **{CALLER: NO_KEY}) == f"address {network}"


def test_caller_of_a_socket_without_addresses_is_empty() -> None:
    assert name(None) == ""

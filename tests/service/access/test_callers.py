"""Callers: the same name for requests that should share, another for others."""

from typing import Any

import pytest
from starlette.requests import HTTPConnection

from logitd.service.access.auth import CALLER, NO_KEY
from logitd.service.access.callers import caller_of


def name(host: str | None, **scope: Any) -> str:
    client = None if host is None else (host, 4711)
    return caller_of(HTTPConnection({"type": "http", "client": client, **scope}))


def test_a_key_has_its_name_wherever_it_is_used() -> None:
    assert name("10.0.0.1", **{CALLER: "ci"}) == name("10.0.0.2", **{CALLER: "ci"}) == "key ci"
    assert name("10.0.0.1", **{CALLER: "ci"}) != name("10.0.0.1", **{CALLER: "alice"})


def test_without_a_key_it_is_the_address() -> None:
    assert name("10.0.0.1") == name("10.0.0.1", **{CALLER: NO_KEY}) == "address 10.0.0.1"
    assert name("10.0.0.1") != name("10.0.0.2")


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("testclient", "testclient"),
    ],
)
def test_the_addresses_of_a_network_are_one_caller(host: str, network: str) -> None:
    assert name(host) == f"address {network}"


def test_a_socket_without_addresses_has_one_caller() -> None:
    assert name(None) == ""

"""Addresses by route, and the line that a person types on the other machines."""

from __future__ import annotations

import socket

import pytest

from zerokara.errors import UserError
from zerokara.training.nodes import addresses
from zerokara.training.nodes.addresses import Endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("10.0.0.1", "10.0.0.1", 29400, "10.0.0.1:29400"),
        ("10.0.0.1:5000", "10.0.0.1", 5000, "10.0.0.1:5000"),
        ("node-1:5000", "node-1", 5000, "node-1:5000"),
        ("[fe80::1]:5000", "fe80::1", 5000, "[fe80::1]:5000"),
        ("[fe80::1]", "fe80::1", 29400, "[fe80::1]:29400"),
    ],
)
def test_an_endpoint_is_read_as_it_is_written(text: str, host: str, port: int, written: str) -> None:
    found = Endpoint.parse(text, "--join")
    assert (found.host, found.port, str(found)) == (host, port, written)
    assert Endpoint.parse(str(found), "--join") == found


@pytest.mark.parametrize("text", ["", ":5000", "node:port", "node:0", "node:70000"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--join.*10\.0\.0\.1:29400"):
        Endpoint.parse(text, "--join")


def test_the_address_is_that_of_the_route() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.interface_of("127.0.0.1") == "lo"
    addresses.check_own("127.0.0.1")
    with pytest.raises(UserError, match=r"192\.0\.2\.7.*127\.0\.0\.1"):
        addresses.check_own("192.0.2.7")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([("127.0.0.1", "lo"), ("10.1.0.5", "eth0")], "10.1.0.5"),
        ([("127.0.0.1", "lo")], "no address at which"),
        ([("10.1.0.5", "eth0"), ("10.2.0.5", "ib0")], r"10\.1\.0\.5, 10\.2\.0\.5"),
    ],
)
def test_without_a_default_route(monkeypatch: pytest.MonkeyPatch, own: list[tuple[str, str]], expected: str) -> None:
    def unreachable(host: str) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(addresses, "address_towards", unreachable)
    monkeypatch.setattr(addresses, "_addresses", lambda: own)
    if len(own) == 2 and own[0][0].startswith("127."):
        assert addresses.own_address() == expected
    else:
        with pytest.raises(UserError, match=f"(?s){expected}.*--host"):
            addresses.own_address()


def test_a_name_that_does_not_resolve_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("the host's name was asked for")

    for name in ("gethostname", "getfqdn", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    try:
        addresses.own_address()
    except UserError as error:  # a machine without a network, or with several
        assert "--host" in str(error)

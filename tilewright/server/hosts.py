"""Hosts that a server may send weights and prompts to."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


def allowed(url: str, hosts: Sequence[str]) -> bool:
    """Whether the host of a URL is one of these names, or within one of these networks."""
    host = urlsplit(url).hostname or ""
    if host in hosts:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _networks(hosts))


def _networks(hosts: Sequence[str]) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for host in hosts:
        with contextlib.suppress(ValueError):  # a name
            yield ipaddress.ip_network(host)

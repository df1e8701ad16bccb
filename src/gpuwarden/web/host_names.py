"""Host names that requests may address: the defense against DNS rebinding.

A web page of another site can give its own name the address of this machine, and then read the answers as its own. The
request has that name in its Host header. An IP address, or a name without a dot, cannot be registered by another site.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path

HOSTS_FILE = Path("/etc/hosts")
RESOLVER_FILE = Path("/etc/resolv.conf")


class HostNames:
    """Names of this machine, and extra ones: `*.example.com` stands for all below a domain, `*` for all."""

    def __init__(self, extra: Iterable[str] = ()) -> None:
        self._names = {*map(str.lower, extra), *find_own_names()}

    def allow(self, header: str) -> bool:
        """Return whether a request with this Host header may be answered."""
        name = _name(header)
        return "." not in name or _is_address(name) or any(fnmatchcase(name, each) for each in self._names)


def _name(header: str) -> str:
    """Return the name or address in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def find_own_names() -> set[str]:
    """Return the names of this machine that have a dot, from two files, without DNS."""
    node = os.uname().nodename.lower()
    short = node.partition(".")[0]
    found = {node, *(f"{short}.{domain}" for line in _lines(RESOLVER_FILE) for domain in _search_domains(line))}
    for _address, *names in _lines(HOSTS_FILE):
        if not {node, short}.isdisjoint(names):
            found.update(names)
    return {name for name in found if "." in name}


def _search_domains(words: list[str]) -> list[str]:
    return [each.strip(".") for each in words[1:]] if words[0] in ("search", "domain") else []


def _lines(path: Path) -> Iterable[list[str]]:
    """Return the words of each line of a file, without comments; none if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return []
    return filter(None, (line.partition("#")[0].split() for line in text.splitlines()))

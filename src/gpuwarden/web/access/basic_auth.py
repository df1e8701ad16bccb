"""Logins of HTTP basic authentication, with passwords kept as bcrypt hashes.

A check of bcrypt takes 50 ms or more of CPU on purpose: a login that was right is remembered by a salted digest, and
others are checked one at a time on a thread, with a pause after a wrong one, so that guessing takes a fifth of a core.
The source with the fewest checks is next, and of its logins the newest: those that guess have others waiting, and wait
for their answers before they guess again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import os
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt

MAX_REMEMBERED = 1000  # logins, and sources
PAUSE_RATIO = 4.0  # pause after a wrong password, relative to the CPU time of its check
_UNKNOWN_USER = "$2b$10$" + "." * 53  # checked for an unknown user: the response time must not reveal which users exist


class BasicAuth:
    """Checker of logins, used by one event loop."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._remembered: set[bytes] = set()
        self._executor = ThreadPoolExecutor(1, "login")
        self._waiting: dict[asyncio.Future[None], str] = {}  # sources of the logins that wait, the oldest first
        self._checks: Counter[str] = Counter()  # by source, since no login waited
        self._is_checking = False

    async def allow(self, header: str, users: Mapping[str, str], address: str) -> bool:
        """Return whether an Authorization header has the name and password of one of `users`: bcrypt hash by name.

        A login that is not remembered waits for the one being checked, and for those of sources with fewer checks than
        that of its `address`.
        """
        scheme, _, encoded = header.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        if not colon:
            return False
        stored = users.get(name.decode(errors="replace"), _UNKNOWN_USER)
        digest = hashlib.blake2b(b"\0".join((stored.encode(), name, password)), key=self._key).digest()
        if digest in self._remembered:
            return True
        if not await self._check_in_turn(password, stored.encode(), _source(address)):
            return False
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered.add(digest)
        return True

    async def _check_in_turn(self, password: bytes, stored: bytes, source: str) -> bool:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = source
        self._pass_turn()
        try:
            await turn
            return await loop.run_in_executor(self._executor, _check, password, stored)
        finally:
            if self._waiting.pop(turn, None) is None:  # it had its turn
                self._is_checking = False
                self._pass_turn()

    def _pass_turn(self) -> None:
        if self._is_checking:
            return
        if not self._waiting or len(self._checks) >= MAX_REMEMBERED:
            self._checks.clear()
        if self._waiting:
            turn = min(reversed(self._waiting), key=lambda each: self._checks[self._waiting[each]])
            self._checks[self._waiting.pop(turn)] += 1
            self._is_checking = True
            turn.set_result(None)


def _source(address: str) -> str:
    """Return what one person may send from: all addresses of this machine, a network of IPv6, or an address of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:  # any local user can bind the whole of 127.0.0.0/8
        return "loopback"
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))  # noqa: PLR2004


def _check(password: bytes, stored: bytes) -> bool:
    start = time.thread_time()
    try:
        if bcrypt.checkpw(password, stored):
            return True
    except ValueError:  # longer than 72 bytes, or with a zero byte: bcrypt would use a part of it
        pass
    time.sleep(PAUSE_RATIO * (time.thread_time() - start))
    return False

"""Logins of HTTP basic authentication, with passwords kept as bcrypt hashes.

A check of bcrypt takes 50 ms or more of CPU on purpose: a login that was right is remembered by a salted digest, and
others are checked one at a time on a thread, with a pause after a wrong one, so that guessing takes a fifth of a core.
Each address has one check in the queue at most: one that guesses cannot keep the others out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakValueDictionary

import bcrypt

MAX_REMEMBERED = 1000
PAUSE_RATIO = 4.0  # pause after a wrong password, relative to the CPU time of its check
_UNKNOWN_USER = "$2b$10$" + "." * 53  # checked for an unknown user: the response time must not reveal which users exist


class BasicAuth:
    """Checker of logins, used by one event loop."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._remembered: set[bytes] = set()
        self._executor = ThreadPoolExecutor(1, "login")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by address, while one checks

    async def allow(self, header: str, users: Mapping[str, str], address: str) -> bool:
        """Return whether an Authorization header has the name and password of one of `users`: bcrypt hash by name.

        A login that is not remembered waits for those before it from its `address`, and for one of each other address.
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
        check = partial(_check, password, stored.encode())
        async with self._turns.setdefault(address, asyncio.Lock()):
            if not await asyncio.get_running_loop().run_in_executor(self._executor, check):
                return False
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered.add(digest)
        return True


def _check(password: bytes, stored: bytes) -> bool:
    start = time.thread_time()
    try:
        if bcrypt.checkpw(password, stored):
            return True
    except ValueError:  # longer than 72 bytes, or with a zero byte: bcrypt would use a part of it
        pass
    time.sleep(PAUSE_RATIO * (time.thread_time() - start))
    return False

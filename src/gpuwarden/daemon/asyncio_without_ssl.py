"""Import of asyncio without ssl, which takes 4 MiB.

The daemon uses no TLS of asyncio: alerts are sent by http.client, which imports ssl itself.
"""

from __future__ import annotations

import sys


def load() -> None:
    """Load asyncio without ssl, unless either is loaded already."""
    if sys.modules.keys().isdisjoint({"asyncio", "ssl"}):
        sys.modules["ssl"] = None  # type: ignore[assignment] # its import then fails, which asyncio handles
        import asyncio  # noqa: F401, PLC0415 - not before the line above

        del sys.modules["ssl"]

"""asyncio without ssl: nothing in the daemon speaks TLS, and importing it takes 4 MiB.

To be imported before anything else imports asyncio, which does without ssl where Python was built so; where somebody
has imported it already, as in tests, nothing changes. ssl itself stays importable.
"""

from __future__ import annotations

import sys

_absent = "ssl" not in sys.modules
if _absent:
    sys.modules["ssl"] = None  # type: ignore[assignment] # an import of it fails, as documented for sys.modules
try:
    import asyncio
finally:
    if _absent:
        del sys.modules["ssl"]

run = asyncio.run

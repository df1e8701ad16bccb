"""User of a shared machine: `failing_user.py UID SOCKET TEXT` fails in a training, as uid UID, with TEXT as message.

It fails when standard input ends. The modules are loaded first, as that user may not be able to read them.
"""

from __future__ import annotations

import os
import sys

from gpuwarden import watch
from gpuwarden.client import connection, reporter  # noqa: F401
from gpuwarden.client.errors import classifier, traceback_stage, uncaught  # noqa: F401

if __name__ == "__main__":
    uid, os.environ["GPUWARDEN_SOCKET"], text = sys.argv[1:]
    os.setgroups([]) if os.geteuid() == 0 else None
    os.setresuid(int(uid), int(uid), int(uid))
    with watch("nightly") as run:
        for _ in range(3):
            run.step()
        sys.stdin.read()
        raise RuntimeError(text)

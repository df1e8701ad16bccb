"""Co-tenant on the shared device: `co_tenant_process.py MEBIBYTES:SECONDS ...` allocates more at these times.

It prints a line for each piece, and keeps all until it is stopped. Times count from its start, or from the first line
of its standard input if the first argument is `wait`.
"""

from __future__ import annotations

import ctypes
import sys
import time

from shared_device import MIB, build


def main() -> None:
    """Allocate, and keep."""
    pieces = sys.argv[1:]
    take = ctypes.CDLL(str(build())).shared_device_take
    take.argtypes = [ctypes.c_uint64]
    if pieces[0] == "wait":
        sys.stdin.readline()
        del pieces[0]
    began = time.monotonic()
    for piece in pieces:
        mebibytes, _, at = piece.partition(":")
        time.sleep(max(began + float(at or 0) - time.monotonic(), 0))
        print("has" if take(int(mebibytes) * MIB) else "was refused", mebibytes, "MiB", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()

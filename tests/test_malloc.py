"""The C library's allocator does as it is told, or is left as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

THREADS = """
import ctypes, sys, threading
from gpuwarden import malloc
if sys.argv[1] == "small":
    malloc.keep_small()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
together = threading.Barrier(4)
def allocate():
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="not glibc")
@pytest.mark.parametrize("wanted", ["small", "as it is"])
def test_threads_share_one_arena(wanted: str) -> None:
    """Threads that allocate at once have one arena; without the setting each takes one of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("MALLOC_ARENA_MAX", None)
    done = subprocess.run([sys.executable, "-c", THREADS, wanted], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout.count("<heap nr=") == 1) == (wanted == "small")

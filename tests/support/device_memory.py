"""Hold device memory on the first GPU, by the driver alone: no framework is needed.

`python device_memory.py MEBIBYTES` writes a line with the allocated size once it is allocated. A line on its input
makes it free the memory but keep its context; another line ends it. It makes plain allocations only.
"""

from __future__ import annotations

import ctypes
import sys


def _check(code: int) -> None:
    if code:
        raise SystemExit(f"CUDA answers {code}")


def main(mebibytes: int) -> None:
    """Allocate it, and follow the lines of standard input."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(cuda.cuCtxSetCurrent(context))
    _check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mebibytes << 20)))
    print("held", flush=True)  # noqa: T201 - what the test waits for
    sys.stdin.readline()
    _check(cuda.cuMemFree_v2(memory))
    print("free", flush=True)  # noqa: T201 - likewise
    sys.stdin.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]))

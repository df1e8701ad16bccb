"""Run that ends with a real out-of-memory error, for headroom.py: `python bench/headroom_runs.py CASE MODE UUID LOG`.

TensorFlow's GPU allocator replaces the CPU's, with a limit of LIMIT_MIB; CPU:0 is reported as the GPU of that UUID.
LOG is the file of this process's standard error, where the allocator writes the size of its pool. The failed request
and the bytes in use are printed as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

LIMIT_MIB = 256
MIB = 1 << 20
USUAL = 3.0  # seconds of steps like any other
POOL = re.compile(r"Total allocated bytes: ([0-9.]+)(B|KiB|MiB|GiB)")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def pool_of(log: Path) -> int:
    """Return the size of an allocator's pool in bytes, from its log."""
    sizes = POOL.findall(log.read_text(errors="replace"))
    return int(float(sizes[-1][0]) * UNITS[sizes[-1][1]]) if sizes else 0


class Case:
    """Allocator of memory that records what was in use when a request failed."""

    def __init__(self, tf: Any, step: Callable[[], None]) -> None:
        self._tf = tf
        self._step = step
        self.held: list[Any] = []
        self.asked = self.in_use = 0

    def take(self, mebibytes: float) -> Any:
        """Allocate."""
        self.asked = int(mebibytes * MIB)
        try:
            return self._tf.zeros([self.asked // 4])
        except self._tf.errors.ResourceExhaustedError:
            self.in_use = self._tf.config.experimental.get_memory_info("CPU:0")["current"]
            raise

    def usual(self, within: int = 0) -> None:
        """Make steps that use some memory while they last."""
        end = time.monotonic() + USUAL
        while time.monotonic() < end:
            self.take(within)
            self.step(0.05)

    def step(self, seconds: float) -> None:
        """End a step."""
        time.sleep(seconds)
        self._step()


def leak(case: Case) -> None:
    """Keep more in each step, 40 MiB a second."""
    while True:
        case.held.append(case.take(4))
        case.step(0.1)


def leaking_steps(case: Case) -> None:
    """Keep half a MiB more in each step of 32 MiB, 5 MiB a second."""
    while True:
        parts = [case.take(1) for _ in range(31)]
        case.held.append(case.take(0.5))
        del parts
        case.step(0.1)


def burst(case: Case) -> None:
    """Keep more in each step, 400 MiB a second: all of it between two polls."""
    case.held.append(case.take(40))
    case.usual()
    while True:
        case.held.append(case.take(4))
        case.step(0.01)


def batch(case: Case) -> None:
    """Request more in one piece than there is."""
    case.held.append(case.take(40))
    case.usual()
    case.take(230)


def within(case: Case) -> None:
    """Request what would fit between steps, with most of the memory in use within the step."""
    case.held.append(case.take(40))
    case.usual(within=20)
    activations = [case.take(10) for _ in range(15)]
    case.take(120)
    del activations


def fragments(case: Case) -> None:
    """Request less than is free, in one piece, while every other piece of 8 MiB is in use."""
    pieces = [case.take(8) for _ in range(26)]
    case.held = pieces[::2]
    del pieces
    case.usual()
    case.take(60)


CASES = {each.__name__: each for each in (leak, leaking_steps, burst, batch, within, fragments)}


@contextmanager
def watched(uuid: str) -> Iterator[Callable[[], None]]:
    """Report steps to the daemon until an out-of-memory error."""
    import tensorflow as tf  # noqa: PLC0415 - after its environment

    from gpuwarden import watch  # noqa: PLC0415

    try:
        with watch("headroom", devices={"CPU:0": uuid}, framework="tensorflow") as run:
            yield run.step
    except tf.errors.ResourceExhaustedError:
        pass


def main() -> None:
    """Run a case, and wait until the daemon was read."""
    name, mode, uuid, log = sys.argv[1:]
    os.environ |= {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_MAX_VLOG_LEVEL": "1",
        "TF_CPP_VMODULE": "bfc_allocator=1",
    }
    import tensorflow as tf  # noqa: PLC0415 - after its environment

    from gpuwarden.client.frameworks import tensorflow as adapter  # noqa: PLC0415
    from gpuwarden.protocol.messages import DeviceMemory  # noqa: PLC0415

    class PoolTold(adapter.TensorFlow):
        """Reader of the pool's size, for allocators that report it, like those of torch and JAX."""

        def read_memory(self, device: str) -> DeviceMemory:
            return replace(super().read_memory(device), reserved=pool_of(Path(log)))

    tf.zeros([1])
    if mode != "limit":  # the allocator has its limit by now; a GPU's does not report it
        del os.environ["TF_CPU_ALLOCATOR_USE_BFC"]
    if mode.endswith("pool reported"):
        adapter.TensorFlow = PoolTold  # type: ignore[misc] # in place of the adapter that a watch makes
    with watched(uuid) as step:
        case = Case(tf, step)
        CASES[name](case)
    print(json.dumps({"asked": case.asked, "in_use": case.in_use}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()

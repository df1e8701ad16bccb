"""Daemon for a shared device: `python shared_device_daemon.py FOLDER PACE CONTEXT_MIB`; it prints its port.

The driver is the simulation's, except for the memory of its one GPU and the processes on it: those are the shared
device's. PACE is `default`, or `fast` for a poll every 0.2 s and a host sample every second.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpuwarden.capture.simulation import Simulation
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.daemon import log_setup
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.sources import Source
from gpuwarden.nvml.constants import NO_INSTANCE
from shared_device import MIB, SharedDevice

GPU = 7  # of the simulated box: the one on which nothing runs


class SharedNvml:
    """NVML's functions for a host with one GPU, whose memory is a shared device's."""

    def __init__(self, device: SharedDevice) -> None:
        self._simulated = Simulation(GPU + 1).nvml
        self._device = device

    def __getattr__(self, name: str) -> Any:
        """Answer like the simulation."""
        return getattr(self._simulated, name)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        """Return 1."""
        return 1

    def nvmlDeviceGetHandleByIndex(self, _index: int) -> Any:  # noqa: N802 - likewise
        """Return the handle of the one GPU."""
        return self._simulated.nvmlDeviceGetHandleByIndex(GPU)

    def nvmlDeviceGetMemoryInfo(self, _handle: Any, _version: int | None = None) -> SimpleNamespace:  # noqa: N802 - likewise
        """Return the shared device's memory."""
        free = self._device.free
        return SimpleNamespace(total=self._device.size, reserved=0, free=free, used=self._device.size - free)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: Any) -> list[SimpleNamespace]:  # noqa: N802 - likewise
        """Return the processes on the shared device."""
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=held, gpuInstanceId=NO_INSTANCE, computeInstanceId=NO_INSTANCE)
            for pid, held in self._device.held().items()
        ]


def make_config(folder: Path, pace: str, context: int) -> Config:
    """Return the default configuration, in its own folder; the device's contexts are smaller than a GPU's."""
    config = Config()
    poll = config.poll
    if pace == "fast":
        poll = replace(poll, interval=0.2, slow_interval=1.0)
    runs = replace(config.runs, socket=folder / "run.sock", context_overhead=context)
    records = replace(config.records, path=folder / "records")
    return replace(
        config, poll=poll, runs=runs, records=records, web=replace(config.web, listen=Address("127.0.0.1", 0))
    )


def main() -> None:
    """Serve."""
    folder, pace = Path(sys.argv[1]), sys.argv[2]
    log_setup.configure("info")
    device = SharedDevice(folder / "device")
    config = make_config(folder, pace, context=int(sys.argv[3]) * MIB)
    served = Daemon(config, Source("nvml", SharedNvml(device)))  # type: ignore[arg-type] # most of it by __getattr__
    asyncio.run(served.run(lambda: print(served.web.address[1], flush=True)))


if __name__ == "__main__":
    main()

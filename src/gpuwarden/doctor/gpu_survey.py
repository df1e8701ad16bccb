"""One poll of the GPUs for the doctor."""

from __future__ import annotations

import asyncio
import threading
import time

from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import Plan
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml import driver

# Of each driver call. Without persistence mode the driver initializes each GPU at the first one, which takes seconds.
PATIENCE_SECONDS = 5.0
UNUSABLE_BINDING = "unusable_binding"  # fault of a snapshot: nvidia-ml-py is missing or too old


class GpuSurvey:
    """Poll of all GPUs, made once, at the first call. A driver or a GPU that hangs costs a few seconds."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._snapshot: Snapshot | None = None

    def __call__(self) -> Snapshot:
        """Return the poll. Called from several threads; a driver that does not answer is the snapshot's fault."""
        with self._turn:
            if self._snapshot is None:
                self._snapshot = self._survey()
            return self._snapshot

    def _survey(self) -> Snapshot:
        try:
            nvml = driver.binding()
        except ImportError:
            return Snapshot(time=time.time(), duration=0.0, fault=UNUSABLE_BINDING)
        return asyncio.run(Poller(nvml, PATIENCE_SECONDS, plan=Plan(opted_in=frozenset())).poll())

"""Captures of simulated machines, and polls of them."""

from __future__ import annotations

import asyncio

from simulated_box import Box, Clock

from gpuwarden.capture.capture_file import Capture
from gpuwarden.capture.recording import record
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.host_reader import HostMemory
from gpuwarden.nvml.interface import Nvml

INTERVAL = 2.0
HOST = HostMemory(size=1 << 40, available=1 << 39)


def record_capture(box: Box, frames: int = 3) -> Capture:
    """Record a simulated machine, advancing its clock."""
    return record(box.nvml, frames, INTERVAL, host_memory=lambda: HOST, sleep=box.clock.sleep, clock=box.clock)


def poll_once(nvml: Nvml) -> Snapshot:
    """Poll once, as the daemon does."""
    return asyncio.run(Poller(nvml, 30).poll())


def replay_capture(capture: Capture) -> tuple[Nvml, Clock]:
    """Replay a capture on a separate clock."""
    clock = Clock()
    nvml = CapturedNvml(capture, clock).nvml
    nvml.nvmlInit()
    return nvml, clock

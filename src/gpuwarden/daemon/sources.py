"""Sources of readings: the driver, a capture or simulated GPUs, behind one interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpuwarden.capture.capture_file import load_capture
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.capture.simulation import USERS, Simulation
from gpuwarden.config import schema
from gpuwarden.config.value_types import SourceChoice
from gpuwarden.formatting import format_fields
from gpuwarden.host.host_reader import HostMemory, read_host_memory
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.nvml import driver
from gpuwarden.nvml.interface import Nvml
from gpuwarden.owners.processes import ProcessIdentifier, ProcessIdentity
from gpuwarden.owners.users import look_up_user_name
from gpuwarden.protocol.messages import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Source of NVML's answers. The simulation also has training runs, whose reports `reports` drains.

    `reports` is called once a poll on the event loop and does not block; None stands for the end of a run's process.
    The simulation's `claim` gets the memory that runs hold by their reports, in bytes by UUID and pid. `identify` and
    `user_name` identify processes that are not this machine's.
    """

    name: Literal["nvml", "capture", "simulated"]
    nvml: Nvml
    host_memory: Callable[[], HostMemory] = read_host_memory
    clock: Callable[[], float] = time.monotonic  # seconds of the readings' time
    reports: Callable[[], Iterable[tuple[ProcessKey, Message | None]]] = lambda: ()
    claim: Callable[[Mapping[str, Mapping[int, int]]], None] | None = None
    identify: Callable[[Iterable[int]], Mapping[int, ProcessIdentity]] = lambda _pids: {}
    user_name: Callable[[int], str] = look_up_user_name

    @property
    def is_local(self) -> bool:
        """True if the pids, users and GPUs are this machine's, and not a simulation's or a capture's."""
        return self.name == "nvml"


def open_source(chosen: SourceChoice, simulation: schema.SimulationConfig) -> Source:
    """Open the chosen source. Only `auto` probes the driver, which blocks for driver.PROBE_TIMEOUT_SECONDS at most.

    Raises ValueError for an unusable capture, ImportError for an unusable nvidia-ml-py.
    """
    if chosen.name == "capture":
        return _capture(chosen.file)
    if chosen.name == "simulated":
        return _simulated(simulation)
    return _driver(simulation if chosen.name == "auto" else None)


def _driver(otherwise: schema.SimulationConfig | None) -> Source:
    nvml = driver.binding()
    reason = driver.explain_unusable(nvml) if otherwise else None
    if reason and otherwise:
        log.warning("no NVIDIA driver found, showing SIMULATED GPUs %s", format_fields(reason=reason))
        return _simulated(otherwise)
    return Source("nvml", nvml)


def _capture(file: Path | None) -> Source:
    if file is None:
        raise ValueError("the source capture needs a file: capture:FILE")
    captured = CapturedNvml(load_capture(file))
    return Source("capture", captured.nvml, captured.host_memory)


def _simulated(settings: schema.SimulationConfig) -> Source:
    simulation = Simulation(settings.gpus, stand_in_memory=settings.stand_in_memory)
    real = ProcessIdentifier()  # trainings that report to simulated GPUs

    def identify(pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        known = simulation.identify(pids := tuple(pids))
        return {**real.identify(set(pids) - known.keys()), **known}

    return Source(
        "simulated",
        simulation.nvml,
        reports=simulation.reports,
        claim=simulation.claim,
        identify=identify,
        user_name=lambda uid: USERS.get(uid) or look_up_user_name(uid),
    )

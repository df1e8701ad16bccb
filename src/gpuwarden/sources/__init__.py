"""Where readings come from: the driver, a capture or the simulation, behind one seam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gpuwarden import config
from gpuwarden.gpu.nvml import Nvml
from gpuwarden.protocol import Message
from gpuwarden.runs.peer import Peer


def _no_reports() -> Iterable[tuple[Peer, Message | None]]:
    return ()


@dataclass(frozen=True, slots=True)
class Source:
    """Something that answers as NVML does. A simulated box also has training runs, whose reports `reports` drains.

    `reports` is called once a poll on the event loop and does not block; None stands for the end of a run's process.
    """

    name: Literal["nvml", "capture", "simulated"]
    nvml: Nvml
    reports: Callable[[], Iterable[tuple[Peer, Message | None]]] = _no_reports


def open_source(chosen: config.Source, simulation: config.Simulation) -> Source:
    """Open the driver (interim)."""
    import pynvml

    return Source("nvml", pynvml)

"""What the registry tells each run's record of how to judge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuwarden.runs.predecessors import Predecessors
from gpuwarden.runs.stall import Patience


@dataclass(frozen=True, slots=True)
class Rules:
    """How runs are judged: `expiry` in seconds, `overhead` in bytes (docs/headroom.md); `wall` tells Unix time.

    `alarm` is called when there may be something that a run is to be told before the next poll is due, or somebody
    else, where the daemon is `alerting`.
    """

    expiry: float
    overhead: float
    patience: Patience
    wall: Callable[[], float]
    predecessors: Predecessors = field(default_factory=Predecessors)
    alarm: Callable[[], object] = lambda: None
    alerting: bool = False

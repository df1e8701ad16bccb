"""What one run has been told, and how often: kept with the run, written by who tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gpuwarden.protocol import ADVICE_KINDS, AdviceKind, Level, Resource


class Matter(NamedTuple):
    """What advice is about: of a GPU or MIG instance the resource, the XID or the process, as text."""

    kind: AdviceKind
    uuid: str
    of: str = ""


@dataclass(slots=True)
class Ear:
    """One run's. Used by one event loop.

    `told` holds what the run believes: of each Matter the level it was told, as long as that holds. It is forgotten
    when the run connects anew, which is then told what holds. `marked` are the faults that hold and stand in its story,
    `pressed` the levels of pressure that stand there, by UUID and resource.
    """

    told: dict[tuple[AdviceKind, str, str], Level] = field(default_factory=dict)
    marked: set[Matter] = field(default_factory=set)
    pressed: dict[tuple[str, Resource], Level] = field(default_factory=dict)
    sent: dict[AdviceKind, int] = field(default_factory=lambda: dict.fromkeys(ADVICE_KINDS, 0))
    neighbour_at: float | None = None  # monotonic: when it was last told of one
    alarms: dict[str, float] = field(default_factory=dict)  # bytes in use, by UUID, beyond which a level may rise

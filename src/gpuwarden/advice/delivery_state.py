"""Advice that one run got, and how often: kept with the run, written by the adviser."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwarden.protocol.messages import ADVICE_KINDS, AdviceKind, Level


@dataclass(frozen=True, slots=True)
class Matter:
    """Subject of advice: of a GPU or MIG instance the resource, the XID or the process, as text."""

    kind: AdviceKind
    uuid: str
    of: str = ""


@dataclass(slots=True)
class DeliveryState:
    """State of one run's advice. Used by one event loop.

    `told` holds what the run believes: of each matter the level that it was sent, as long as that holds. It is cleared
    when the run reconnects, which then gets what holds. `marked` is what stands in its story.
    """

    told: dict[Matter, Level] = field(default_factory=dict)
    marked: dict[Matter, Level] = field(default_factory=dict)
    sent: dict[AdviceKind, int] = field(default_factory=lambda: dict.fromkeys(ADVICE_KINDS, 0))
    neighbour_at: float | None = None  # monotonic: when it was last advised of one
    alarms: dict[str, float] = field(default_factory=dict)  # bytes in use, by UUID, beyond which a level may rise

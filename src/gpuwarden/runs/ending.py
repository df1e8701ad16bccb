"""How a run ended, concluded from what is known of it: its own goodbye, and what the kernel says of its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuwarden.protocol import End

Outcome = Literal["finished", "failed", "killed", "oom_killed", "aborted", "crashed", "unknown"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: `evidence` says in one sentence what that was concluded from; `at` is Unix time."""

    outcome: Outcome
    evidence: str
    at: float


def conclude(farewell: End | None) -> tuple[Outcome, str]:
    """Return the outcome and its evidence."""
    if farewell is None:
        return "unknown", "its process is gone without a goodbye"
    return farewell.outcome, f"it said: {farewell.reason}"

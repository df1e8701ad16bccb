"""Shapes of readings that subjects share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuwarden.metric import Labels


def present(names: Iterable[str], values: Iterable[float | None], scale: float = 1.0) -> dict[Labels, float]:
    """Pair label values with what was read of each, in units of `scale`; what is not there has no sample."""
    return {(name,): value * scale for name, value in zip(names, values, strict=True) if value is not None}


def one_of(states: Mapping[str, int], number: float | None) -> dict[Labels, float]:
    """Show a state as 1 among 0s. One that NVML has learnt since shows under its number; none where it is unknown."""
    if number is None:
        return {}
    shown: dict[Labels, float] = {(name,): float(state == number) for name, state in states.items()}
    return shown if number in states.values() else {**shown, (f"state_{number:.0f}",): 1.0}

"""What a run has had of GPUs so far: the totals that `account` adds up and receipts keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Share:
    """What a run has had of one GPU or MIG instance so far; None or empty where that is not known.

    `seconds` are those in which the run held memory there, `busy` and `idle` the ones of them with and without a kernel
    running, whosever. `joules` are the whole GPU's, of them `joules_by_power` its power added up over the polls.
    `throttled` is seconds by reason, `throttled_steps` the part of them in training steps. `xids` counts by code.
    """

    name: str
    seconds: float = 0.0
    busy: float | None = None
    idle: float | None = None
    joules: float | None = None
    joules_by_power: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    throttled_steps: Mapping[str, float] = field(default_factory=dict)
    memory_peak: int | None = None
    memory_limit: int | None = None
    headroom_at_peak: float | None = None
    lowest_headroom: float | None = None
    xids: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Account:
    """What a run has had so far: shares by UUID of a GPU or MIG instance, seconds by phase, host memory at its most."""

    shares: Mapping[str, Share] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    host_memory_peak: int | None = None


NO_ACCOUNT = Account()


def added(before: Share, since: Share) -> Share:
    """Add what was counted since to what was counted before."""
    higher = since if (since.memory_peak or 0) > (before.memory_peak or 0) else before
    lowest = [each for each in (before.lowest_headroom, since.lowest_headroom) if each is not None]
    return Share(
        name=since.name,
        seconds=before.seconds + since.seconds,
        busy=_both(before.busy, since.busy),
        idle=_both(before.idle, since.idle),
        joules=_both(before.joules, since.joules),
        joules_by_power=_both(before.joules_by_power, since.joules_by_power),
        throttled=_merged(before.throttled, since.throttled),
        throttled_steps=_merged(before.throttled_steps, since.throttled_steps),
        memory_peak=higher.memory_peak,
        memory_limit=since.memory_limit if since.memory_limit is not None else before.memory_limit,
        headroom_at_peak=higher.headroom_at_peak,
        lowest_headroom=min(lowest, default=None),
        xids={code: before.xids.get(code, 0) + since.xids.get(code, 0) for code in (*before.xids, *since.xids)},
    )


def _both(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


def _merged(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {reason: one.get(reason, 0.0) + other.get(reason, 0.0) for reason in (*one, *other)}

"""Headroom: the bytes a run can still allocate on a GPU. The formula, its reasons and its limits: docs/headroom.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """Memory of a GPU or MIG instance in bytes, in total and free; None where unknown."""

    free: float | None
    size: float | None


def headroom(space: DeviceSpace, pool: float | None, limit: float | None, in_use: float) -> float | None:
    """Return bytes, never below 0 nor above the device's size; None where neither a pool nor a limit is known.

    `pool` is what the run's allocator holds of the device, `in_use` what it has handed out of that, `limit` what it may
    hold at most (0 is none). With preallocation the pool's slack is the headroom and free memory is about 0; with
    memory growth the slack is about 0 and free memory is the headroom.
    """
    bounds: list[float] = []
    if space.free is not None and pool is not None:
        bounds.append(space.free + max(0, pool - in_use))
    if limit:
        bounds.append(limit - in_use)
    if not bounds:
        return None
    if space.size is not None:
        bounds.append(space.size - in_use)
    return max(0, min(bounds))


@dataclass(slots=True)
class Overhead:
    """Memory that a run's process holds of one device in addition to its allocator's pool: CUDA context, cuBLAS, cuDNN.

    `bytes` is a guess until it was measured. Used by one event loop.
    """

    bytes: float
    _held: float | None = None
    _heard: float | None = None

    def see(self, held: float | None, reserved: float | None, heard: float | None) -> None:
        """Take what the driver says of the process at a poll, and the allocator of its pool in the report `heard` last.

        Measures where the driver says the same before a report and after it: then the pool was, at the report, what it
        is at the poll. A run that grows all the while, or is within one long step, is not measured.
        """
        if held is not None and reserved is not None and held == self._held and heard != self._heard:
            self.bytes = held - reserved
        self._held, self._heard = held, heard

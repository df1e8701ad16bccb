"""Headroom: the bytes a run can still allocate on a GPU. The formula, its reasons and its limits: docs/headroom.md."""

from __future__ import annotations


def headroom(
    *, free: float | None, held: float | None, in_use: float, limit: float | None, overhead: float
) -> float | None:
    """Return bytes, never below 0; None where neither the driver's numbers nor an allocator's limit is known.

    `free` is the device's free memory, `held` the device memory of the run's process, `in_use` what its allocator has
    handed out, `limit` the allocator's own limit, and `overhead` what the process holds outside the allocator's pool
    (CUDA context, cuBLAS, cuDNN). The pool's slack is `held - in_use - overhead`: with preallocation that is the
    headroom and `free` is about 0; with memory growth the slack is about 0 and `free` is the headroom.
    """
    bounds: list[float] = []
    if free is not None and held is not None:
        bounds.append(free + max(0, held - in_use - overhead))
    if limit is not None:
        bounds.append(limit - in_use)
    return max(0, min(bounds)) if bounds else None

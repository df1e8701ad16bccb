"""Cost of the instrumentation of `gpuwarden run`: Python's start, and a step of torch.

    python bench/run_instrumentation.py

Medians of repeated starts, and of batches of steps with and without it that alternate in one process. The promise is at
most 1 % of a step of 50 ms, which is 500 µs, and 2.2 ms of a start.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from gpuwarden.client.boot import torch_steps

SITE = Path(__file__).parents[1] / "src/gpuwarden/client/boot/site"
STARTS = 100
STEPS = 2000
ROUNDS = 7


def measure_start(folder: str, **environment: str) -> float:
    """Return the CPU milliseconds of an interpreter that does nothing."""
    times = []
    for _ in range(STARTS):
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", "pass"],
            {"PATH": os.environ["PATH"], "PYTHONPATH": folder} | environment,
        )
        usage = os.wait4(pid, 0)[2]
        times.append((usage.ru_utime + usage.ru_stime) * 1e3)
    return median(times)


def measure_steps(step: Callable[[], Any]) -> float:
    """Return the microseconds of a step."""
    began = perf_counter()
    for _ in range(STEPS):
        step()
    return (perf_counter() - began) / STEPS * 1e6


def compare_torch() -> None:
    """Print the time of a small optimizer's step with and without the instrumentation."""
    try:
        import torch  # noqa: PLC0415 - where it is installed
    except ImportError as error:
        print(error)
        return

    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    model(torch.ones(8)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    removable: list[Any] = []
    register = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook

    def bare() -> None:
        while removable:
            removable.pop().remove()
        optimizer.step()

    def counted() -> None:
        if not removable:
            torch_steps.install(
                SimpleNamespace(register_optimizer_step_post_hook=lambda hook: removable.append(register(hook)))
            )
        optimizer.step()

    counted()
    pairs = [(measure_steps(bare), measure_steps(counted)) for _ in range(ROUNDS)]
    without, added = median(pair[0] for pair in pairs), median(pair[1] - pair[0] for pair in pairs)
    print(f"torch, SGD {without:8.1f} µs a step, {added:+6.1f} µs: {added / 50e3:.4%} of a step of 50 ms")


def main() -> None:
    """Print all figures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUWARDEN_SOCKET"] = f"{folder}/none.sock"
        Path(folder, "sitecustomize.py").touch()
        Path(folder, "notes").mkdir()
        bare, empty = measure_start(""), measure_start(folder)
        ours = measure_start(str(SITE), GPUWARDEN_RUN="1", GPUWARDEN_RUN_FOLDER=f"{folder}/notes")
        print(f"start {bare:.1f} ms of CPU, empty sitecustomize {empty - bare:+.1f}, gpuwarden's {ours - bare:+.1f}")
    compare_torch()


if __name__ == "__main__":
    main()

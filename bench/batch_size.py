"""Accuracy of advice on batch sizes: `python bench/batch_size.py` prints a Markdown table; 15 minutes.

Each model is trained with three batch sizes, each in a process that reports to the real daemon on the mock driver.
The size that the daemon advises is then tried in a real fit, and larger usual sizes until one runs out of memory, or
smaller ones until one does not. The allocator is TensorFlow's for GPUs, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess  # noqa: TID251 - a benchmark starts the programs that it measures
import sys
import time
from pathlib import Path
from typing import Any

from batch_size_runs import LIMIT_MIB, MODELS, OUT_OF_MEMORY
from scale import Daemon, run_daemon

from gpuwarden.analysis.batch_size.cost_model import list_usual_sizes
from mocked import start_sleepers
from programs import describe_conditions
from scraping import connect, fetch, read_page

MIB = 1 << 20
FIRST = {"dense": 1024, "convolutions": 64, "residual": 48, "attention": 16, "recurrent": 128}
RECORD_SECONDS = 60.0  # until the run has a record
HERE = Path(__file__).parent


class Model:
    """Model on one daemon, which learns from run to run."""

    def __init__(self, name: str, daemon: Daemon) -> None:
        self.name = name
        self._daemon = daemon
        self._uuid = re.findall(r'gpuwarden_gpu_up\{uuid="([^"]+)"\} 1', read_page(daemon.port).decode())[0]

    def fit(self, size: int) -> tuple[float | None, dict[str, Any]]:
        """Train with batches of that size; return the peak in bytes, None if out of memory, and the run record."""
        command = [sys.executable, str(HERE / "batch_size_runs.py"), self.name, str(size), self._uuid]
        env = {**os.environ, "GPUWARDEN_SOCKET": str(self._daemon.folder / "run.sock")}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            peak, errors = run.communicate()
        if run.returncode not in (0, OUT_OF_MEMORY):
            raise RuntimeError(f"{self.name} at {size}: status {run.returncode}: {errors[-2000:]}")
        return (None if run.returncode else float(peak)), self._record(run.pid)

    def _record(self, pid: int) -> dict[str, Any]:
        end = time.monotonic() + RECORD_SECONDS
        while time.monotonic() < end:
            for each in self._get("/api/v1/runs")["past"]:
                if each["pid"] == pid:
                    return self._get(f"/api/v1/runs/{each['run_id']}")
            time.sleep(0.2)
        raise TimeoutError(f"no record of {pid}")

    def _get(self, path: str) -> dict[str, Any]:
        return dict(json.loads(fetch(connect(self._daemon.port), path=path)))

    def find_largest(self, advised: int) -> tuple[int, int | None, float | None]:
        """Return the largest usual size that fits, the smallest that does not, and the peak with the advised size."""
        sizes = list_usual_sizes(8 * advised)
        at = sizes.index(advised)
        peak = self.fit(advised)[0]
        if peak is None:
            while at and self.fit(sizes[at - 1])[0] is None:
                at -= 1
            return sizes[at - 1], sizes[at], None
        while at + 1 < len(sizes) and self.fit(sizes[at + 1])[0] is not None:
            at += 1
        return sizes[at], sizes[at + 1] if at + 1 < len(sizes) else None, peak


def measure_model(name: str, sizes: list[int], *, quick: bool) -> str:
    """Measure one model; a quick run does not try the advised size."""
    with start_sleepers(1) as pids, run_daemon(pids, gpus=1) as started:
        model = Model(name, started)
        advised = [model.fit(size)[1].get("batch_size_advice", {}) for size in sizes]
        listed = ", ".join(f"{each['advised']} ({each['confidence']})" if each else "none" for each in advised)
        advice = advised[-1]
        begin = f"| {name} | {', '.join(map(str, sizes))} | {listed} |"
        if not advice or quick:
            return begin + " |" * 7
        largest, too_large, peak = model.find_largest(advice["advised"])
    needed = advice["needed_bytes"]
    figures = [
        f"{advice['per_example_bytes'] / MIB:.2f}",
        f"{advice['residual_bytes'] / MIB:.1f}",
        f"{needed / MIB:.0f}",
        "out of memory" if peak is None else f"{peak / MIB:.0f}",
        "" if peak is None else f"{(needed - peak) / peak:+.1%}",
        str(largest),
        "" if too_large is None else str(too_large),
    ]
    return f"{begin} {' | '.join(figures)} |"


def main() -> None:
    """Measure all models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: one model, one size")
    quick = parser.parse_args().quick
    print(f"{describe_conditions()}; a limit of {LIMIT_MIB} MiB; MiB.\n")
    print("| model | tried | advised after each | an example | off | predicted peak | peak | error | fits | does not |")
    print("| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: |")
    for name in MODELS[-1:] if quick else MODELS:
        sizes = [FIRST[name] << each for each in range(1 if quick else 3)]
        print(measure_model(name, sizes, quick=quick), flush=True)


if __name__ == "__main__":
    main()

"""Table of the processes on each GPU."""

from __future__ import annotations

from classic import Panel, Query, override
from looks import HIDDEN
from panels import table
from series import BOX, DEVICE, join_gpu, placed, series
from ways import IN_CLUSTER, run_links

from gpuwarden.owners.kinds import BY_PRIORITY
from gpuwarden.owners.metrics import ProcessReadings

_WHO = tuple(label for label in ProcessReadings.info.labels if label != "pid")


def processes() -> list[Panel]:
    """Return the panels."""
    held = f"max by ({DEVICE}, pid) ({series(ProcessReadings.gpu_memory_used_bytes)})"
    known = f"max by ({BOX}, pid, {', '.join(_WHO)}) ({series(ProcessReadings.info)})"
    each = f"{join_gpu(held)} * on ({BOX}, pid) group_left ({', '.join(_WHO)}) {known}"
    labels = f"{DEVICE}, gpu, pid, {', '.join(_WHO)}, place"
    return [
        table(
            28,
            "Processes",
            "Processes with memory on a GPU, with owner and program (docs/understand/owners.md).",
            Query(f"max by ({labels}) ({placed(each)})", "memory", now=True),
            columns={
                "GPU": "gpu",
                "PID": "pid",
                "User": "user",
                "Program": "comm",
                "Memory": "memory",
                **{kind.label.replace("_", " ").capitalize(): kind.label for kind in BY_PRIORITY},
                "Host": "instance",
                IN_CLUSTER: "place",
            },
            width=24,
            height=8,
            empty="no process uses a GPU, or processes.series is off (docs/understand/owners.md)",
            sort="Memory",
            descending=True,
            overrides=[
                override("GPU", custom__width=50),
                override("PID", custom__width=85),
                override("User", custom__width=90),
                override("Slurm job id", custom__width=110),
                override("Program", custom__width=110),
                override("Memory", unit="bytes", custom__width=90),
                override("Run id", links=run_links("This run")),
                *(override(name, **HIDDEN) for name in ("Host", IN_CLUSTER)),
            ],
        ),
    ]

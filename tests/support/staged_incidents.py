"""Incidents of staged failures as JSON, and daemons that have them in their run database."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from failure_stages import STAGED, run_staged

from gpuwarden.incidents import incident_table
from gpuwarden.incidents.incident import outline
from gpuwarden.incidents.incident_table import IncidentRow, IncidentShare
from gpuwarden.records.writer import RecordWriter

SECONDS = 60.0  # for the disk of a busy host
STEP_SECONDS = 1.0  # of a rank, in `ranks_of_two_hosts`


@cache
def _staged(name: str) -> str:
    (staged,) = [each for each in STAGED if each.name == name]
    with TemporaryDirectory() as folder:
        return json.dumps(run_staged(staged, Path(folder))[0])


def staged_incident(name: str, **changes: Any) -> dict[str, Any]:
    """Return the whole incident of a staged failure, with changes of its keys."""
    return {**json.loads(_staged(name)), **changes}


def move_clock(incident: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return an incident as a host records it whose clock is ahead."""

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: moved(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [moved(each, key) for each in value]
        return value + seconds if key.endswith("timestamp_seconds") and value is not None else value

    result: dict[str, Any] = moved(incident)
    return result


def ranks_of_two_hosts(ahead_seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the incidents of a job whose GPU is lost on host a; host b, with another clock, has an NCCL error.

    The ranks take each step together.
    """
    lost = staged_incident("lost_gpu_of_a_job", host="a")
    other = staged_incident("crash_of_a_rank", host="b")
    other["box"] = {**other["box"], "boot_id": "another boot"}
    other["finding"] = {
        "text": "Run llama had an NCCL error (DistBackendError) at 08:00:30, and failed (exit status 1).",
        "root": {
            "timestamp_seconds": lost["began_timestamp_seconds"] - 1.0,
            "kind": "error",
            "text": "Run llama (rank 4) had an NCCL error (DistBackendError).",
        },
    }
    other["began_timestamp_seconds"] = lost["began_timestamp_seconds"] - 1.0
    other["jobs"] = lost["jobs"]
    for incident in (lost, other):
        times = incident["series"]["timestamp_seconds"]
        start = lost["series"]["timestamp_seconds"][0]
        for steps in incident["series"]["runs"].values():
            steps["steps"] = [int((at - start) / STEP_SECONDS) for at in times]
    return lost, move_clock(other, ahead_seconds)


def store_incidents(folder: Path, incidents: Iterable[dict[str, Any]]) -> None:
    """Write incidents into the run database of a `Daemon` with this folder, before it starts."""

    async def write() -> None:
        writer = RecordWriter(folder / "state/receipts", 100)
        await writer.open()
        await writer.wait(SECONDS)
        for incident in incidents:
            row = IncidentRow(
                incident["id"],
                IncidentShare(incident.get("uid", -1)),
                incident["at_timestamp_seconds"],
                json.dumps(outline(incident)).encode(),
                zlib.compress(json.dumps(incident).encode()),
            )
            await writer.run(incident_table.write, row, 100)
        await writer.close()

    asyncio.run(write())

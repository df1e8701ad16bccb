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


@cache
def _staged(name: str) -> str:
    (staged,) = [each for each in STAGED if each.name == name]
    with TemporaryDirectory() as folder:
        return json.dumps(run_staged(staged, Path(folder))[0])


def staged_incident(name: str, **changes: Any) -> dict[str, Any]:
    """Return the whole incident of a staged failure, with changes of its keys."""
    return {**json.loads(_staged(name)), **changes}


def store_incidents(folder: Path, incidents: Iterable[dict[str, Any]]) -> None:
    """Write incidents into the run database of a `Daemon` with this folder, before it starts."""

    async def write() -> None:
        writer = RecordWriter(folder / "state/records", 100)
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

"""Private texts of incidents: messages of errors, of their user, and lines of the kernel log, of root."""

from __future__ import annotations

from typing import Any

from gpuwarden.records.privacy import Reader, withhold_private

WITHHELD_LINE = "not shown: only root and the daemon's user can read it over the Unix socket"


def withhold(document: dict[str, Any], may_read: Reader) -> dict[str, Any]:
    """Withhold from an incident's JSON what a reader may not see; change it in place, and return it."""
    for run in document.get("runs", ()):
        withhold_private(run, may_read)
    if not may_read(
        0
    ):  # not those who read the texts of the daemon's user: it may read the kernel log as others may not
        for line in document.get("kernel_lines", ()):
            line["text"] = WITHHELD_LINE
    return document

"""Private texts of incidents: messages of errors, of their user, and lines of the kernel log, of the daemon's user."""

from __future__ import annotations

import os
from typing import Any

from gpuwarden.records.privacy import WITHHELD, Reader, withhold_errors


def withhold(document: dict[str, Any], may_read: Reader) -> dict[str, Any]:
    """Withhold from an incident's JSON what a reader may not see; change it in place, and return it."""
    for run in document.get("runs", ()):
        withhold_errors(run, may_read)
    if not may_read(os.geteuid()):
        for line in document.get("kernel_lines", ()):
            line["text"] = WITHHELD
    return document

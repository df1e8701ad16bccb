"""Where receipts lie: as configured, in systemd's state directory, or in the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from gpuwarden.config import Config
from gpuwarden.config import Receipts as Settings


def place(settings: Settings) -> Path | None:
    """Return the folder; None for none. One that nobody chose is where this user may write."""
    chosen = settings.path.path
    if chosen is None or settings.path != Config().receipts.path:
        return chosen
    if state := os.environ.get("STATE_DIRECTORY"):  # systemd.exec(5); several are separated by colons
        return Path(state.partition(":")[0]) / "receipts"
    return chosen if os.geteuid() == 0 else of_user()


def of_user() -> Path | None:
    """Return the folder in this user's home (XDG Base Directory Specification); None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return Path(state) / "gpuwarden" / "receipts"

"""Folder of the daemon's persistent state: systemd's state directory, or one in the user's home."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_STATE_FOLDER = Path("/var/lib/gpuwarden")


def state_folder() -> Path | None:
    """Return the folder, which may not exist yet; None for a user without a home."""
    if state := os.environ.get("STATE_DIRECTORY"):  # systemd.exec(5); several are separated by colons
        return Path(state.partition(":")[0])
    return SYSTEM_STATE_FOLDER if os.geteuid() == 0 else user_state_folder()


def user_state_folder() -> Path | None:
    """Return the folder in this user's home (XDG Base Directory Specification); None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return Path(state) / "gpuwarden"

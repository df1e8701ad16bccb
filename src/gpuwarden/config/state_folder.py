"""Folders of the daemon's persistent state, and in it of the run database.

The state is in systemd's state directory, or in the user's home.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpuwarden.config.schema import Config, RecordsConfig

SYSTEM_STATE_FOLDER = Path("/var/lib/gpuwarden")


def state_folder() -> Path | None:
    """Return the folder, which may not exist yet; None for a user without a home."""
    if state := os.environ.get("STATE_DIRECTORY"):  # systemd.exec(5); several are separated by colons
        return Path(state.partition(":")[0])
    return SYSTEM_STATE_FOLDER if os.geteuid() == 0 else _user_state_folder()


def find_database_folder(settings: RecordsConfig) -> Path | None:
    """Return the configured folder of the run database, by default one in the state folder; None for no database."""
    if settings.path is None or settings.path != Config().records.path:
        return settings.path
    return _database_folder(state_folder())


def find_user_database_folder() -> Path | None:
    """Return the folder of the run database in this user's home; None without a home."""
    return _database_folder(_user_state_folder())


def _user_state_folder() -> Path | None:
    """Return the folder in this user's home (XDG Base Directory Specification); None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return Path(state) / "gpuwarden"


def _database_folder(state: Path | None) -> Path | None:
    return state / "records" if state else None

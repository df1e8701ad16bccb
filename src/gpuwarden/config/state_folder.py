"""Folder of the daemon's persistent state: systemd's state directory, or one in the user's home; the run database."""

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
    """Return the folder of the run database; None for no database. By default this user may write to it."""
    if settings.path is None or settings.path != Config().records.path:
        return settings.path
    return _in(state_folder())


def find_user_database_folder() -> Path | None:
    """Return the folder of the run database in this user's home; None without a home."""
    return _in(_user_state_folder())


def _user_state_folder() -> Path | None:
    """Return the folder in this user's home (XDG Base Directory Specification); None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return Path(state) / "gpuwarden"


def _in(folder: Path | None) -> Path | None:
    return folder / "records" if folder else None

"""Folder of the run database: as configured, or in the daemon's state directory."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.config import state_folder
from gpuwarden.config.schema import Config
from gpuwarden.config.schema import RecordsConfig as Settings


def find_database_folder(settings: Settings) -> Path | None:
    """Return the folder; None for no database. The default is a folder that this user may write to."""
    chosen = settings.path
    if chosen is None or chosen != Config().records.path:
        return chosen
    return _in(state_folder.state_folder())


def find_user_database_folder() -> Path | None:
    """Return the folder in this user's home; None without a home."""
    return _in(state_folder.user_state_folder())


def _in(folder: Path | None) -> Path | None:
    return folder / "records" if folder else None

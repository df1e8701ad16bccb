"""Run records from the daemon's database, for `gpuwarden runs` while no daemon answers.

Who may read the file may read all records: its owner, its group and root.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from gpuwarden.config.schema import Config
from gpuwarden.config.state_folder import find_database_folder, find_user_database_folder
from gpuwarden.records.joining import join_records
from gpuwarden.records.record import MAX_LISTED, RunRecord
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.store import RecordStore


def list_folders(config: Config) -> list[Path]:
    """Return the folders that can have the database."""
    own = find_user_database_folder()
    folders = [find_database_folder(config.records), config.records.path, own if own and own.is_dir() else None]
    return list(dict.fromkeys(folder for folder in folders if folder))


def read_runs(folder: Path, run_id: str | None) -> Any:
    """Return one run, None if it is unknown, or all without an ID, as the daemon's API does. Raises OSError."""
    store = RecordStore.open_read_only(folder)
    try:
        stored = store.open(MAX_LISTED)
        unfinished = [reduce(join_records, parts) for parts in stored.unfinished]
        if run_id is None:
            lists = {"live": unfinished, "past": stored.ended}
            return {
                **{name: list(_newest_first(runs)) for name, runs in lists.items()},
                "folder": str(folder),
                "url": None,
            }
        if whole := store.find(run_id):
            return json.loads(whole)
        return next((json_from_record(run) for run in unfinished if run.run_id == run_id), None)
    finally:
        store.close()


def _newest_first(runs: Iterable[RunRecord]) -> Iterator[dict[str, Any]]:
    return map(json_from_record, sorted(runs, key=lambda run: run.began_timestamp_seconds, reverse=True))

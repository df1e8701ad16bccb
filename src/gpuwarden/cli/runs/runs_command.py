"""Command `gpuwarden runs`: run records from the daemon, for a person or as JSON.

Names and messages come from training processes: they reach the terminal without anything that it would obey.
"""

from __future__ import annotations

import argparse
import json
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from gpuwarden.cli.common.api_client import NoAnswerError, StatusError, daemon_url, fetch_json
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import sanitize, write
from gpuwarden.cli.runs.run_details import render_details
from gpuwarden.cli.runs.run_list import render_table
from gpuwarden.config.schema import Config
from gpuwarden.records.paths import find_database_folder, find_user_database_folder
from gpuwarden.records.record import MAX_LISTED, RunRecord, RunRecordError, record_from_json


def list_runs(parsed: argparse.Namespace) -> int:
    """Print the runs. Raises OSError."""
    write(render_list(load_config(parsed), parsed.which, parsed.limit, as_json=parsed.json))
    return 0


def show_run(parsed: argparse.Namespace) -> int:
    """Print one run. Raises OSError."""
    write(render_run(load_config(parsed), parsed.run, as_json=parsed.json))
    return 0


def render_list(config: Config, which: Sequence[str], limit: int | None, *, as_json: bool) -> str:
    """Return the runs in words or as JSON, those that go on first; `which` is of live and past. Raises OSError."""
    answer = _fetch_runs(config, limit)
    chosen = {name: answer[name][:limit] for name in which}
    if as_json:
        return json.dumps({**answer, "live": [], "past": [], **chosen}, indent=2) + "\n"
    found = [each for name in which for each in chosen[name]]
    if not found:
        return f"no training run has reported to the daemon at {daemon_url(config.web.listen)}\n"
    records: list[RunRecord] = []
    unread: list[str] = []
    for each in found:
        try:
            records.append(record_from_json(each))
        except RunRecordError as error:  # of another version, or damaged: the others are as good as ever
            unread.append(f"{_describe_run(each)} can't be read: {sanitize(str(error))}")
    if not records:
        raise OSError(None, f"none of {len(found)} runs can be read by this version; {unread[0]}")
    return "\n".join([*render_table(records, _terminal_width()), *unread]) + "\n"


def render_run(config: Config, prefix: str, *, as_json: bool) -> str:
    """Return one run, named by the begin of its id, in words or as JSON. Raises OSError."""
    answer = _fetch_runs(config)
    found: dict[str, Any] = {}
    for each in (*answer["live"], *answer["past"]):
        if isinstance(each, dict) and str(each.get("run_id", "")).startswith(prefix):
            found.setdefault(str(each["run_id"]), each)  # of several boots' the newest
    if len(found) > 1 and prefix not in found:
        some = ", ".join(sanitize(run_id) for run_id in list(found)[:8])
        raise OSError(None, f"{sanitize(prefix)} is the begin of {len(found)} runs: {some}")
    run_id = prefix if prefix in found else next(iter(found), prefix)  # a whole id may be of a run too old for the list
    whole = _fetch(config, f"/{urllib.parse.quote(run_id, safe='', errors='surrogateescape')}") or found.get(run_id)
    if whole is None:
        raise OSError(
            None, f"no run {sanitize(prefix)} is known; gpuwarden runs lists them. {_describe_folders(config, answer)}"
        )
    if as_json:
        return json.dumps(whole, indent=2) + "\n"
    try:
        record = record_from_json(whole)
    except RunRecordError as error:
        raise OSError(None, f"the daemon's answer is not of this version: {error}") from None
    return "\n".join(render_details(record, _terminal_width())) + "\n"


def _fetch_runs(config: Config, limit: int | None = None) -> dict[str, Any]:
    """Return the records of all runs that go on, and of the newest that ended, without their stories."""
    answer = _fetch(config, f"?limit={min(limit, MAX_LISTED)}" if limit else "")
    if not (isinstance(answer, dict) and all(isinstance(answer.get(name), list) for name in ("live", "past"))):
        raise OSError(None, f"{daemon_url(config.web.listen)} is no gpuwarden that knows of runs")
    return answer


def _fetch(config: Config, path: str) -> Any:
    url = daemon_url(config.web.listen)
    try:
        return fetch_json(config.web.listen, f"/api/v1/runs{path}")
    except StatusError as error:
        if path.startswith("/") and error.status == HTTPStatus.NOT_FOUND:  # it was forgotten meanwhile
            return None
        if path.startswith("/") and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(None, f"the daemon at {url} cannot read its run database now; its log says why") from None
        raise OSError(
            None, f"{url} is no gpuwarden that knows of runs: it answers with status {error.status}"
        ) from None
    except NoAnswerError as error:
        raise OSError(
            None,
            f"no daemon answers at {url}: {error}; if it runs, say where with --listen or --config. "
            + _describe_folders(config, {}),
        ) from None


def _describe_folders(config: Config, answer: Mapping[str, Any]) -> str:
    """Return where the records of past runs are, in words."""
    if "folder" in answer:
        return f"Receipts lie in {sanitize(str(answer['folder']))}"
    if answer:
        return "This daemon keeps receipts in memory alone, those of its own time"
    own = find_user_database_folder()
    folders = [config.receipts.path, find_database_folder(config.receipts), own if own and own.is_dir() else None]
    names = dict.fromkeys(sanitize(str(folder)) for folder in folders if folder)
    return f"Receipts of past runs lie in {' or '.join(names)}" if names else "Receipts are not kept"


def _describe_run(listed: Any) -> str:
    run_id = listed.get("run_id") if isinstance(listed, dict) else None
    return f"run {sanitize(str(run_id))}" if run_id is not None else "a run without an id"


def _terminal_width() -> int:
    return shutil.get_terminal_size((80, 24)).columns

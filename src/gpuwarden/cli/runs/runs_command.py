"""Command `gpuwarden runs`: run records from the daemon, for a person or as JSON.

Names and messages come from training processes; they are sanitized before they reach the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gpuwarden.cli.common.api_client import ApiError, daemon_url, fetch_json, find_socket, unexpected_response
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import complain, terminal_width, write
from gpuwarden.cli.runs.run_details import render_details
from gpuwarden.cli.runs.run_list import render_table
from gpuwarden.cli.runs.stored_runs import list_folders, read_runs
from gpuwarden.cli.top.state_reader import fetch_gpu_numbers
from gpuwarden.config.schema import Config
from gpuwarden.formatting import sanitize
from gpuwarden.records.record import MAX_LISTED, RunRecord, record_from_json
from gpuwarden.records.record_json import RunRecordError
from gpuwarden.web.api.api_paths import RUN_PAGE, RUNS


def list_runs(parsed: argparse.Namespace) -> int:
    """Print the runs. Raises OSError."""
    write(render_list(load_config(parsed), parsed.which, parsed.limit, as_json=parsed.json))
    return 0


def show_run(parsed: argparse.Namespace) -> int:
    """Print one run. Raises OSError."""
    write(render_run(load_config(parsed), parsed.run, as_json=parsed.json))
    return 0


def render_list(config: Config, which: Sequence[str], limit: int | None, *, as_json: bool) -> str:
    """Return the runs as a table or as JSON, running ones first; `which` has live, past or both. Raises OSError."""
    answer = _fetch_runs(config, limit)
    chosen = {name: answer[name][:limit] for name in which}
    if as_json:
        return json.dumps({**answer, "live": [], "past": [], **chosen}, indent=2) + "\n"
    found = [each for name in which for each in chosen[name]]
    if not found:
        kind = "" if len(which) > 1 else "running " if which[0] == "live" else "finished "
        return f"no {kind}training run at {daemon_url(config.api)}\n"
    records: list[RunRecord] = []
    unread: list[str] = []
    for each in found:
        try:
            records.append(record_from_json(each))
        except RunRecordError as error:  # of another version, or damaged
            unread.append(f"{_describe_run(each)} cannot be read: {sanitize(str(error))}")
    if not records:
        raise OSError(None, f"this version cannot read any of the {len(found)} runs; {unread[0]}")
    page = _page(config, answer, "RUN")
    pages = [f"page of a run: {page}"] if page else []
    return "\n".join([*render_table(records, fetch_gpu_numbers(config.api), terminal_width()), *unread, *pages]) + "\n"


def render_run(config: Config, prefix: str, *, as_json: bool) -> str:
    """Return one run, chosen as `fetch_run` does, as a report or as JSON. Raises OSError."""
    answer = _fetch_runs(config)
    whole = _find_run(config, answer, prefix)
    if as_json:
        return json.dumps(whole, indent=2) + "\n"
    record = read_record(whole)
    page = _page(config, answer, record.run_id)
    return "\n".join(render_details(record, fetch_gpu_numbers(config.api), terminal_width(), page)) + "\n"


def _page(config: Config, answer: Mapping[str, Any], run_id: str) -> str | None:
    """Return the URL of a run's page, below the URL of pages in the daemon's answer; its path if that is unknown.

    None without a daemon, as its database has none.
    """
    if answer.get("url", "") is None:
        return None
    listen = config.web.listen
    url = answer.get("url", daemon_url(listen) if listen.port else "")
    return f"{sanitize(str(url))}{RUN_PAGE}{urllib.parse.quote(run_id, safe='')}"


def read_record(whole: Any) -> RunRecord:
    """Return a run record from the daemon's answer. Raises OSError."""
    try:
        return record_from_json(whole)
    except RunRecordError as error:
        raise OSError(None, f"this version cannot read the run record: {error}") from None


def fetch_run(config: Config, prefix: str) -> Any:
    """Return the record of one run as JSON. Raises OSError.

    It is chosen by a prefix of its ID, as the last that began (`last`), or as the newest whose name is, or begins so.
    """
    return _find_run(config, _fetch_runs(config), prefix)


def _find_run(config: Config, answer: Mapping[str, Any], prefix: str) -> Any:
    runs = [each for each in (*answer["live"], *answer["past"]) if isinstance(each, dict)]
    runs.sort(key=lambda each: float(each.get("began_timestamp_seconds", 0)), reverse=True)
    found: dict[str, Any] = {}
    for each in runs if prefix != "last" else runs[:1]:
        if prefix == "last" or str(each.get("run_id", "")).startswith(prefix):
            found.setdefault(str(each.get("run_id")), each)  # an ID is unique until the next boot
    if not found:
        named = [each for each in runs if str(each.get("name", "")).startswith(prefix)]
        named = [each for each in named if each.get("name") == prefix] or named
        found = {str(each.get("run_id")): each for each in named[:1]}
        if len(named) > 1:
            complain(
                f"the newest of {len(named)} runs of a name that begins with {sanitize(prefix)}: {', '.join(found)}"
            )
    if len(found) > 1 and prefix not in found:
        some = ", ".join(sanitize(run_id) for run_id in list(found)[:8])
        raise OSError(None, f"{sanitize(prefix)} matches {len(found)} runs: {some}")
    run_id = prefix if prefix in found else next(iter(found), prefix)  # a whole ID may be of a run not in the list
    path = f"/{urllib.parse.quote(run_id, safe='', errors='surrogateescape')}"
    whole = _fetch(config, path, find_socket(answer)) or found.get(run_id)
    if whole is None:
        raise OSError(
            None, f"no run {sanitize(prefix)}; list the runs with: gpuwarden runs. {_describe_folders(config, answer)}"
        )
    return whole


def _fetch_runs(config: Config, limit: int | None = None) -> dict[str, Any]:
    """Return the records of all running runs and of the newest finished ones, without their timelines."""
    path = f"?limit={min(limit, MAX_LISTED)}" if limit else ""
    answer = _fetch(config, path)
    if isinstance(answer, dict) and (socket := find_socket(answer)):
        answer = _fetch(config, path, socket)
    if not (isinstance(answer, dict) and all(isinstance(answer.get(name), list) for name in ("live", "past"))):
        raise unexpected_response(config.api, RUNS)
    return answer


def _fetch(config: Config, path: str, socket: Path | None = None) -> Any:
    """Return the answer to a path below RUNS, from the socket if it answers; None for an unknown run."""
    try:
        return fetch_json(socket or config.api, f"{RUNS}{path}")
    except ApiError as error:
        if socket and error.status is None:  # as in a container that does not mount the socket's folder
            return _fetch(config, path)
        if path.startswith("/") and error.status == HTTPStatus.NOT_FOUND:
            return None
        if error.status is None:
            return _read_stored(config, path, error)
        raise


def _read_stored(config: Config, path: str, error: ApiError) -> Any:
    """Return the answer of a daemon that does not answer, from its database. Raises OSError."""
    run_id = urllib.parse.unquote(path[1:]) if path.startswith("/") else None
    for folder in list_folders(config):
        with contextlib.suppress(OSError):
            answer = read_runs(folder, run_id)
            if run_id is None:
                complain(f"{error.strerror}. These are the records in {sanitize(str(folder))}")
            return answer
    raise OSError(None, f"{error.strerror}. {_describe_folders(config, {})}") from None


def _describe_folders(config: Config, answer: Mapping[str, Any]) -> str:
    if "folder" in answer:
        return f"Run records are in {sanitize(str(answer['folder']))}"
    if answer:
        return "This daemon does not store finished runs on disk (option `records`)"
    names = [sanitize(str(folder)) for folder in list_folders(config)]
    return f"Run records are in {' or '.join(names)}" if names else "Run records are not stored"


def _describe_run(listed: Any) -> str:
    run_id = listed.get("run_id") if isinstance(listed, dict) else None
    return f"run {sanitize(str(run_id))}" if run_id is not None else "a run without an ID"

"""Incidents from the daemon, by id, and from files that `gpuwarden incidents show --json` has written."""

from __future__ import annotations

import json
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeGuard

from gpuwarden.cli.common.api_client import ApiError, fetch_json, find_socket, unexpected_response
from gpuwarden.config.schema import Config
from gpuwarden.formatting import sanitize
from gpuwarden.web.api.api_paths import INCIDENTS, RUNS

MAX_LISTED = 1000


def fetch_incidents(config: Config, limit: int | None = None) -> dict[str, Any]:
    """Return the daemon's list of incidents, the newest first, without their details. Raises OSError."""
    answer = fetch_json(config.api, INCIDENTS + (f"?limit={min(limit, MAX_LISTED)}" if limit else ""))
    if not isinstance(answer, dict) or not isinstance(answer.get("incidents"), list):
        raise unexpected_response(config.api, INCIDENTS)
    return answer


def read_incident(config: Config, name: str) -> dict[str, Any]:
    """Return a whole incident; the name is a file, or an id or a prefix of one at the daemon. Raises OSError."""
    if "/" in name or name.endswith(".json") or Path(name).is_file():
        return _read_file(Path(name))
    return _fetch_incident(config, name)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise OSError(
            None, f"{path}: not a JSON file; write an incident with: gpuwarden incidents show ID --json > FILE"
        ) from None
    if not _is_whole(value):
        raise OSError(None, f"{path}: not a whole incident; write one with: gpuwarden incidents show ID --json > FILE")
    return value


def _is_whole(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and isinstance(value.get("id"), str) and "finding" in value and "box" in value


def _fetch_incident(config: Config, prefix: str) -> dict[str, Any]:
    listed = [
        str(each.get("id")) for each in fetch_incidents(config, MAX_LISTED)["incidents"] if isinstance(each, dict)
    ]
    found = [name for name in listed if name.startswith(prefix)]
    if prefix == "last" and listed:
        found = listed[:1]
    if len(found) > 1 and prefix not in found:
        some = ", ".join(map(sanitize, found[:4]))
        raise OSError(None, f"{sanitize(prefix)} matches {len(found)} incidents: {some}")
    name = prefix if prefix in found else found[0] if found else prefix
    path = f"{INCIDENTS}/{urllib.parse.quote(name, safe='', errors='surrogateescape')}"
    try:
        answer = _fetch_privately(config, path)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise OSError(
                None, f"no incident {sanitize(prefix)}; list the incidents with: gpuwarden incidents"
            ) from None
        raise
    if not _is_whole(answer):
        raise unexpected_response(config.api, path)
    return answer


def _fetch_privately(config: Config, path: str) -> Any:
    """Return an answer with the texts that this user may read: from the Unix socket, if it answers."""
    runs = fetch_json(config.api, f"{RUNS}?limit=1")
    socket = find_socket(runs) if isinstance(runs, dict) else None
    if socket:
        try:
            return fetch_json(socket, path)
        except ApiError as error:
            if error.status is not None:
                raise
    return fetch_json(config.api, path)  # of another machine, or the socket's folder is not mounted

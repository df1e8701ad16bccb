"""Records of a program's runs, from the daemon that watched it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from gpuwarden.cli.common.api_client import ApiError, fetch_json
from gpuwarden.launcher.private_daemon import DaemonPlace
from gpuwarden.records.record import RunRecord, record_from_json
from gpuwarden.records.record_json import RunRecordError
from gpuwarden.web.api.api_paths import RUNS

SETTLE_SECONDS = 6.0  # within which the daemon has concluded how a run ended
_POLL_SECONDS = 0.2


def await_records(
    place: DaemonPlace, pids: Collection[int], since: float, should_hurry: Callable[[], bool]
) -> list[RunRecord]:
    """Return the records of the program's runs, with how they ended; blocks for up to SETTLE_SECONDS.

    Stops waiting for ends once `should_hurry` returns True.

    A private daemon has no other runs. On a shared one they are those of `pids` that began after `since`, Unix time.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        listed = [each for each in _fetch_runs(place) if place.private or _is_of(each, pids, since)]
        # The run of a program that ends at once is listed with the next poll.
        is_complete = bool(listed) and all(each.get("outcome") for each in listed)
        if is_complete or should_hurry() or time.monotonic() > end:
            return [record for each in listed if (record := _fetch_whole(place, each)) is not None]
        time.sleep(_POLL_SECONDS)


def _fetch_runs(place: DaemonPlace) -> list[dict[str, Any]]:
    with suppress(ApiError):
        answer = fetch_json(place.api, RUNS)
        return [*answer["live"], *answer["past"]]
    return []


def _is_of(run: Mapping[str, Any], pids: Collection[int], since: float) -> bool:
    return run.get("pid") in pids and float(run.get("began_timestamp_seconds", 0)) >= since - 1


def _fetch_whole(place: DaemonPlace, listed: Mapping[str, Any]) -> RunRecord | None:
    """Return one record with what only its own answer has; None if this version cannot read it."""
    with suppress(ApiError, RunRecordError):
        return record_from_json(fetch_json(place.api, f"{RUNS}/{listed['run_id']}"))
    with suppress(RunRecordError):
        return record_from_json(listed)
    return None

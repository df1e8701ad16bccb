"""Reader of `/api/v1/state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwarden.cli.common.api_client import ApiError, daemon_url, fetch_json, unexpected_response
from gpuwarden.config.value_types import Address
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.api.api_paths import STATE

VERSION = 1
TIMEOUT_SECONDS = 2.0


def fetch_state(api: Address | Path) -> Any:
    """Return the daemon's state. Blocks for the timeout; raises OSError with the reason in one line."""
    state = fetch_json(api, STATE, TIMEOUT_SECONDS)
    if not isinstance(state, dict) or "version" not in state:
        raise unexpected_response(api, STATE)
    if state["version"] != VERSION:
        version, url = repr(state["version"])[:20], daemon_url(api)
        raise OSError(None, f"the daemon at {url} has version {version} of {STATE}; this gpuwarden reads {VERSION}")
    return state


def fetch_gpu_numbers(api: Address | Path) -> Mapping[str, str]:
    """Return the numbers of the machine's GPUs by UUID, those of MIG instances as 0/1; none if the daemon has none."""
    try:
        return place_by_uuid(ApiObject(fetch_json(api, STATE)).parts("gpus"))
    except ApiError:
        return {}


def format_place(gpu: ApiObject, instance: ApiObject | None = None) -> str:
    """Return the number of a GPU, or of a MIG instance of it as 0/1."""
    numbers = [gpu.number("index")] + ([instance.number("gpu_instance")] if instance is not None else [])
    return "/".join("?" if number is None else f"{number:.0f}" for number in numbers)


def place_by_uuid(gpus: Sequence[ApiObject]) -> Mapping[str, str]:
    """Return the numbers of GPUs and MIG instances by UUID."""
    places = {}
    for gpu in gpus:
        places[gpu.text("uuid")] = format_place(gpu)
        places |= {each.text("uuid"): format_place(gpu, each) for each in gpu.parts("mig")}
    return places

"""Reader of `/api/v1/state`, in which a key that is missing or of another type counts as unknown.

So an older or newer daemon costs some cells of a table, and not the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import isfinite
from typing import Any

from gpuwarden.cli.common.api_client import ApiError, daemon_url, fetch_json
from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.config.value_types import Address
from gpuwarden.web.api.api_paths import STATE

VERSION = 1
TIMEOUT_SECONDS = 2.0
MAX_TEXT = 500  # characters of one text


def fetch_state(listen: Address) -> Any:
    """Return the daemon's state. Blocks for the timeout; raises OSError with the reason in one line."""
    url = daemon_url(listen)
    try:
        state = fetch_json(listen, STATE, TIMEOUT_SECONDS)
    except ApiError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(None, f"the daemon at {url} has not completed a poll; see its log") from None
        if error.status == HTTPStatus.NOT_FOUND:
            raise OSError(None, f"{url} has no {STATE}: no gpuwarden daemon, or an older one") from None
        raise
    if not isinstance(state, dict) or "version" not in state:
        raise OSError(None, f"{url} is not a gpuwarden daemon: unexpected response from {STATE}")
    if state["version"] != VERSION:
        version = repr(state["version"])[:20]
        raise OSError(None, f"the daemon at {url} has version {version} of {STATE}; this gpuwarden reads {VERSION}")
    return state


class ApiObject:
    """Object of the answer. Its texts are safe to print."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of: dict[str, Any] = of if isinstance(of, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def number(self, key: str) -> float | None:
        """Return a number, or None."""
        value = self._of.get(key)
        if not isinstance(value, (int, float)) or type(value) is bool:
            return None
        try:
            return float(value) if isfinite(value) else None
        except OverflowError:  # JSON's integers have no limit
            return None

    def text(self, key: str, limit: int = MAX_TEXT) -> str:
        """Return a text of at most `limit` characters, or an empty one."""
        value = self._of.get(key)
        return sanitize(value[:limit]) if isinstance(value, str) else ""

    def texts(self, key: str) -> list[str]:
        """Return the texts of a list."""
        value = self._of.get(key)
        return [sanitize(each[:MAX_TEXT]) for each in value if isinstance(each, str)] if isinstance(value, list) else []

    def numbers(self, key: str) -> list[float | None]:
        """Return a list of numbers, None for each that is unknown."""
        value = self._of.get(key)
        return [ApiObject({key: each}).number(key) for each in value] if isinstance(value, list) else []

    def names(self) -> list[str]:
        """Return the names of its keys."""
        return list(self._of)

    def is_true(self, key: str) -> bool:
        """Return whether a boolean is true."""
        return self._of.get(key) is True

    def part(self, key: str) -> ApiObject:
        """Return an object inside this one, or an empty object."""
        return ApiObject(self._of.get(key))

    def parts(self, key: str) -> list[ApiObject]:
        """Return the objects of a list."""
        value = self._of.get(key)
        return [ApiObject(each) for each in value] if isinstance(value, list) else []


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

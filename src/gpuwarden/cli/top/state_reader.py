"""Answers of `/api/v1/state`, read so that what is missing or of another kind than expected is not known.

What an older or newer daemon, or another program behind its port, does not report is left out.
"""

from __future__ import annotations

from http import HTTPStatus
from math import isfinite
from typing import Any

from gpuwarden.cli.common.api_client import NoAnswerError, StatusError, daemon_url, fetch_json
from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.config.value_types import Address

PATH = "/api/v1/state"
VERSION = 1
TIMEOUT_SECONDS = 2.0
MAX_TEXT = 500  # characters of one text


def fetch_state(listen: Address) -> Any:
    """Return the daemon's answer. Blocks for the timeout; raises OSError that says in a line why there is none."""
    url = daemon_url(listen)
    try:
        state = fetch_json(listen, PATH, TIMEOUT_SECONDS)
    except StatusError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(None, f"the daemon at {url} has no poll to show") from None
        if error.status == HTTPStatus.NOT_FOUND:
            raise OSError(None, f"the daemon at {url} is older than this gpuwarden: it has no {PATH}") from None
        raise OSError(None, f"{url} is no gpuwarden: it answers with status {error.status}") from None
    except NoAnswerError as error:
        raise OSError(None, f"no daemon answers at {url}: {error}") from None
    if not isinstance(state, dict) or "version" not in state:
        raise OSError(None, f"{url} is no gpuwarden: it answers with something else")
    if state["version"] != VERSION:
        version = repr(state["version"])[:20]
        raise OSError(None, f"the daemon at {url} has version {version} of {PATH}; this gpuwarden knows {VERSION}")
    return state


class ApiObject:
    """Object of the answer. Texts come out harmless for a terminal."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of: dict[str, Any] = of if isinstance(of, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def number(self, key: str) -> float | None:
        """Return a number; None where there is none."""
        value = self._of.get(key)
        if not isinstance(value, (int, float)) or type(value) is bool:
            return None
        try:
            return float(value) if isfinite(value) else None
        except OverflowError:  # JSON's integers know no bounds
            return None

    def text(self, key: str) -> str:
        """Return a text; empty where there is none."""
        value = self._of.get(key)
        return sanitize(value[:MAX_TEXT]) if isinstance(value, str) else ""

    def is_true(self, key: str) -> bool:
        """Return whether something is said to be so."""
        return self._of.get(key) is True

    def part(self, key: str) -> ApiObject:
        """Return an object in it; an empty one where there is none."""
        return ApiObject(self._of.get(key))

    def parts(self, key: str) -> list[ApiObject]:
        """Return the objects of a list."""
        value = self._of.get(key)
        return [ApiObject(each) for each in value] if isinstance(value, list) else []

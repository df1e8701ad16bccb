"""JSON object of an API response, in which a key that is missing or of another type counts as unknown.

So with an older or newer daemon some cells of a table are empty, and the others are shown.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from gpuwarden.formatting import sanitize

MAX_TEXT = 500  # characters of one text


class ApiObject:
    """JSON object of a response. Its texts are safe to print; its methods raise nothing."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of: dict[str, Any] = of if isinstance(of, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def value(self, key: str) -> Any:
        """Return a value as it is, unchecked."""
        return self._of.get(key)

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

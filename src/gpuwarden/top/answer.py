"""An answer of `/api/v1/state` as a picture reads it: what is missing, or of another kind than expected, is not known.

So an older or newer daemon, or another program behind its port, costs what it does not say and no more.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from gpuwarden.asking import shown

MAX_TEXT = 500  # characters of one text


class Part:
    """An object of the answer. Texts come out harmless for a terminal."""

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
        return shown(value[:MAX_TEXT]) if isinstance(value, str) else ""

    def truth(self, key: str) -> bool:
        """Tell whether something is said to be so."""
        return self._of.get(key) is True

    def part(self, key: str) -> Part:
        """Return an object in it; an empty one where there is none."""
        return Part(self._of.get(key))

    def parts(self, key: str) -> list[Part]:
        """Return the objects of a list."""
        value = self._of.get(key)
        return [Part(each) for each in value] if isinstance(value, list) else []

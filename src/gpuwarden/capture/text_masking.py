"""Masking of text for a bug report, so that it names no machine, no person and none of their files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from gpuwarden.capture.masking import Masks

UNMASKED = (
    "run IDs, process IDs, uids, job numbers, names of programs and domains, models and firmware of GPUs, versions, "
    "times, sizes, environment variables that the doctor quotes, and names that appear only in a line of the log or in "
    "an error of the configuration"
)

_MIN_NAME_CHARACTERS = 2
# Words of the files themselves, which a run or a user may be called.
_COMMON = frozenset(("root", "train", "test", "predict", "idle", "python", "gpuwarden", "localhost", "gpu", "run"))
_KEPT_PATHS = r"(?:proc|sys|dev|usr|etc|lib\w*|run|var|api|page|alerts|incident)/"
_HEXTETS = r"[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4})"
_IPV4 = r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
_IPV6 = rf"(?<![\w:.])(?!::1?(?![\w:]))(?:{_HEXTETS}{{7}}|(?:{_HEXTETS}{{0,6}})?::(?:{_HEXTETS}{{0,6}})?)(?![\w:])"
_SEGMENT = r"[\w.@%+~-]+"
_PATTERNS = {
    "uuid": r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "pci": r"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b",
    "url": r"\b[a-z][a-z0-9+.-]*://(?!(?:127(?:\.\d+){3}|localhost|\[::1\])(?![\w.-]))[^\s\"'<>,\\]+",
    "address": rf"{_IPV4}|{_IPV6}",
    "path": rf"(?<![\w./])/(?!{_KEPT_PATHS}){_SEGMENT}(?:(?: {_SEGMENT})*/{_SEGMENT})+",
}


class TextMasks:
    """Masks of texts; equal parts have equal replacements in all of them, and those that `masks` has in a capture.

    `names` are those of people, hosts and their work, and serial numbers.
    """

    def __init__(self, masks: Masks, names: Iterable[str]) -> None:
        self._masks = masks
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
        chosen = {name for name in names if len(name) >= _MIN_NAME_CHARACTERS} - _COMMON
        words = "|".join(re.escape(name) for name in sorted(chosen, key=len, reverse=True))
        patterns = {**_PATTERNS, "name": rf"(?<![\w-])(?:{words})(?![\w-])"} if words else _PATTERNS
        self._pattern = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in patterns.items()))

    def mask(self, text: str) -> str:
        """Return a text with UUIDs, PCI addresses, URLs, IP addresses, paths of users and names replaced."""
        return self._pattern.sub(self._replace, text)

    def _replace(self, match: re.Match[str]) -> str:
        kind, found = str(match.lastgroup), match[0]
        if kind == "uuid":
            return self._masks.uuid(found)
        if kind == "pci":
            return self._masks.address(found)
        numbers = self._numbers[kind]
        return f"{kind.upper()}-{numbers.setdefault(found, len(numbers) + 1)}"

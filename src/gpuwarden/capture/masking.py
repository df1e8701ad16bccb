"""Masking of a capture and of the texts of a bug report: they then identify no machine and no person."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from gpuwarden.capture.capture_file import LISTS, MIG_HANDLE, Answer, Answers, Capture, Struct

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


def mask_capture(capture: Capture, masks: Masks | None = None) -> Capture:
    """Replace UUIDs, serial numbers and PCI addresses by made-up ones, and renumber pids.

    Equal values get equal replacements in all frames, so that GPUs and processes remain distinguishable; and in all
    that is masked with the same `masks`.
    """
    masks = masks or Masks()
    return replace(
        capture,
        frames=tuple(replace(frame, gpus=tuple(masks.gpu(gpu) for gpu in frame.gpus)) for frame in capture.frames),
    )


class Masks:
    """Made-up replacements, equal for equal values."""

    def __init__(self) -> None:
        uuids, instances, serials, pids = itertools.count(), itertools.count(), itertools.count(), itertools.count(1)
        self._uuids: defaultdict[object, str] = defaultdict(lambda: f"GPU-00000000-0000-4000-8000-{next(uuids):012x}")
        self._instances: defaultdict[object, str] = defaultdict(
            lambda: f"MIG-00000000-0000-4000-9000-{next(instances):012x}"
        )
        self._serials: defaultdict[object, str] = defaultdict(lambda: f"{next(serials):013d}")
        addresses = itertools.count(1)
        self._addresses: defaultdict[object, str] = defaultdict(lambda: _address(next(addresses)))
        self._pids: defaultdict[object, int] = defaultdict(lambda: next(pids))

    def uuid(self, uuid: str) -> str:
        """Return the replacement of a UUID; before driver R470 that of a MIG instance contains its GPU's."""
        return (self._instances if uuid.startswith("MIG-") else self._uuids)[uuid]

    def address(self, address: str | int | None) -> str:
        """Return the replacement of a PCI address."""
        return self._addresses[address]

    def gpu(self, answers: Answers) -> Answers:
        """Return the answers of one GPU, masked."""
        return {asked: self._answer(asked, answer) for asked, answer in answers.items()}

    def _answer(self, asked: str, answer: Answer) -> Answer:
        if asked == "nvmlDeviceGetUUID" and isinstance(answer, str):
            return self.uuid(answer)
        if asked.startswith(MIG_HANDLE) and isinstance(answer, Mapping) and "error" not in answer:
            return self.gpu(cast("Answers", answer))
        if asked == "nvmlDeviceGetSerial" and isinstance(answer, str):
            return self._serials[answer]
        if asked == "nvmlDeviceGetPciInfo" and isinstance(answer, Mapping) and "busId" in answer:
            pci = cast("Struct", answer)
            return {**pci, "busId": self.address(pci["busId"])}
        if asked in LISTS and isinstance(answer, list):
            processes = cast("Sequence[Struct]", answer)
            return [{**process, "pid": self._pids[process["pid"]]} for process in processes]
        return answer


def _address(number: int) -> str:
    """Return a made-up PCI address: all buses of a domain, then the next domain."""
    return f"{number >> 8:08X}:{number & 0xFF:02X}:00.0"


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

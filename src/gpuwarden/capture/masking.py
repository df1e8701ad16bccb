"""Masking of a capture, so that it can be shared: it then identifies no machine and no person."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from gpuwarden.capture.capture_file import LISTS, MIG_HANDLE, Answer, Answers, Capture, Struct


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

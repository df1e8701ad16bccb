"""Real error messages of tests/error_messages, and what the client and `gpuwarden explain` make of them."""

from __future__ import annotations

import builtins
import functools
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.errors.explanation import explain_events
from gpuwarden.explain.events import read_events
from gpuwarden.protocol.messages import Allocation, Error, ErrorKind

SAMPLES = Path(__file__).parents[1] / "error_messages"
FACTS = ("requested", "shape", "dtype", "op", "device", "allocator")


@dataclass(frozen=True)
class Sample:
    """Real error message, its meaning, and the failed allocations that it states."""

    type: str
    kind: ErrorKind
    problem: str
    source: str
    message: str
    allocations: tuple[Allocation, ...]
    held_out: bool = False  # collected and labeled after the patterns were written

    @property
    def is_log(self) -> bool:
        """True for an excerpt of a log, False for the text of an exception."""
        return self.type == "log"

    def classify(self) -> Error:
        """Return the client's classification of an exception with this message."""
        return error_from_exception(_type(self.type)(self.message), "train", 0)

    def find_problem(self) -> str:
        """Return the name of the first cause by `gpuwarden explain`; empty if it knows none."""
        text = self.message if self.is_log else f"{self.type}: {self.message}"
        explanation = explain_events(read_events(io.BytesIO(text.encode())))
        return explanation.root.problem.name if explanation else ""


def _type(name: str) -> type[Exception]:
    module, _, name = name.rpartition(".")
    if not module and isinstance(found := getattr(builtins, name, None), type):
        return found
    return type(name, (Exception,), {"__module__": module})


def _allocation(stated: dict[str, Any]) -> Allocation:
    shape, device = stated["shape"], stated["device"]
    return Allocation(
        requested=stated["requested_bytes"],
        shape=None if shape is None else ",".join(map(str, shape)),
        dtype=stated["dtype"],
        op=stated["op"],
        device=None
        if device is None
        else re.sub(r"^(GPU|device|device ordinal) (?=\d)", "GPU:", device),  # as the client does
        allocator=stated["allocator"],
    )


@functools.cache
def read_file(path: Path) -> list[dict[str, Any]]:
    """Read the samples of one file unchanged."""
    listed = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    assert isinstance(listed, list)
    return listed


def read_samples() -> Iterator[Sample]:
    """Read all samples; an allocation that a message states twice counts once."""
    for path in sorted(SAMPLES.glob("*.yaml")):
        for each in read_file(path):
            stated = [each["allocation"]] if each.get("allocation") else []
            stated = [*stated, *(each.get("further_allocations") or [])]
            allocations = tuple(dict.fromkeys(map(_allocation, stated)))
            yield Sample(
                each["type"],
                each["class"],
                each["problem"],
                each["source"],
                each["message"],
                allocations,
                each.get("held_out", False),
            )


def list_facts(sample: Sample) -> Iterator[tuple[str, object, object]]:
    """Yield each fact as the message states it and as it was parsed."""
    parsed = sample.classify().allocations
    for index in range(max(len(sample.allocations), len(parsed))):
        stated = sample.allocations[index] if index < len(sample.allocations) else Allocation()
        ours = parsed[index] if index < len(parsed) else Allocation()
        for fact in FACTS:
            pair = getattr(stated, fact), getattr(ours, fact)
            if pair != (None, None):
                yield fact, *pair

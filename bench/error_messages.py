"""Classification of real error messages: `python bench/error_messages.py`.

By kind: the exceptions in tests/error_messages, how many are classified correctly, and as what the others are. Then the
facts of failed allocations: how many the messages state, and how many of them are parsed correctly. Then what
`gpuwarden explain` names as the first cause, of exceptions, of logs, and of the logs that were held out.
"""

from __future__ import annotations

import builtins
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.explain.events import read_events
from gpuwarden.explain.explanation import explain_events
from gpuwarden.protocol.messages import ERROR_KINDS, Allocation, Error, ErrorKind

SAMPLES = Path(__file__).parents[1] / "tests" / "error_messages"
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

    def described(self) -> Error:
        """Return the classification of an exception with this message."""
        return error_from_exception(_type(self.type)(self.message), "train", 0)

    def found_problem(self) -> str:
        """Return the name of the first cause by `gpuwarden explain`; empty if it knows none."""
        text = self.message if self.is_log else f"{self.type}: {self.message}"
        explanation = explain_events(read_events(io.BytesIO(text.encode())))
        return explanation.root.problem.name if explanation else ""


def _type(name: str) -> type[Exception]:
    module, _, name = name.rpartition(".")
    if not module and isinstance(found := getattr(builtins, name, None), type):
        return found
    return type(name, (Exception,), {"__module__": module})


def _allocation(said: dict[str, Any]) -> Allocation:
    shape, device = said["shape"], said["device"]
    return Allocation(
        requested=said["requested_bytes"],
        shape=None if shape is None else ",".join(map(str, shape)),
        dtype=said["dtype"],
        op=said["op"],
        device=None
        if device is None
        else re.sub(r"^(GPU|device|device ordinal) (?=\d)", "GPU:", device),  # as the client does
        allocator=said["allocator"],
    )


def samples() -> Iterator[Sample]:
    """Read all samples; an allocation that a message states twice counts once."""
    for path in sorted(SAMPLES.glob("*.yaml")):
        for each in yaml.safe_load(path.read_text()):
            said = [each["allocation"]] if each.get("allocation") else []
            said += each.get("further_allocations") or []
            allocations = tuple(dict.fromkeys(map(_allocation, said)))
            yield Sample(
                each["type"],
                each["class"],
                each["problem"],
                each["source"],
                each["message"],
                allocations,
                each.get("held_out", False),
            )


def facts(sample: Sample) -> Iterator[tuple[str, object, object]]:
    """Yield each fact as the message states it and as it was parsed."""
    parsed = sample.described().allocations
    for index in range(max(len(sample.allocations), len(parsed))):
        stated = sample.allocations[index] if index < len(sample.allocations) else Allocation()
        ours = parsed[index] if index < len(parsed) else Allocation()
        for fact in FACTS:
            pair = getattr(stated, fact), getattr(ours, fact)
            if pair != (None, None):
                yield fact, *pair


def _print_kinds(known: list[Sample]) -> None:
    print("| kind | samples | right | taken for |\n|---|---|---|---|")
    every = 0
    for kind in ERROR_KINDS:
        taken = Counter(each.described().kind for each in known if each.kind == kind)
        right = taken.pop(kind, 0)
        every += right
        wrong = ", ".join(f"{count} {other}" for other, count in taken.most_common())
        print(f"| {kind} | {right + taken.total()} | {right} | {wrong} |")
    print(f"| all | {len(known)} | {every} | |")


def _print_facts(known: list[Sample]) -> None:
    print("\n| fact of an allocation | stated | right | wrong | missed | parsed without |\n|---|---|---|---|---|---|")
    found = [each for sample in known for each in facts(sample)]
    for fact in FACTS:
        pairs = [(stated, parsed) for name, stated, parsed in found if name == fact]
        counts = (
            sum(stated is not None for stated, _ in pairs),
            sum(stated == parsed for stated, parsed in pairs),
            sum(None not in (stated, parsed) and stated != parsed for stated, parsed in pairs),
            sum(parsed is None for _, parsed in pairs),
            sum(stated is None for stated, _ in pairs),
        )
        print(f"| {fact} | {' | '.join(map(str, counts))} |")


def _print_problems(known: list[Sample]) -> None:
    print("\n| explained | samples | first cause right | share |\n|---|---|---|---|")
    for title, part in (
        ("exceptions", [each for each in known if not each.is_log]),
        ("logs", [each for each in known if each.is_log and not each.held_out]),
        ("logs held out, patterns as they are now", [each for each in known if each.held_out]),
    ):
        right = sum(each.found_problem() == each.problem for each in part)
        print(f"| {title} | {len(part)} | {right} | {right / len(part):.1%} |")


def main() -> None:
    """Print the tables, and each sample that is classified wrongly."""
    everything = list(samples())
    known = [each for each in everything if not each.is_log]
    _print_kinds(known)
    _print_facts(known)
    _print_problems(everything)
    for sample in known:
        parsed = sample.described()
        differing = [each for each in facts(sample) if each[1] != each[2]]
        if parsed.kind != sample.kind or differing:
            print(f"\n{sample.type}: {sample.kind}, parsed {parsed.kind}; {sample.source}")
            print(f"  {' '.join(sample.message.split())[:300]}")
            for fact, stated, ours in differing:
                print(f"  {fact}: {stated!r}, parsed {ours!r}")
    for sample in everything:
        if (found := sample.found_problem()) != sample.problem:
            print(f"\n{sample.problem}, explained as {found or 'unknown'}; {sample.source}")


if __name__ == "__main__":
    main()

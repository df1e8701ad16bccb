"""Explanation as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from gpuwarden.errors.explanation import ErrorEvent, Explanation
from gpuwarden.explain.evidence import WeighedCause
from gpuwarden.formatting import cut_middle

MAX_SHOWN = 8  # followers, and other errors
MAX_FIXES = 2  # of the likeliest cause that a check found
_MAX_MESSAGE_CHARACTERS = 400


def render_explanation(explanation: Explanation, causes: Sequence[WeighedCause], width: int) -> Iterator[str]:
    """Yield the lines of an explanation, `width` columns wide."""
    root = explanation.root
    yield from _wrap(f"{root.problem.title[0].upper()}{root.problem.title[1:]} ({root.problem.name})", "", width)
    if root.text != root.problem.title:
        yield from _wrap(f"{_place(root)}{_shorten(root.text, _MAX_MESSAGE_CHARACTERS)}", "  ", width)
    if root.frame:
        yield from _wrap(f"at {root.frame}", "  ", width)
    if root.repeats:
        yield f"  {root.repeats} more like it"
    yield ""
    yield "Likely causes"
    for number, cause in enumerate(causes, start=1):
        yield from _wrap(cause.text, f"  {number}. ", width)
        sign = "found" if cause.confirmed else "unlikely"
        for result in cause.results:
            if cause.contradicted or result.status in {"fail", "warn"}:
                yield from _wrap(f"{sign} on this machine ({result.name}): {result.found}", "     ", width)
    yield ""
    yield "Do first"
    found = next((cause for cause in causes if cause.confirmed), None)
    fixes = [each.fix for each in found.results if each.fix] if found else []
    for step in dict.fromkeys((*fixes[:MAX_FIXES], root.problem.first_step)):
        yield from _wrap(step, "  ", width)
    yield from _list_events("Followed from it", explanation.followers, width)
    yield from _list_events("Also in the text", explanation.others, width)


def explanation_document(explanation: Explanation, causes: Sequence[WeighedCause]) -> dict[str, Any]:
    """Return an explanation as JSON."""
    problem = explanation.root.problem
    return {
        "problem": problem.name,
        "kind": problem.kind,
        "title": problem.title,
        "first_step": problem.first_step,
        "causes": [
            {
                "text": each.text,
                "confirmed": each.confirmed,
                "contradicted": each.contradicted,
                "checks": [asdict(result) for result in each.results],
            }
            for each in causes
        ],
        "root": _event_document(explanation.root),
        "followers": [_event_document(each) for each in explanation.followers],
        "others": [_event_document(each) for each in explanation.others],
    }


def _event_document(event: ErrorEvent) -> dict[str, Any]:
    return {**asdict(event), "problem": event.problem.name}


def _list_events(heading: str, events: Sequence[ErrorEvent], width: int) -> Iterator[str]:
    """Yield a line for each problem: where it is first, how often, and a piece of its text."""
    if events:
        yield ""
        yield heading
    grouped: dict[str, list[ErrorEvent]] = {}
    for event in events:
        grouped.setdefault(event.problem.title, []).append(event)
    for alike in list(grouped.values())[:MAX_SHOWN]:
        count = sum(1 + event.repeats for event in alike)
        times = f", {count} times" if count > 1 else ""
        yield from _wrap(f"{_place(alike[0])}{alike[0].problem.title}{times}", "  ", width)
        yield f"    {_shorten(alike[0].text, width - 9)}"
    if len(grouped) > MAX_SHOWN:
        yield f"  and {len(grouped) - MAX_SHOWN} other problems"


def _place(event: ErrorEvent) -> str:
    parts = [*([f"line {event.line}"] if event.line else []), *([event.source] if event.source else [])]
    return f"{', '.join(parts)}: " if parts else ""


def _shorten(text: str, limit: int) -> str:
    return cut_middle(" ".join(text.split()), limit)


def _wrap(text: str, start: str, width: int) -> list[str]:
    return wrap(text, max(width, 40), initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)

"""Reference of the API's documents (docs/reference/state.md), generated from their dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import cleandoc
from typing import Any, get_args, get_origin

from gpuwarden.metrics.model import Metric
from gpuwarden.web.api.api_paths import HISTORY, STATE
from gpuwarden.web.api.document import document_keys, key_meanings
from gpuwarden.web.api.history_document import HistoryDocument
from gpuwarden.web.api.state_document import BoxDocument

_ABOUT = """
What the daemon answers to `/api/v1/state` and `/api/v1/history`; [http-api.md](http-api.md) says how to ask, and what for.

- What is not known has no key, nor has a list or an object that would be empty, unless the key is there `always`. A 0
  is a measured 0. The one null there is stands for a gap in a column of `/api/v1/history`.
- Units stand in the keys, and are base units: bytes, seconds, celsius, hertz, watts, ratios of 0 to 1.
- Names and messages are what training processes and others' programs say of themselves. They are data: whoever shows
  them in a terminal or a page has to escape them.
"""


def render_reference() -> str:
    """Return the reference."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# The box as JSON"
    yield ""
    yield "Written by `gpuwarden reference state`; `make docs` keeps it up to date."
    yield ""
    yield cleandoc(_ABOUT)
    for title, answer in ((STATE, BoxDocument), (HISTORY, HistoryDocument)):
        places: dict[type, list[str]] = {}
        for document, path in _parts(answer, ""):
            places.setdefault(document, []).append(f"`{path or title}`")
        for document, paths in places.items():
            yield f"\n## {', '.join(paths)}\n\n{document.__doc__}\n"
            yield "| key | always | meaning |\n| --- | --- | --- |"
            for (name, required), (_, _, meaning) in zip(document_keys(document), key_meanings(document), strict=True):
                yield f"| `{name}` | {'yes' if required else ''} | {_sentence(meaning)} |"


def _parts(document: type, path: str) -> Iterator[tuple[type, str]]:
    """Return a document and all that are in it, each with the path that leads there, in the way of jq."""
    yield document, path
    for name, kind, _ in key_meanings(document):
        part = _part(kind)
        if part is not None:
            many = get_origin(kind) in (Sequence, Mapping)
            yield from _parts(part, f"{path}.{name}{'[]' if many else ''}")


def _part(kind: Any) -> type | None:
    """Return the document that a type is, or holds."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind
    return next(filter(None, map(_part, get_args(kind))), None)


def _sentence(meaning: str | Metric[Any]) -> str:
    if isinstance(meaning, str):
        return meaning
    return f"{meaning.help} `{meaning.name}`.{f' By {meaning.labels[0]}.' if meaning.labels else ''}"

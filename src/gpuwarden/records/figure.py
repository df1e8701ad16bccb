"""Figures of runs: dataclass fields declared with reader, meaning, and the rows that show them to people.

Records, JSON documents, their reference, and rows of the command line and of cards are made from these fields. The name
is the key in JSON and ends in the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from gpuwarden.formatting import format_bytes, format_elapsed, format_energy, format_ratio

Source = TypeVar("Source")
Value = TypeVar("Value")
Document = TypeVar("Document")

_TEXT_BY_UNIT: Mapping[str, Callable[[float], str]] = {
    "_bytes": format_bytes,
    "_joules": format_energy,
    "_ratio": format_ratio,
    "_seconds": format_elapsed,
}


class Private(str):
    """Meaning of a field that only the run's user and root may read: it can have passwords and paths."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """Declaration of one figure.

    `help` is its meaning in the reference, Private if only the run's user and root may read it. `label` names its row
    of `gpuwarden runs show` and, with `card`, of the card of `gpuwarden run`; figures with the same label share a row.
    `text` formats the value for that row; an empty text is left out. `join` combines an earlier daemon's value with
    that since.
    """

    read: Callable[[Any], Any]
    help: str
    label: str
    text: Callable[[Any], str] | None
    card: bool
    join: Callable[[Any, Any], Any]


def last_known(before: Value, since: Value) -> Value:
    """Return the later value, or the earlier one where that is unknown."""
    return before if since is None else since


def first(before: Value, _since: Value) -> Value:
    """Return the earlier value."""
    return before


def last(_before: Value, since: Value) -> Value:
    """Return the later value, unknown or not."""
    return since


class FigureOf(Generic[Source]):
    """Function that declares figures read from one type of source, so that mypy checks each reader with its field."""

    def __call__(
        self,
        read: Callable[[Source], Value],
        help: str,  # noqa: A002 - as in argparse and prometheus_client
        *,
        label: str = "",
        text: Callable[[Any], str] | None = None,
        card: bool = False,
        join: Callable[[Any, Any], Any] = last_known,
        required: bool = False,
        default: Any = None,
    ) -> Value:
        """Declare a field with a Figure; a required one is in every document. By default the unit chooses `text`."""
        metadata = {"figure": Figure(read, help, label, text, card, join)}
        declared: Any = field(metadata=metadata) if required else field(default=default, metadata=metadata)
        return declared  # type: ignore[no-any-return] # as dataclasses.field does

    def read(self, document: type[Document], source: Source) -> Document:
        """Return a document with each of its figures read from the source."""
        figures = find_figures(document)  # type: ignore[arg-type] # a class is hashable
        return document(**{name: figure.read(source) for name, figure in figures.items()})


@cache
def find_figures(document: type) -> Mapping[str, Figure]:
    """Return the figures of a document by name."""
    return {each.name: each.metadata["figure"] for each in fields(document) if "figure" in each.metadata}


def join_figures(before: object, since: Document) -> Document:
    """Return the document `since` with each figure joined with that of an earlier daemon, `before`.

    The rules are those of `before`, which may be of a type with more figures.
    """
    figures, names = find_figures(type(before)), (each.name for each in fields(since))  # type: ignore[arg-type]
    joined = {name: figures[name].join(getattr(before, name), getattr(since, name)) for name in names}
    return type(since)(**joined)


def list_keys(document: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and meaning of each key: of a figure, or of a field that is annotated with its meaning."""
    hints, figures = get_type_hints(document, include_extras=True), find_figures(document)
    for each in fields(document):
        hint, figure = hints[each.name], figures.get(each.name)
        yield (each.name, hint, figure.help) if figure else (each.name, hint.__origin__, hint.__metadata__[-1])


def find_part(kind: Any) -> type | None:
    """Return the document that a type is, or holds."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind
    return next(filter(None, map(find_part, get_args(kind))), None)


def list_figure_rows(document: object, *, card: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of the known figures of a document, in their order; those of a card or all."""
    rows: dict[str, list[str]] = {}
    for name, figure in find_figures(type(document)).items():  # type: ignore[arg-type] # likewise
        value = getattr(document, name)
        if figure.label and value is not None and (figure.card or not card):
            text = (figure.text or _text_by_unit(name))(value)
            rows.setdefault(figure.label, []).extend([text] if text else [])
    for label, texts in rows.items():
        if texts:
            yield label, ", ".join(texts)


def _text_by_unit(name: str) -> Callable[[Any], str]:
    return next((text for unit, text in _TEXT_BY_UNIT.items() if name.endswith(unit)), "{:,}".format)

"""Card as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import wrap

from gpuwarden._version import __version__
from gpuwarden.formatting import sanitize
from gpuwarden.launcher.card import Card
from gpuwarden.launcher.card_rows import list_rows, title
from gpuwarden.records.record_json import json_from_record
from gpuwarden.runs.outcome import signal_name

_LABEL_WIDTH = 12
MAX_WIDTH = 100  # columns


def render_text(card: Card, width: int) -> str:
    """Return the card as text, wrapped at a width in columns."""
    lines = [title(card)]
    for label, text in list_rows(card):
        start = f"{label:<{_LABEL_WIDTH}}"
        room = max(width - len(start), 20)
        for line in wrap(sanitize(" ".join(text.split())), room) or [""]:
            lines.append(f"{start}{line}")
            start = " " * len(start)
    return "\n".join(lines) + "\n"


def render_json(card: Card) -> str:
    """Return the card as JSON; `runs` are run records, as `gpuwarden runs --json` has them."""
    found = card.explanation
    document = {
        "version": __version__,
        "command": list(card.command),
        "pid": card.end.pid,
        "began_timestamp_seconds": round(card.end.began, 3),
        "duration_seconds": round(card.end.seconds, 3),
        "exit_status": card.end.exit_code,
        "signal": None if card.end.signal is None else signal_name(card.end.signal),
        "outcome": card.outcome,
        "evidence": card.evidence,
        "problem": found and found.root.problem.name,
        "cause": found and found.root.problem.title,
        "message": found and found.root.text,
        "frame": found and (found.root.frame or None),
        "next_step": card.next_step,
        "runs": [json_from_record(run) for run in card.runs],
    }
    return json.dumps({name: value for name, value in document.items() if value is not None}, indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Card], str]] = {  # by the suffix of the file
    ".json": render_json,
    ".txt": partial(render_text, width=MAX_WIDTH),
}


def write_card(card: Card, path: Path) -> None:
    """Write the card in the format of the path's suffix. Raises OSError."""
    path.write_text(FORMATS[path.suffix](card), encoding="utf-8", errors="replace")

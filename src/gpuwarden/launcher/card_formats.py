"""Card as text for a terminal, Markdown, one HTML page, and JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import wrap

from gpuwarden._version import __version__
from gpuwarden.formatting import sanitize
from gpuwarden.launcher.card import Card
from gpuwarden.launcher.card_rows import list_rows, title
from gpuwarden.records.record import json_from_record
from gpuwarden.runs.outcome import signal_name

_LABEL_WIDTH = 12
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35em .8em .35em 0; border-top: 1px solid #8884; }
th { font-weight: 600; white-space: nowrap; }
td { overflow-wrap: anywhere; white-space: pre-wrap; }
"""


def render_text(card: Card, width: int) -> str:
    """Return the card for a terminal of some columns."""
    lines = [title(card)]
    for label, text in list_rows(card):
        start = f"{label:<{_LABEL_WIDTH}}"
        room = max(width - len(start), 20)
        for line in wrap(sanitize(" ".join(text.split())), room) or [""]:
            lines.append(f"{start}{line}")
            start = " " * len(start)
    return "\n".join(lines) + "\n"


def render_markdown(card: Card) -> str:
    """Return the card as a Markdown table."""
    rows = [f"| {label} | {_escape_cell(text)} |" for label, text in list_rows(card)]
    return "\n".join([f"### {title(card)}", "", "| | |", "| --- | --- |", *rows, ""])


def render_html(card: Card) -> str:
    """Return the card as one page that needs no other file."""
    rows = "\n".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(_sanitize_lines(text))}</td></tr>"
        for label, text in list_rows(card)
    )
    heading = html.escape(title(card))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{heading}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{heading}</h1>\n<table>\n{rows}\n</table></body></html>\n"
    )


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
        "uncounted": list(card.uncounted) or None,
        "runs": [json_from_record(run) for run in card.runs],
    }
    return json.dumps({name: value for name, value in document.items() if value is not None}, indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Card], str]] = {  # by the suffix of the file
    ".html": render_html,
    ".json": render_json,
    ".md": render_markdown,
}


def write_card(card: Card, path: Path) -> None:
    """Write the card in the format of the path's suffix. Raises OSError."""
    path.write_text(FORMATS[path.suffix](card), encoding="utf-8", errors="replace")


def _sanitize_lines(text: str) -> str:
    return "\n".join(map(sanitize, text.splitlines()))


def _escape_cell(text: str) -> str:
    """Return text as one cell of a table, without tags, links and emphasis of its own."""
    return re.sub(r"[\\|*\[]", r"\\\g<0>", sanitize(" ".join(text.split()))).replace("<", "&lt;")

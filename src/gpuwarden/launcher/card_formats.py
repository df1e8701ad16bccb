"""Card as text, in rows of a label and a text, and as JSON."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from textwrap import wrap

from gpuwarden._version import __version__
from gpuwarden.analysis.memory.headroom import headroom_limit_text
from gpuwarden.cli.runs.memory_report import gpu_name
from gpuwarden.errors.explanation import Explanation
from gpuwarden.formatting import cut_middle, format_bytes, format_elapsed, format_energy, format_ratio, sanitize
from gpuwarden.launcher.card import Card
from gpuwarden.records.census_text import list_holders
from gpuwarden.records.figure import list_figure_rows
from gpuwarden.records.record import RecordedDevice, RunRecord
from gpuwarden.records.record_json import json_from_record
from gpuwarden.runs.outcome import signal_name

_LABEL_WIDTH = 12
MAX_WIDTH = 100  # columns
MAX_MESSAGE_CHARACTERS = 400
MAX_FOLLOWERS = 3
MAX_RUNS = 8  # of one program; the card counts further ones
_NO_STEPS = "none counted: these are of Keras fit and of torch optimizers; other loops need gpuwarden.watch()"


def _list_rows(card: Card) -> Iterator[tuple[str, str]]:
    yield "program", shlex.join(card.command)
    # The cause repeats what the rest of the evidence says, and a program that finished needs none.
    is_clear = card.explanation is not None or card.outcome == "finished"
    evidence = card.evidence.partition("; last ")[0] if is_clear else card.evidence
    yield "outcome", f"{card.outcome.replace('_', ' ')} after {format_elapsed(card.end.seconds)} ({evidence})"
    if card.explanation is not None:
        yield from _explanation_rows(card.explanation, card.runs)
    for number, words in enumerate(card.last_words):
        yield "" if number else "stderr", cut_middle(words, MAX_MESSAGE_CHARACTERS)
    if card.next_step is not None:
        yield "next step", card.next_step
    for run in card.runs[:MAX_RUNS]:
        if len(card.runs) > 1:
            rank = "" if run.rank is None else f", rank {run.rank}"
            yield "run", f"{run.name} (pid {run.pid}{rank}): {(run.outcome or run.state).replace('_', ' ')}"
        yield from _run_rows(run, card)
    if len(card.runs) > MAX_RUNS:
        yield "runs", f"and {len(card.runs) - MAX_RUNS} more"
    if card.runs and all(run.steps is None for run in card.runs):
        yield "steps", _NO_STEPS


def _explanation_rows(explanation: Explanation, runs: Iterable[RunRecord]) -> Iterator[tuple[str, str]]:
    root = explanation.root
    cause = f"{root.problem.title[0].upper()}{root.problem.title[1:]}"
    yield "cause", cause
    headline = next((run.headline for run in runs if run.headline and run.headline.text == cause), None)
    yield from (("evidence", each) for each in (headline.reasons if headline else ()))
    if root.text not in {cause, headline and headline.evidence}:
        yield "message", cut_middle(root.text, MAX_MESSAGE_CHARACTERS)
    if root.frame:
        yield "at", root.frame
    for follower in explanation.followers[:MAX_FOLLOWERS]:
        if follower.problem.name != root.problem.name:
            yield "then", cut_middle(f"{follower.problem.title}: {follower.text}", MAX_MESSAGE_CHARACTERS // 2)


def _run_rows(run: RunRecord, card: Card) -> Iterator[tuple[str, str]]:
    yield from list_figure_rows(run, card=True)
    for device in run.devices:
        yield gpu_name(device.uuid, card.gpus), _describe_device(device)
    if run.census is not None:
        yield from (("tensors", each) for each in list_holders(run.census))


def _describe_device(device: RecordedDevice) -> str:
    peak, headroom = device.highest_peak_bytes, device.min_headroom_bytes
    under = headroom_limit_text(device.headroom_limit, device.headroom_limit_bytes)
    parts = [
        None if peak is None else f"{format_bytes(peak)} peak memory",
        None if headroom is None else f"{format_bytes(headroom)} headroom at least{under}",
        None
        if device.idle_seconds is None or not device.gpu_seconds
        else f"idle {format_ratio(device.idle_seconds / device.gpu_seconds)}",
        None if device.energy_joules is None else format_energy(device.energy_joules),
        ", ".join(f"XID {code} x {count}" for code, count in (device.xids or {}).items()) or None,
    ]
    return ", ".join(filter(None, parts)) or device.name


def render_text(card: Card, width: int) -> str:
    """Return the card as text, wrapped at a width in columns."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(card.end.began))
    lines = [f"gpuwarden run, started {began}"]
    for label, text in _list_rows(card):
        start = f"{label:<{_LABEL_WIDTH}}"
        for line in wrap(sanitize(" ".join(text.split())), max(width - len(start), 20)) or [""]:
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
        "stderr": "\n".join(card.last_words) or None,
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

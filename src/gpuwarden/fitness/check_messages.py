"""Messages of the control socket's command `check`: a question as JSON, and its answer as JSON."""

from __future__ import annotations

import json
from typing import get_args

from gpuwarden.fitness.model import STATUSES, Assessment, Question, Stage


def parse_question(text: str) -> Question:
    """Parse a question; missing keys have their defaults. Raises ValueError."""
    asked = json.loads(text or "{}")
    is_valid = (
        isinstance(asked, dict)
        and asked.get("stage", "none") in get_args(Stage)
        and isinstance(asked.get("gpus"), list | None)
        and isinstance(asked.get("off", []), list)
    )
    if not is_valid:
        raise ValueError("check: expected a JSON object with a known stage and lists of GPUs and checks")
    gpus = asked.get("gpus")
    return Question(
        gpus=None if gpus is None else tuple(map(str, gpus)),
        by_minor=bool(asked.get("by_minor")),
        stage=asked.get("stage", "none"),
        job=str(asked.get("job", "")),
        off=frozenset(map(str, asked.get("off", ()))),
    )


def render_answer(answer: Assessment) -> str:
    """Return the JSON of an answer, in one line; `gpuwarden check --json` prints it."""
    findings = [
        {
            "check": each.check,
            "status": each.status,
            "action": each.action,
            "text": each.problem.text,
            **({"uuid": each.problem.uuid} if each.problem.uuid else {}),
        }
        for each in answer.findings
    ]
    return json.dumps(
        {
            "status": answer.status,
            "code": STATUSES.index(answer.status),
            "text": answer.text,
            "gpus": list(answer.gpus),
            "findings": findings,
            "checks": dict(answer.statuses),
        }
    )

"""docs/use/slow-training.md: its queries are valid, and the names in it exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from promql import SAMPLES, find_unknown_names

from gpuwarden.config import thresholds
from gpuwarden.gpu.clock_reasons import CLOCK_REASONS
from gpuwarden.usage.gpu_meter import SLOWDOWNS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "use" / "slow-training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```promql\n(.*?)^```", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
# A line that is not indented begins another question.
QUESTIONS = [question for block in BLOCKS for question in re.split(r"\n(?=\S)", block.strip())]


def test_there_are_questions() -> None:
    """Each question of the page has a query."""
    assert len(QUESTIONS) > DOCUMENT.count("\n## ") > 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_question_names_what_exists(question: str) -> None:
    """Prometheus parses it, and its metrics and labels are those of the tables."""
    assert not find_unknown_names(question)


def test_every_metric_exists() -> None:
    """Each metric in queries or sentences is in the tables."""
    assert set(re.findall(r"gpuwarden_\w+", DOCUMENT)) <= SAMPLES.keys()


def test_reasons() -> None:
    """Each reason that the usage of a run has is explained, and no other, with the words of all texts."""
    explained = re.findall(r"^\| `([a-z_]+)` \| ([a-z ]+) \|", DOCUMENT, flags=re.MULTILINE)
    assert sorted(explained) == sorted((reason, CLOCK_REASONS[reason]) for reason in SLOWDOWNS)


def test_threshold_is_the_alerts() -> None:
    """The threshold in the page is the alert's."""
    assert f"Above {thresholds.INPUT_BOUND:g} the alert" in DOCUMENT

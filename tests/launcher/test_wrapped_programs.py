"""`gpuwarden run` around what starts Python in its turn: the kernel of a notebook, a shell, `python -m`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from system_parts import needs_framework

pytestmark = [
    pytest.mark.frameworks,
    needs_framework("torch"),
]
TRAINING = """
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(8, 3)).sum().backward()
    optimizer.step()
"""


def run_wrapped(folder: Path, *command: str) -> dict[str, Any]:
    """Run a command under `gpuwarden run`, and return its card."""
    card = folder / "card.json"
    ended = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "run", "--card", str(card), "--", *command],
        cwd=folder,
        env=os.environ | {"GPUWARDEN_SOCKET": str(folder / "none.sock"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert card.exists(), ended.stderr
    found: dict[str, Any] = json.loads(card.read_text())
    return found


def test_shell(tmp_path: Path) -> None:
    """Each Python program that trains below a shell is a run, however it is started."""
    (tmp_path / "train.py").write_text(TRAINING)
    card = run_wrapped(tmp_path, "sh", "-c", f"{sys.executable} train.py; {sys.executable} -m train")
    assert sorted(run.get("steps", 0) for run in card["runs"]) == [0, 4, 4]
    assert card["outcome"] == "finished"


@pytest.mark.parametrize(
    ("end", "outcome", "message"), [("", "finished", None), ("{}['gone']", "failed", "KeyError: 'gone'")]
)
def test_notebook(tmp_path: Path, end: str, outcome: str, message: str | None) -> None:
    """The kernel of a notebook is a run; the cause is the error of a cell, and not that the kernel is stopped."""
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    cell: dict[str, Any] = {
        "cell_type": "code",
        "id": "a",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": TRAINING + end,
    }
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "train.ipynb").write_text(json.dumps(notebook))
    card = run_wrapped(tmp_path, sys.executable, "-m", "jupyter", "execute", "train.ipynb")
    assert sum(run.get("steps", 0) for run in card["runs"]) == 4
    assert (card["outcome"], card.get("message")) == (outcome, message)

"""How many examples the steps of a fit have: what is told, and what is left unknown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.client.batches import Batches
from gpuwarden.client.connection import Connection
from gpuwarden.client.run import Run
from gpuwarden.protocol import Hello


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Give a run that nobody hears."""
    return Run(Connection(str(tmp_path / "none"), Hello("a run", "none", {})))


def fit(run: Run, in_epoch: int | None, **declared: Any) -> Batches:
    """Make one as a hook of Keras 3's fit does."""
    return Batches(run, in_epoch, SimpleNamespace(data_adapter=SimpleNamespace(**declared)))


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([(1, 8)], 8),
        ([(10, 80)], None),  # the mean alone may be one of several sizes
        ([(10, 80), (20, 160)], 8),
        ([(10, 80), (20, 150), (30, 230)], None),
        ([(10, 80), (20, 165), (30, 245)], None),
        ([(10, 80), (10, 80)], None),
        ([(10, None), (11, None)], None),
        ([(10, 0), (11, 0)], None),
    ],
)
def test_inferred(run: Run, looks: list[tuple[int, int | None]], told: int | None) -> None:
    """One step's size is exact; a mean of several is told once it is whole and was the same before."""
    batches = fit(run, None)
    for steps, examples in looks:
        batches.look(steps, examples)
    batches.look_at_end()
    assert (run.batch_size, run.largest_batch_size) == (told, told)
    assert batches.of_failed() is None


@pytest.mark.parametrize(
    ("in_epoch", "batch", "failed"),
    [(4, 0, 32), (4, 2, 32), (4, 3, 5), (1, 0, 5), (None, 7, 32)],
)
def test_declared(run: Run, in_epoch: int | None, batch: int, failed: int) -> None:
    """An epoch's last step has what is left over; it alone where the epoch has no other."""
    batches = fit(run, in_epoch, batch_size=32, has_partial_batch=True, partial_batch_size=5)
    run.batch = batch
    batches.look(1, None)
    assert run.batch_size == (5 if in_epoch == 1 else 32)
    assert batches.of_failed() == failed


def test_methods(run: Run) -> None:
    """Keras 2 has methods for what Keras 3 has properties."""
    batches = fit(run, 4, batch_size=lambda: 32, has_partial_batch=lambda: False)
    batches.look_at_end()
    assert (run.batch_size, batches.of_failed()) == (32, 32)


@pytest.mark.parametrize("size", [None, 0, -1, 2.0, "32"])
def test_nonsense(run: Run, size: Any) -> None:
    """What is no batch size is none."""
    batches = fit(run, 4, batch_size=size)
    batches.look_at_end()
    assert run.batch_size is None

"""Number of examples in a fit's steps: what is reported, and what stays unknown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.keras.fit.example_counter import ExampleCounter
from gpuwarden.client.keras.fit.loss_reader import LossReader
from gpuwarden.client.reporter import Reporter
from gpuwarden.protocol.messages import Hello


@pytest.fixture
def run(tmp_path: Path) -> Reporter:
    """Return a run without a daemon."""
    return Reporter(DaemonConnection(str(tmp_path / "none"), Hello("a run", "none", {})))


class ArrayDataAdapter(SimpleNamespace):
    """A source of data under the name that Keras has for arrays."""


class Metric:
    """A loss metric that returns these sums, one for each read."""

    def __init__(self, *sums: int | None, wanted: bool = False) -> None:
        self.wanted = wanted
        self.sums = list(sums)

    def read(self) -> int | None:
        """Return the next."""
        return self.sums.pop(0)

    read_at_end = read


def fit(
    run: Reporter, in_epoch: int | None, *sums: int | None, wanted: bool = False, **declared: Any
) -> ExampleCounter:
    """Make one as a hook of Keras 3's fit does, with arrays that declare this and a metric that returns these sums."""
    feeder = SimpleNamespace(data_adapter=ArrayDataAdapter(**declared))
    return ExampleCounter(run, cast(LossReader, Metric(*sums, wanted=wanted)), in_epoch, feeder, workers=False)


@pytest.mark.parametrize(
    ("looks", "expected"),
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
def test_inferred(run: Reporter, looks: list[tuple[int, int | None]], expected: int | None) -> None:
    """One step's size is exact; a mean of several is reported once it is whole and the same as before."""
    last = looks[-1][1]
    batches = fit(run, None, *[examples for _, examples in looks], last)
    for steps, _ in looks:
        batches.count_examples(steps)
    batches.count_examples_at_end(looks[-1][0])
    assert (run.state.batch_size, run.state.largest_batch_size) == (expected, expected)
    assert run.state.examples == (last or None)
    assert batches.failed_batch_size() is None


@pytest.mark.parametrize(
    ("in_epoch", "batch", "failed"),
    [(4, 0, 32), (4, 2, 32), (4, 3, 5), (1, 0, 5), (None, 7, 32)],
)
def test_declared(run: Reporter, in_epoch: int | None, batch: int, failed: int) -> None:
    """An epoch's last step has the remaining examples; it is the only size if the epoch has no other step."""
    batches = fit(run, in_epoch, None, batch_size=32, has_partial_batch=True, partial_batch_size=5)
    run.state.batch = batch
    batches.count_examples(1)
    assert run.state.batch_size == (5 if in_epoch == 1 else 32)
    assert batches.failed_batch_size() == failed


@pytest.mark.parametrize(("last", "epoch"), [(None, 128), (5, 101)])
@pytest.mark.parametrize("wanted", [True, False])
def test_declared_sum(run: Reporter, last: int | None, epoch: int, *, wanted: bool) -> None:
    """If arrays declare all batches of an epoch, the metric counts only when the epoch has ended early."""
    batches = fit(
        run,
        4,
        *(7, 8),
        *[9] * wanted,
        64,
        wanted=wanted,
        batch_size=32,
        num_batches=4,
        has_partial_batch=last is not None,
        partial_batch_size=last,
    )
    counts = []
    for steps in (0, 3):
        batches.count_examples(steps)
        counts.append(run.state.examples)
    batches.count_examples_at_end(4)
    counts.append(run.state.examples)
    batches.begin_epoch()
    batches.count_examples_at_end(2)  # the fit was asked to stop
    assert [*counts, run.state.examples] == [None, 96, epoch, epoch + 64]


@pytest.mark.parametrize("batches_in_all", [3, 5, None])
def test_declared_sum_unknown(run: Reporter, batches_in_all: int | None) -> None:
    """If an epoch takes fewer batches than there are, the short one may be any step: the metric counts."""
    declared = SimpleNamespace(batch_size=32, has_partial_batch=True, partial_batch_size=5, num_batches=batches_in_all)
    batches = fit(run, 4, 69, 101, wanted=False, **vars(declared))
    batches.count_examples(3)
    assert (run.state.examples, run.state.batch_size) == (69, 32)
    batches.count_examples_at_end(4)
    assert run.state.examples == 101


def test_exact_without_reads(run: Reporter) -> None:
    """Between two reads of the metric, which take 200 µs, declared examples are counted without it."""
    batches = fit(run, 4, batch_size=32, num_batches=4)
    batches.count_examples(3, reads=False)
    assert run.state.examples == 96


def test_evaluated_within(run: Reporter) -> None:
    """The steps of an epoch that an evaluation within it has parted are one epoch's."""
    batches = fit(run, 4, 32, 64, batch_size=32, num_batches=4, has_partial_batch=True, partial_batch_size=5)
    batches.count_examples_at_end(1)
    parted = run.state.examples
    batches.count_examples(1)
    went_on = run.state.examples
    batches.count_examples_at_end(3)
    assert (parted, went_on, run.state.examples) == (32, 64, 101)


def test_failed(run: Reporter) -> None:
    """After a step has failed, the examples before it are reported, without reading the metric on the device."""
    batches = fit(run, 4, 32, batch_size=32, num_batches=4)
    batches.count_examples(1)
    batches.fail(2)
    assert run.state.examples == 64


def test_no_arrays(run: Reporter) -> None:
    """A DataLoader does not know what its sampler leaves out: its declared sum is not used."""
    feeder = SimpleNamespace(data_adapter=SimpleNamespace(batch_size=36, num_batches=1, partial_batch_size=None))
    batches = ExampleCounter(run, cast(LossReader, Metric(None)), 1, feeder, workers=False)
    batches.count_examples_at_end(1)
    assert (run.state.examples, run.state.batch_size) == (None, 36)


@pytest.mark.frameworks
@pytest.mark.parametrize(("drop_last", "last"), [(True, 16), (False, 4)])
def test_a_loader_that_drops_the_last_batch(run: Reporter, last: int, *, drop_last: bool) -> None:
    """Keras declares a last batch that a DataLoader drops; if the epoch has no other, its size is not used."""
    torch = pytest.importorskip("torch.utils.data")  # first: the import of Keras takes seconds
    adapters = pytest.importorskip("keras.src.trainers.data_adapters.torch_data_loader_adapter")
    rows = torch.TensorDataset(pytest.importorskip("torch").ones(20, 3))
    loader = torch.DataLoader(torch.Subset(rows, range(20 if drop_last else 4)), batch_size=16, drop_last=drop_last)
    feeder = SimpleNamespace(data_adapter=adapters.TorchDataLoaderAdapter(loader))
    batches = ExampleCounter(run, cast(LossReader, Metric(None)), len(loader), feeder, workers=False)
    batches.count_examples_at_end(1)
    assert run.state.batch_size == last
    assert batches.failed_batch_size() == last


def test_workers(run: Reporter) -> None:
    """The share of this process in a batch of several workers is unknown."""
    feeder = SimpleNamespace(data_adapter=ArrayDataAdapter(batch_size=32, num_batches=4))
    batches = ExampleCounter(run, cast(LossReader, Metric(None)), 4, feeder, workers=True)
    batches.count_examples_at_end(4)
    assert run.state.examples is None


def test_metric_set_back(run: Reporter) -> None:
    """A metric that was reset within the epoch continues from there."""
    batches = fit(run, None, 80, 16, 24)
    for steps in (10, 12):
        batches.count_examples(steps)
    batches.count_examples_at_end(13)
    assert run.state.examples == 104


def test_methods(run: Reporter) -> None:
    """Keras 2 has methods in place of Keras 3's properties."""
    batches = fit(run, 4, None, batch_size=lambda: 32, has_partial_batch=lambda: False)
    batches.count_examples_at_end(4)
    assert (run.state.batch_size, batches.failed_batch_size()) == (32, 32)


@pytest.mark.parametrize("size", [None, 0, -1, 2.0, "32"])
def test_nonsense(run: Reporter, size: Any) -> None:
    """Values that are no batch size are ignored."""
    batches = fit(run, 4, None, batch_size=size, num_batches=4)
    batches.count_examples_at_end(4)
    assert run.state.batch_size is run.state.examples is None


def test_epoch_of_unknown_examples(run: Reporter) -> None:
    """Once the examples of an epoch are unknown, the sum of the run is: it would be a lower bound."""
    fit(run, 4, batch_size=32, num_batches=4).count_examples_at_end(4)
    before = run.state.examples
    unknown = ExampleCounter(run, cast(LossReader, Metric(None, None)), 4, None, workers=False)
    unknown.count_examples_at_end(0)  # no step
    none_made = run.state.examples
    unknown.count_examples_at_end(4)
    during = run.state.examples
    fit(run, 4, batch_size=32, num_batches=4).count_examples_at_end(4)
    assert (before, none_made, during, run.state.examples) == (128, 128, None, None)

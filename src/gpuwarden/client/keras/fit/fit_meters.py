"""All meters of one fit, updated by the hooks of the callback."""

from __future__ import annotations

import weakref
from typing import Any

from gpuwarden.client.distributed.workers import is_in_one_process
from gpuwarden.client.keras.fit import introspection
from gpuwarden.client.keras.fit.example_counter import ExampleCounter
from gpuwarden.client.keras.fit.function_patch import InputMeter
from gpuwarden.client.keras.fit.iterator_wait import IteratorWait
from gpuwarden.client.keras.fit.loss_reader import LossReader
from gpuwarden.client.keras.fit.step_counter import StepCounter
from gpuwarden.client.keras.fit.tf_data_wait import TfDataWait
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import Reporter
from gpuwarden.protocol.messages import Report

METRICS_INTERVAL_SECONDS = 1.0  # between two reads of the loss metric and of the input wait: about 100 µs each


class FitMeters:
    """Meters of one fit: steps, examples, and input wait where it can be measured."""

    def __init__(self, run: Reporter, model: Any, in_epoch: Any, *, loss: bool) -> None:
        in_epoch = None if in_epoch is None else int(in_epoch)
        feeder, per_execution = introspection.find_feeder(), introspection.read_steps_per_execution(model)
        reader = LossReader(run, model, keras, wanted=loss, fits=feeder is not None)
        self._run = run
        self._loss_reader = reader
        self._examples = ExampleCounter(run, reader, in_epoch, feeder, workers=not is_in_one_process(model))
        if not (self._examples.is_exact or reader.is_readable):
            run.add_examples(None)
        self.input = _make_input_meter(run.state, per_execution)
        reference = weakref.ref(model)  # the run keeps the last fit's counter, and must not keep its model
        self.steps = StepCounter(
            run,
            per_execution,
            in_epoch,
            updates=lambda: introspection.read_updates(reference()),
            traces=lambda: introspection.read_traces(reference()),
            cut_short=self._examples.fail,
        )
        self._metrics_due = 0.0

    def begin_epoch(self) -> None:
        """Start counting an epoch."""
        self._examples.begin_epoch()
        self.steps.begin_epoch()
        self._loss_reader.begin_epoch()

    def end_epoch(self) -> None:
        """Count the remaining steps when validation starts or the epoch ends."""
        made = self.steps.end_epoch()
        if made is not None:
            self._examples.count_examples_at_end(made)
        if self.input is not None:
            self.input.pause()

    def read_logs(self, logs: Any) -> None:
        """Read the loss that Keras passes at the end of an epoch."""
        if self.steps.counts:
            self._loss_reader.read_logs(logs)

    def read_metrics(self, now: float) -> None:
        """Read the loss metric and the input wait, once a second; declared examples are counted each time."""
        self._run.count_ended()  # so that examples and steps are of the same moment
        is_due = now >= self._metrics_due
        if is_due or self._examples.is_exact:
            self._examples.count_examples(self._run.state.batch or 0, reads=is_due)
        if is_due:
            self._metrics_due = now + METRICS_INTERVAL_SECONDS
            if self.input is not None:
                self.input.record_wait()

    def fail(self) -> int | None:
        """Count the remaining steps after the current step has failed; return that step's examples if known."""
        if self.input is not None:
            self.input.pause()
        if self.steps.counts:
            self._examples.fail(self.steps.fail())
        return self._examples.failed_batch_size()


def _make_input_meter(state: Report, per_execution: int) -> InputMeter | None:
    """Return the meter of the input wait; None if it cannot be measured."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TfDataWait(state, per_execution)
    return IteratorWait(state) if backend == "jax" and per_execution == 1 else None

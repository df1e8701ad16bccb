"""The Keras callback: `model.fit(..., callbacks=[GpuWarden()])` makes a training process report to the daemon.

Training never suffers from it: no hook blocks, raises, reads logs, or forces the device to synchronize.
"""

# ruff: noqa: ARG002, D102 - Keras fixes the hooks' arguments and says what each hook is for

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

from gpuwarden.client import keras_model
from gpuwarden.client.errors import describe
from gpuwarden.client.frameworks import for_backend
from gpuwarden.client.functions import Functions, Kind
from gpuwarden.client.guard import Guard, guarded
from gpuwarden.client.hello import introduction
from gpuwarden.client.input_wait import Feed, InputWait
from gpuwarden.client.loss_metric import LossMetric
from gpuwarden.client.memory import with_named
from gpuwarden.client.run import REPORT_INTERVAL, Run, default_name, join
from gpuwarden.client.settings import checked
from gpuwarden.client.steps import Steps
from gpuwarden.client.tf_data import TfData
from gpuwarden.client.timed_next import TimedNext
from gpuwarden.protocol import Phase

_OF_ONE_FIT = {"_run", "_steps", "_metric", "_feed", "_functions", "_watched", "_model", "model"}


def _import_keras() -> Any:
    """Give the Keras that models are made with here."""
    names = ["keras", "tf_keras", "tensorflow.keras"]
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        names.sort(key="tf_keras".__ne__)
    errors = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ImportError(
        "gpuwarden.keras needs Keras and its backend in this environment: pip install 'gpuwarden[tensorflow]' "
        f"({'; '.join(errors)})"
    )


keras = _import_keras()


class GpuWarden(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # Keras ships no types
    """Report this process's training to the gpuwarden daemon; without a daemon it does nothing.

    `name` says what the run is called, by default its script. `devices` says which GPU, by UUID, a framework's device
    stands for, where the daemon cannot know: `{"CPU:0": "GPU-..."}`. `socket` is the daemon's, by default
    GPUWARDEN_SOCKET's or /run/gpuwarden/run.sock. `interval` is the seconds between reports. `loss` reports the mean
    loss of the epoch so far too. `disabled`, or GPUWARDEN_DISABLED=1, switches it off.
    """

    # Keras 2 would turn the logs of every batch into numbers for a callback without it, and wait for the device.
    _supports_tf_logs = True

    def __init__(
        self,
        *,
        name: str | None = None,
        devices: Mapping[str, str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        interval: float = REPORT_INTERVAL,
        loss: bool = False,
        disabled: bool | None = None,
    ) -> None:
        super().__init__()
        settings = checked(name=name, devices=devices, socket=socket, interval=interval, disabled=disabled)
        self._settings = settings
        self._loss = loss
        self._guard = Guard("callback", off=settings.disabled)
        # The model: Keras 3's self.model makes JAX copy its state back, and Keras 2 has no self._model.
        self._watched: Any = None
        self._functions: Functions | None = None
        self._run: Run | None = None
        self._steps: Steps | None = None  # of the fit under way
        self._batch: int | None = None  # whose begin was the last, in the epoch under way
        self._metric: LossMetric | None = None
        self._feed: Feed | None = None  # what it is fed, where that tells something

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit of this process."""
        return {**self.__dict__, **dict.fromkeys(_OF_ONE_FIT & self.__dict__.keys())}

    def set_model(self, model: Any) -> None:
        """Take note that fit, evaluate or predict has been called: the only sign that a fit before it has failed."""
        super().set_model(model)
        self._watched = model
        self._standalone = True
        self._take(model)

    @guarded
    def _take(self, model: Any) -> None:
        self._functions = Functions(model)
        self._functions.watch_test_early(self)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        run, model = self._join(), self._watched
        self._standalone = False
        in_epoch = self.params.get("steps")
        per_execution = keras_model.steps_per_execution(model)
        self._metric = LossMetric(run, model, keras, loss=self._loss)
        self._feed = _feed(run.input, per_execution)
        self._steps = Steps(
            run,
            per_execution,
            None if in_epoch is None else int(in_epoch),
            updates=lambda: keras_model.updates(model),
            traces=keras_model.Traces(model),
            looks=self._look,
        )
        self._enter("train")

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        self._leave()
        self._enter("idle")

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._steps is None:
            return
        assert self._run is not None
        if self._steps.superseded():
            if self._run.phase == "train":
                self._steps = None  # by a second GpuWarden of this fit: one of them counts
                return
            self._steps.resume()  # by a fit within this one, which is over
        assert self._metric is not None
        assert self._functions is not None
        self._standalone = False
        self._functions.watch("train", self, self._feed)
        self._functions.watch_test_early(self)
        self._metric.begin_epoch()
        self._steps.begin_epoch()  # and its first step reports
        self._batch = None
        self._run.phase, self._run.epoch, self._run.batch = "train", int(epoch), 0

    @guarded
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_steps()
        self._report()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        try:  # not guarded: this is done each step
            if self._steps is not None and batch != self._batch:  # the same again where this is in the list twice
                self._batch = batch
                self._steps.begin()
        except Exception as error:  # noqa: BLE001 - as there
            self._guard.failed(error, self._give_up)

    @guarded
    def on_test_begin(self, logs: Any = None) -> None:
        if self._standalone:
            self._join()
        else:
            self._end_steps()
        self._watch("test")
        self._enter("test")

    @guarded
    def on_test_end(self, logs: Any = None) -> None:
        if self._standalone:
            self._leave()
            self._enter("idle")
        else:
            self._leave("test")
            self._enter("train")

    @guarded
    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    @guarded
    def on_predict_begin(self, logs: Any = None) -> None:
        self._join()
        self._watch("predict")
        self._enter("predict")

    @guarded
    def on_predict_end(self, logs: Any = None) -> None:
        self._leave()
        self._enter("idle")

    @guarded
    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    @guarded
    def failed(self, exception: BaseException) -> None:
        """Tell the daemon what a step has raised, and that fit, evaluate or predict is over by it.

        Of the exception nothing is kept but text.
        """
        self._leave()
        if self._feed is not None:
            self._feed.pause()
        run, steps = self._run, self._steps
        assert run is not None
        if steps is not None and not steps.superseded():
            steps.fail()
        phase, run.phase = run.phase, "idle"
        run.memory.sample()
        if not isinstance(exception, Exception):
            self._report()  # interrupted: no error, but over all the same
            return
        run.fail(describe(exception, phase, run.steps, run.memory.reading()))

    def _join(self) -> Run:
        """Take part in this process's run; its devices exist by now, so that asking for them freezes nothing."""
        backend = keras.backend.backend()
        framework = for_backend(backend)
        names = with_named(framework.devices() if framework else {}, self._settings.devices)
        hello = introduction(
            self._settings.name or default_name(),
            f"{backend} {_version(backend)} keras {_version(keras.__name__)}",
            names,
        )
        self._run = run = join(self._settings.socket, hello)
        run.interval = self._settings.interval
        run.settle()  # what a fit counted that an exception ended unseen
        run.stepping = False
        run.input.forget_buffer()
        if framework:
            run.memory.watch(framework, names)
        return run

    def _watch(self, kind: Kind) -> None:
        assert self._functions is not None
        self._functions.watch(kind, self)

    def _leave(self, *kinds: Kind) -> None:
        assert self._functions is not None
        self._functions.leave(*kinds)

    def _enter(self, phase: Phase) -> None:
        assert self._run is not None
        self._run.phase = phase
        self._report()

    def _report(self) -> None:
        assert self._run is not None
        self._run.report(monotonic())

    def _observe(self) -> None:
        assert self._run is not None
        now = monotonic()
        if now >= self._run.due:
            self._run.observe(now)

    def _look(self) -> None:
        if self._metric is not None:
            self._metric.look()
        if self._feed is not None:
            self._feed.look()

    def _end_steps(self) -> None:
        # torch's trainer has a batch before it begins a step: so no begin of its is made in vain.
        all_made = keras.backend.backend() == "torch" or bool(self._watched.stop_training)
        if self._steps is not None and self._steps.end_epoch(stopped=all_made):
            assert self._metric is not None
            self._metric.look_at_end()
        if self._feed is not None:
            self._feed.pause()

    def _give_up(self) -> None:
        self._steps = None  # so the hook of each step, which asks no guard, does nothing any more
        if self._run is not None:
            self._run.give_up()


def _feed(wait: InputWait, per_execution: int) -> Feed | None:
    """Choose who finds how long steps wait for their input; None where nobody can know."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TfData(wait, per_execution)
    return TimedNext(wait) if backend == "jax" and per_execution == 1 else None


def _version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "")

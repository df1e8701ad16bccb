"""The Keras callback: `model.fit(..., callbacks=[GpuWarden()])` makes a training process report to the daemon.

Training never suffers from it: no hook blocks, raises, reads logs, or forces the device to synchronize.
"""

# ruff: noqa: ARG002, D102 - Keras fixes the hooks' arguments and says what each hook is for

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Mapping
from time import monotonic
from typing import Any

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.frameworks.allocator_memory import add_named_devices
from gpuwarden.client.guard import Guard, guarded
from gpuwarden.client.hello import make_hello
from gpuwarden.client.input_wait import InputWait
from gpuwarden.client.keras import early_oom, introspection
from gpuwarden.client.keras.example_counter import ExampleCounter
from gpuwarden.client.keras.function_patch import FUNCTION_KINDS, FunctionKind, FunctionPatch, InputMeter
from gpuwarden.client.keras.iterator_wait import IteratorWait
from gpuwarden.client.keras.loss_reader import LossReader
from gpuwarden.client.keras.model_memory import add_model_memory
from gpuwarden.client.keras.on_pressure import OnPressure, PressureLevel, PressureResponder, make_responder
from gpuwarden.client.keras.step_counter import StepCounter
from gpuwarden.client.keras.tf_data_wait import TfDataWait
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import REPORT_INTERVAL_SECONDS, Reporter, join_run
from gpuwarden.client.settings import check_settings
from gpuwarden.client.workers import has_workers, is_in_one_process
from gpuwarden.protocol.messages import Advice, Phase

METRICS_INTERVAL_SECONDS = 1.0  # between two reads of the loss metric and of the input's wait: some 100 µs each

_OF_ONE_FIT = {"_run", "_fit", "_functions", "_watched", "_model", "model"}


class _Fit:
    """Meters of one fit: its steps, their examples, and their wait for input where that can be known."""

    def __init__(self, run: Reporter, model: Any, in_epoch: Any, *, loss: bool) -> None:
        in_epoch = None if in_epoch is None else int(in_epoch)
        feeder, per_execution = introspection.find_feeder(), introspection.read_steps_per_execution(model)
        reader = LossReader(run, model, keras, wanted=loss, fits=feeder is not None)
        self._run = run
        self._examples = ExampleCounter(run, reader, in_epoch, feeder, workers=not is_in_one_process(model))
        self.input = _make_input_meter(run.input, per_execution)
        reference = weakref.ref(model)  # the run keeps the last fit's steps, and must not keep its model
        self.steps = StepCounter(
            run,
            per_execution,
            in_epoch,
            updates=lambda: introspection.read_updates(reference()),
            traces=introspection.TraceCount(model),
        )
        self._metrics_due = 0.0

    def begin_epoch(self) -> None:
        """Start to count an epoch."""
        self._examples.begin_epoch()
        self.steps.begin_epoch()

    def end_epoch(self) -> None:
        """Count what is left when training stops for validation or the epoch's end."""
        made = self.steps.end_epoch()
        if made is not None:
            self._examples.update_at_end(made)
        if self.input is not None:
            self.input.pause()

    def read_metrics(self, now: float) -> None:
        """Read the loss metric and the input wait, once a second."""
        if now < self._metrics_due:
            return
        self._metrics_due = now + METRICS_INTERVAL_SECONDS
        self._run.settle()  # so that examples and steps are of the same moment
        self._examples.update(self._run.batch or 0)
        if self.input is not None:
            self.input.update()

    def fail(self) -> int | None:
        """Count what is left when the step under way has failed; return that step's examples where they are known."""
        if self.input is not None:
            self.input.pause()
        if self.steps.counts:
            self._examples.fail(self.steps.fail())
        return self._examples.failed_batch_size()


class GpuWarden(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Report this process's training to the gpuwarden daemon; without a daemon it does nothing.

    `name` says what the run is called, by default its script. `devices` says which GPU, by UUID, a framework's device
    stands for, where the daemon cannot know: `{"CPU:0": "GPU-..."}`. `socket` is the daemon's, by default
    GPUWARDEN_SOCKET's or /run/gpuwarden/run.sock. `interval` is the seconds between reports. `loss` reports the mean
    loss of the epoch so far too. `disabled`, or GPUWARDEN_DISABLED=1, switches it off.

    `on_pressure` is what the fit does, between two steps and once an episode, when the daemon reports that a GPU comes
    under pressure or has an XID: "checkpoint" saves the model at `checkpoint_path`, "stop" ends the fit as Keras's
    `stop_training` does, a function is called with the advice and the model. `pressure_level="warning"` acts earlier.
    """

    __module__ = "gpuwarden.keras"  # whence users import it: a pickle names no other module
    # Keras 2 would turn the logs of every batch into numbers for a callback without it, and wait for the device.
    _supports_tf_logs = True
    _latest: weakref.ref[GpuWarden] | None = None  # that was made
    begins_each_fit = True  # also one that goes on after an out-of-memory (tuning/oom_retry.py)

    def __init__(
        self,
        *,
        name: str | None = None,
        devices: Mapping[str, str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        interval: float = REPORT_INTERVAL_SECONDS,
        loss: bool = False,
        disabled: bool | None = None,
        on_pressure: OnPressure | None = None,
        pressure_level: PressureLevel = "critical",
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        settings = check_settings(name=name, devices=devices, socket=socket, interval=interval, disabled=disabled)
        self._settings = settings
        self._loss = loss
        self._responder = make_responder(on_pressure, pressure_level, checkpoint_path)
        self._guard = Guard("callback", off=settings.disabled)
        # The model: Keras 3's self.model makes JAX copy its state back, and Keras 2 has no self._model.
        self._watched: Any = None
        self._functions: FunctionPatch | None = None
        self._run: Reporter | None = None
        self._fit: _Fit | None = None  # that is under way
        self._nested = False  # the hooks that are called are of a fit that another one's callback has called
        self._due = 0.0  # when a step has more to do than to be noted (monotonic)
        GpuWarden._latest = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit of this process."""
        return {**self.__dict__, **dict.fromkeys(_OF_ONE_FIT & self.__dict__.keys())}

    def set_model(self, model: Any) -> None:
        """Record that fit, evaluate or predict has been called: the only sign that a fit before it has failed.

        Of a call from a hook nothing is noted: the fit around it goes on.
        """
        if not introspection.is_nested(keras):
            super().set_model(model)
            self._watched, self._fit = model, None
            self._patch_functions(model)

    @guarded
    def _patch_functions(self, model: Any) -> None:
        self._functions = FunctionPatch(model)
        self._functions.restore_all()  # of a callback of a fit that another callback's exception ended
        self._functions.patch_test_early(self)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        if self._is_nested():
            return
        # A loop of one's own that calls the hooks through Keras's CallbackList may have set no params.
        self._fit = _Fit(self._begin_run(), self._watched, (self.params or {}).get("steps"), loss=self._loss)
        if self._responder is not None:
            self._responder.check_workers(self._watched)
        self._enter("train")

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        if self._is_nested():
            self._nested = False  # the fit around it goes on
            return
        self._patch.restore(self)
        self._enter("idle")

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._is_nested() or self._fit is None or not self._fit.steps.counts:
            return
        self._patch.patch("train", self, self._fit.input)
        self._patch.patch_test_early(self)
        self._fit.begin_epoch()
        run = self._reporter
        run.epoch, run.phase, run.batch = int(epoch), "train", 0
        run.report_soon()  # should the epoch's first step hang, the daemon knows that it began
        self._due = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()
        if self._responder is not None and not self._nested and has_workers(self._watched):
            agreed, advice = self._responder.choose_together(self._run.advice if self._run else None, self._watched)
            if agreed:
                self._act(self._responder, advice)

    @guarded
    def _end_epoch(self) -> None:
        if not self._is_nested():
            if self._fit is not None:
                self._fit.end_epoch()
            self._report()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        fit = self._fit
        if fit is None or self._nested:
            return
        try:
            now = monotonic()
            fit.steps.begin(batch, now)
            if now >= self._due:
                self._update(fit, now)
        except Exception as error:  # noqa: BLE001 - no failure here may end a training run
            self._guard.record_failure(error, self._give_up)

    def _update(self, fit: _Fit, now: float) -> None:
        """Do what is due as a step begins, and set when there is more to do."""
        run, steps = self._reporter, fit.steps
        if not steps.counts:
            steps.settle()
            self._due = now + run.interval
            return
        if self._responder is not None:
            run.listen(now)
            self._act_alone(self._responder)
        if now >= run.observe_due:
            run.phase, run.stepping = "train", True
            fit.read_metrics(now)
            run.observe(now)
        self._due = run.observe_due if self._responder is None else min(run.observe_due, run.listen_due)
        steps.restart()

    @guarded
    def on_test_begin(self, logs: Any = None) -> None:
        self._begin_without_steps("test")

    @guarded
    def on_test_end(self, logs: Any = None) -> None:
        self._end_without_steps("test")

    @guarded
    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    @guarded
    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin_without_steps("predict")

    @guarded
    def on_predict_end(self, logs: Any = None) -> None:
        self._end_without_steps("predict")

    @guarded
    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    def _begin_without_steps(self, phase: FunctionKind) -> None:
        """Enter a phase in which no steps are made: on its own, a fit's validation, or called from a hook."""
        if introspection.is_nested(keras):
            if self._fit is None:
                self._join()
        else:
            if self._fit is None:
                self._begin_run()
            else:
                self._fit.end_epoch()
            self._patch.patch(phase, self)
        self._enter(phase)

    def _end_without_steps(self, phase: FunctionKind) -> None:
        nested, fits = introspection.is_nested(keras), self._fit is not None
        if not nested:
            self._patch.restore(self, *([phase] if fits else FUNCTION_KINDS))
        self._enter("train" if nested or fits else "idle")

    @guarded
    def record_exception(self, exception: BaseException) -> None:
        """Report what a step has raised, and that it has ended fit, evaluate or predict.

        Of the exception only text is kept.
        """
        self._patch.restore(self)
        run = self._reporter
        size = None if self._fit is None else self._fit.fail()
        phase, run.phase = run.phase, "idle"
        run.memory.sample()
        if not isinstance(exception, Exception):
            self._report()  # interrupted: no error, but over all the same
            return
        size = size if phase == "train" else None
        run.report_error(
            add_model_memory(
                error_from_exception(exception, phase, run.steps, run.memory.latest(), size), self._watched
            )
        )

    def record_end_of_data(self) -> None:
        """Record that a step found no data, where Keras does not know, or was given, how long an epoch is."""
        if self._fit is not None:
            self._fit.steps.find_end()

    def _join(self) -> Reporter:
        """Join this process's run; its devices exist by now, so that asking for them freezes nothing."""
        backend = keras.backend.backend()
        framework = make_adapter(backend)
        names = add_named_devices(framework.list_devices() if framework else {}, self._settings.devices)
        hello = make_hello(
            self._settings.name,
            f"{backend} {_read_version(backend)} keras {_read_version(keras.__name__)}",
            names,
        )
        self._run = run = join_run(self._settings.socket, hello)
        run.interval = self._settings.interval
        if framework:
            run.memory.watch(framework, names)
        return run

    def _begin_run(self) -> Reporter:
        """Join the run where nothing of it is under way; a fit that an exception ended unseen has counted steps."""
        run = self._join()
        run.settle()
        run.stepping = False
        run.input.clear_buffer()
        return run

    @guarded
    def _report_late(self) -> None:
        """Join a run that ends before it has begun: what ended it goes with the run's end."""
        run = self._join()
        run.memory.sample()
        atexit.unregister(run.end)
        run.end()

    def _is_nested(self) -> bool:
        """Return whether this hook is of a fit within a fit, which is not counted, nor are the steps that follow."""
        self._nested = introspection.is_nested(keras)
        return self._nested

    @property
    def _patch(self) -> FunctionPatch:
        assert self._functions is not None  # set_model comes before any hook
        return self._functions

    @property
    def _reporter(self) -> Reporter:
        assert self._run is not None  # the hooks that begin something join it
        return self._run

    def _enter(self, phase: Phase) -> None:
        self._reporter.phase = phase
        self._report()

    def _report(self) -> None:
        self._reporter.report(monotonic())

    def _observe(self) -> None:
        now = monotonic()
        if now >= self._reporter.observe_due:
            self._reporter.observe(now)

    def _act_alone(self, responder: PressureResponder) -> None:
        """Act between two steps, where no other worker has to agree; meanwhile no step is under way."""
        run = self._reporter
        advice = responder.choose_alone(run.advice)
        if advice:
            run.stepping = False
            self._report()
            self._act(responder, advice[-1])
            run.stepping = True
            self._report()

    def _act(self, responder: PressureResponder, advice: Advice | None) -> None:
        """Do what the user has asked for."""
        try:
            # Not the one that is watched: Keras gives this one its state back first, on JAX.
            done = responder.act(advice, self.model)
        except BaseException as error:
            self.record_exception(error)
            raise
        if done and self._run is not None:
            self._run.actions[responder.action] += 1

    def _give_up(self) -> None:
        self._fit = None  # so that the hook of each step, which has no guard, does nothing from now on
        if self._run is not None:
            self._run.give_up()


def _report_late() -> None:
    """Report a program that ends before a fit has begun: as the last callback made, or as one would by default."""
    latest = GpuWarden._latest() if GpuWarden._latest is not None else None  # noqa: SLF001 - the same module
    (latest or GpuWarden())._report_late()  # noqa: SLF001 - likewise


early_oom.report_early_oom(_report_late)


def _make_input_meter(wait: InputWait, per_execution: int) -> InputMeter | None:
    """Return the meter of the wait for input; None where it cannot be known."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TfDataWait(wait, per_execution)
    return IteratorWait(wait) if backend == "jax" and per_execution == 1 else None


def _read_version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "")

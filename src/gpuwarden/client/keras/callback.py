"""Keras callback that reports a training process to the daemon: `model.fit(..., callbacks=[GpuWarden()])`.

It never disturbs the training: no hook blocks, raises, waits for logs, or synchronizes the device.
"""

# ruff: noqa: ARG002, D102 - Keras defines the hooks' arguments and documents the hooks

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Mapping
from time import monotonic
from typing import Any

from gpuwarden.client.distributed.workers import has_workers
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.uncaught import error_from_uncaught
from gpuwarden.client.guard import Guard, claim_steps, guarded
from gpuwarden.client.input_wait import clear_input_buffer
from gpuwarden.client.keras.fit import introspection
from gpuwarden.client.keras.fit.fit_meters import FitMeters
from gpuwarden.client.keras.fit.function_patch import FUNCTION_KINDS, FunctionKind, FunctionPatch
from gpuwarden.client.keras.keras_run import join_keras_run, read_memory_logs
from gpuwarden.client.keras.model_memory import add_model_memory
from gpuwarden.client.keras.on_pressure import OnPressure, PressureLevel, PressureResponder, make_responder
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import REPORT_INTERVAL_SECONDS, Reporter, add_one, has_reported
from gpuwarden.client.settings import check_settings
from gpuwarden.protocol.messages import Advice, Phase

_FIT_ATTRIBUTES = {"_run", "_fit", "_functions", "_watched", "_model", "model"}
_PROCESS = os.getpid()  # forked children are left out of a report at exit: they use the parent's model


class GpuWarden(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Keras callback that reports training to the gpuwarden daemon.

    For `fit`, `evaluate` and `predict`, in Keras 3 and 2. All fits and callbacks of a process are one run. Without a
    daemon it does nothing; a daemon that starts later is found within 30 s.

        from gpuwarden.keras import GpuWarden

        model.fit(x, y, epochs=10, callbacks=[GpuWarden(name="resnet50")])

    Args:
        name: Name of the run. Default: the name of the script.
        devices: UUID of the GPU behind a framework's device, for devices that the daemon cannot identify:
            `{"GPU:0": "GPU-..."}`. A CPU is reported only if it is named here.
        socket: Path of the daemon's socket. Default: `$GPUWARDEN_SOCKET`, else /run/gpuwarden/run.sock.
        interval: Seconds between reports, 0 to 86400. Default: 0.25.
        loss: True to report the mean loss of the epoch, as the progress bar shows it.
        disabled: True to report nothing. Default: True if `$GPUWARDEN_DISABLED` is 1.
        on_pressure: Action when a GPU comes under memory or thermal pressure or has an XID error, between two steps and
            once for each episode: "checkpoint" saves the model, "stop" ends the fit like `model.stop_training`, a
            function is called with the advice and the model. Default: no action.
        pressure_level: "critical", or "warning" to act earlier.
        checkpoint_path: File for "checkpoint", with the suffix .keras, .h5 or .weights.h5. Default:
            gpuwarden-checkpoint.keras in the working directory.
        census: True to report which names of the program keep its tensors, at a leak, under memory pressure or after an
            out-of-memory: at most once a minute, within 0.3 s. Default: True if `$GPUWARDEN_CENSUS` is 1.
        summary: True to print a line about memory, headroom and lost time to standard error when a fit ends, or the
            diagnosis of an out-of-memory below its traceback. It delays the end by up to 0.3 s. Default:
            `$GPUWARDEN_SUMMARY`, else True on a terminal.
        logs: True to add memory and headroom to the logs of each epoch, which History, CSVLogger, TensorBoard and the
            progress bar show. Callbacks after this one get them.

    Cost: 5 to 8 µs of CPU time a step, about 100 µs for a report, and some ms for a fit.

    It never blocks a step, never synchronizes a device, and never raises after this call; a checkpoint or a function
    of `on_pressure` takes its own time.

    Raises:
        ValueError or TypeError: An argument is wrong; the message begins with its name.
    """

    __module__ = "gpuwarden.keras"  # users import it from there: a pickle names no other module
    # Without it, Keras 2 would convert the logs of every batch to numbers and wait for the device.
    _supports_tf_logs = True
    _latest: weakref.ref[GpuWarden] | None = None  # the callback that was made last
    claims_steps = True  # the program counts by it, so what `gpuwarden run` added stops
    begins_each_fit = True  # read by tuning/oom_retry.py: call on_train_begin in every try

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
        census: bool | None = None,
        summary: bool | None = None,
        logs: bool = False,
    ) -> None:
        super().__init__()
        settings = check_settings(
            name=name,
            devices=devices,
            socket=socket,
            interval=interval,
            disabled=disabled,
            census=census,
            summary=summary,
            logs=logs,
        )
        self._settings = settings
        self._loss = loss
        self._responder = make_responder(on_pressure, pressure_level, checkpoint_path)
        self._guard = Guard("callback", off=settings.disabled)
        # Not self.model: in Keras 3 reading it makes JAX copy its state back. Keras 2 has no self._model.
        self._watched: Any = None
        self._functions: FunctionPatch | None = None
        self._run: Reporter | None = None
        self._fit: FitMeters | None = None  # the current one
        self._is_hello_final = False  # the hello has the devices, or why there are none
        self._nested = False  # the current hooks belong to a fit that another fit's callback has called
        self._due = 0.0  # time of the next step that does more than record its start (monotonic)
        GpuWarden._latest = weakref.ref(self)
        if self.claims_steps:
            claim_steps()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the attributes that belong to one fit of this process."""
        return {**self.__dict__, **dict.fromkeys(_FIT_ATTRIBUTES & self.__dict__.keys())}

    def set_model(self, model: Any) -> None:
        """Record that fit, evaluate or predict has been called: the only sign that an earlier fit has failed.

        A call from a hook is ignored: the fit around it continues.
        """
        if not introspection.is_nested(keras):
            super().set_model(model)
            self._watched, self._fit = model, None
            self._patch_functions(model)

    @guarded
    def _patch_functions(self, model: Any) -> None:
        self._functions = FunctionPatch(model)
        self._functions.restore_all()  # patches of a fit that another callback's exception ended
        self._functions.patch_test_early(self)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        if self._is_nested():
            return
        # A custom loop that calls the hooks through Keras's CallbackList may have set no params.
        self._fit = FitMeters(self._begin_run(), self._watched, (self.params or {}).get("steps"), loss=self._loss)
        if self._responder is not None:
            self._responder.check_workers(self._watched)
        self._enter("train")

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        if self._is_nested():
            self._nested = False  # the fit around it continues
            return
        self._patch.restore(self)
        self._enter("idle")
        self._reporter.print_summary()

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._is_nested() or self._fit is None or not self._fit.steps.counts:
            return
        self._patch.patch("train", self, self._fit.input, self._fit.steps.returned)
        self._patch.patch_test_early(self)
        self._fit.begin_epoch()
        run = self._reporter
        state = run.state
        state.epoch, state.phase, state.batch = int(epoch), "train", 0
        run.report_soon()  # if the epoch's first step hangs, the daemon knows that it has started
        self._due = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch(logs)
        if self._responder is not None and not self._nested and has_workers(self._watched):
            agreed, advice = self._responder.choose_together(self._run.advice if self._run else None, self._watched)
            if agreed:
                self._act(self._responder, advice)

    @guarded
    def _end_epoch(self, logs: Any) -> None:
        if not self._is_nested():
            if self._fit is not None:
                self._fit.end_epoch()
                self._fit.read_logs(logs)
                self._update_hello()
            self._report()
            if self._settings.logs and isinstance(logs, dict):
                logs.update(read_memory_logs(self._reporter))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        fit = self._fit
        if fit is None or self._nested:
            return
        try:
            now = monotonic()
            fit.steps.begin(batch, now)
            if now >= self._due:
                self._do_due_work(fit, now)
        except Exception as error:  # noqa: BLE001 - no failure here may end a training run
            self._guard.record_failure(error, self._give_up)

    def _do_due_work(self, fit: FitMeters, now: float) -> None:
        """Do the periodic work at the start of a step, and schedule the next."""
        run, steps = self._reporter, fit.steps
        if not steps.counts:
            steps.count_ended()
            self._due = now + run.interval
            return
        if self._responder is not None:
            run.listen(now)
            self._act_alone(self._responder)
        if now >= run.observe_due:
            run.state.phase, run.state.stepping = "train", True
            fit.read_metrics(now)
            self._update_hello()
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
        """Enter a phase without training steps: evaluate or predict, a fit's validation, or a call from a hook."""
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
        """Report an exception of a step, which ends fit, evaluate or predict. Only its text is kept."""
        self._patch.restore(self)
        run = self._reporter
        size = None if self._fit is None else self._fit.fail()
        phase, run.state.phase = run.state.phase, "idle"
        run.memory.sample()
        if not isinstance(exception, Exception):
            self._report()  # interrupted: ended without an error
            return
        size = size if phase == "train" else None
        run.report_error(
            add_model_memory(
                error_from_exception(exception, phase, run.state.steps, run.memory.latest(), size), self._watched
            )
        )

    def record_end_of_data(self) -> None:
        """Record that a step found the end of the data; Keras does not know the length of the epoch."""
        if self._fit is not None:
            self._fit.steps.find_end()

    def _join(self) -> Reporter:
        stepped = self._run is not None and self._run.state.steps > 0
        self._run, self._is_hello_final = join_keras_run(self._settings, stepped=stepped)
        return self._run

    def _update_hello(self) -> None:
        """Send a hello with devices once a step has been made: torch sets them up in the first, if it uses any."""
        if not self._is_hello_final and self._reporter.state.steps:
            self._join()

    def _begin_run(self) -> Reporter:
        """Join the run when no fit is in progress; count the steps of a fit that an unreported exception ended."""
        run = self._join()
        run.finish()
        run.state.stepping = False
        clear_input_buffer(run.state)
        return run

    @guarded
    def _report_late(self) -> None:
        """Join the run of a process that ends before its first fit; the error is sent with the run's end."""
        run = self._join()
        run.memory.sample()
        atexit.unregister(run.end)
        run.end()

    def _is_nested(self) -> bool:
        """Return whether this hook belongs to a fit inside a fit; its steps are not counted."""
        self._nested = introspection.is_nested(keras)
        return self._nested

    @property
    def _patch(self) -> FunctionPatch:
        assert self._functions is not None  # set_model comes before any hook
        return self._functions

    @property
    def _reporter(self) -> Reporter:
        assert self._run is not None  # on_train_begin and the like join it
        return self._run

    def _enter(self, phase: Phase) -> None:
        self._reporter.state.phase = phase
        self._report()

    def _report(self) -> None:
        self._reporter.report(monotonic())

    def _observe(self) -> None:
        now = monotonic()
        if now >= self._reporter.observe_due:
            self._reporter.observe(now)

    def _act_alone(self, responder: PressureResponder) -> None:
        """Act between two steps, if no other worker has to agree; no step is in progress meanwhile."""
        run = self._reporter
        advice = responder.choose_alone(run.advice)
        if advice:
            run.state.stepping = False
            self._report()
            self._act(responder, advice[-1])
            run.state.stepping = True
            self._report()

    def _act(self, responder: PressureResponder, advice: Advice | None) -> None:
        """Take the action that the user asked for."""
        began = monotonic()
        try:
            # Not self._watched: on JAX, reading self.model gives the model its state back.
            done = responder.act(advice, self.model)
        except BaseException as error:
            self.record_exception(error)
            raise
        if self._run is not None:
            self._run.advice.record_action(responder.action, began, monotonic())
            if done:
                state = self._run.state
                state.actions = add_one(state.actions, responder.action)

    def _give_up(self) -> None:
        self._fit = None  # the unguarded hook of each step does nothing from now on
        if self._run is not None:
            self._run.give_up()


def _report_early_oom() -> None:
    """Report at exit an out-of-memory that ended this program before its first fit, as Keras made model or optimizer.

    No hook of a callback has been called by then. The last callback made reports, or else a default one.
    """
    if os.getpid() != _PROCESS or has_reported():
        return
    with contextlib.suppress(Exception):  # no internal failure may show at a program's end
        error = error_from_uncaught(None, "idle", 0, {})
        # Other errors are not reported: the framework may not be set up, and listing its devices would do that.
        if error is not None and error.allocations:
            latest = GpuWarden._latest() if GpuWarden._latest is not None else None  # noqa: SLF001 - the same module
            (latest or GpuWarden())._report_late()  # noqa: SLF001 - likewise


atexit.register(_report_early_oom)

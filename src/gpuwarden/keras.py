"""The Keras callback: `model.fit(..., callbacks=[GpuWarden()])` makes a training process report to the daemon.

Training never suffers from it: no hook blocks, raises, reads logs, or forces the device to synchronize.
"""

# ruff: noqa: ARG002, D102 - Keras fixes the hooks' arguments and says what each hook is for

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from gpuwarden.client import company, keras_model, unbegun
from gpuwarden.client.answer import OnPressure, PressureLevel, Responder, Wish, checked_wish, fulfil
from gpuwarden.client.batch_size import find_batch_size
from gpuwarden.client.batches import Batches
from gpuwarden.client.errors import describe
from gpuwarden.client.frameworks import for_backend
from gpuwarden.client.functions import Functions, Kind
from gpuwarden.client.guard import Guard, guarded
from gpuwarden.client.hello import introduction
from gpuwarden.client.hook import Hook
from gpuwarden.client.input_wait import Feed, InputWait
from gpuwarden.client.keras_import import keras
from gpuwarden.client.loss_metric import LossMetric
from gpuwarden.client.memory import with_named
from gpuwarden.client.model_memory import with_model
from gpuwarden.client.oom_retry import fit_with_oom_retry
from gpuwarden.client.run import REPORT_INTERVAL, Run, default_name, join
from gpuwarden.client.settings import checked
from gpuwarden.client.steps import Steps
from gpuwarden.client.tf_data import TfData
from gpuwarden.client.timed_next import TimedNext
from gpuwarden.protocol import Advice, Phase

__all__ = ["GpuWarden", "find_batch_size", "fit_with_oom_retry", "keras"]

T = TypeVar("T")

_OF_ONE_FIT = {"_run", "_steps", "_batches", "_traces", "_feed", "_functions", "_watched", "_model", "model"}
_OF_ONE_CALL = _OF_ONE_FIT | {"params", "_in_vain", "_standalone"}


class GpuWarden(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Report this process's training to the gpuwarden daemon; without a daemon it does nothing.

    `name` says what the run is called, by default its script. `devices` says which GPU, by UUID, a framework's device
    stands for, where the daemon cannot know: `{"CPU:0": "GPU-..."}`. `socket` is the daemon's, by default
    GPUWARDEN_SOCKET's or /run/gpuwarden/run.sock. `interval` is the seconds between reports. `loss` reports the mean
    loss of the epoch so far too. `disabled`, or GPUWARDEN_DISABLED=1, switches it off.

    `on_pressure` is what the fit does, between two steps and once an episode, when the daemon tells it that a GPU comes
    under pressure or meets an XID: "checkpoint" saves the model at `checkpoint_path`, "stop" ends the fit as Keras's
    `stop_training` does, a function is called with the advice and the model. `pressure_level="some"` acts earlier.
    """

    # Keras 2 would turn the logs of every batch into numbers for a callback without it, and wait for the device.
    _supports_tf_logs = True
    _latest: weakref.ref[GpuWarden] | None = None  # that was made
    begins_each_fit = True  # also one that goes on after an out-of-memory (client/oom_retry.py)

    def __init__(
        self,
        *,
        name: str | None = None,
        devices: Mapping[str, str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        interval: float = REPORT_INTERVAL,
        loss: bool = False,
        disabled: bool | None = None,
        on_pressure: OnPressure | None = None,
        pressure_level: PressureLevel = "critical",
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        settings = checked(name=name, devices=devices, socket=socket, interval=interval, disabled=disabled)
        self._settings = settings
        self._loss = loss
        wish = checked_wish(on_pressure, pressure_level, checkpoint_path)
        self._responder = None if wish is None else Responder(wish)
        self._guard = Guard("callback", off=settings.disabled)
        # The model: Keras 3's self.model makes JAX copy its state back, and Keras 2 has no self._model.
        self._watched: Any = None
        self._functions: Functions | None = None
        self._run: Run | None = None
        self._steps: Steps | None = None  # of the fit under way
        self._hook: Hook | None = None  # of each step; what somebody took of it in one fit is good in the next
        self._in_vain: float | None = None  # the begin that found the data at its end
        self._batches: Batches | None = None
        self._traces: keras_model.Traces | None = None  # which the steps hold weakly
        self._feed: Feed | None = None  # what it is fed, where that tells something
        self._around: dict[int, dict[str, Any]] = {}  # the fits around what goes on, by depth
        GpuWarden._latest = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit of this process."""
        state = {**self.__dict__, **dict.fromkeys(_OF_ONE_FIT & self.__dict__.keys()), "_around": {}, "_hook": None}
        if self._hook is not None and state.get(_METHOD.__name__) is self._hook.begin:
            del state[_METHOD.__name__]
        return state

    def set_model(self, model: Any) -> None:
        """Take note that fit, evaluate or predict has been called: the only sign that a fit before it has failed."""
        self._set_aside()
        super().set_model(model)
        self._watched = model
        self._standalone = True
        self._take(model)

    @guarded
    def _set_aside(self) -> None:
        """Keep what belongs to the fit from whose callbacks this was called, so that it can go on."""
        depth = keras_model.hooks_around(keras)
        over = [each for each in self._around if each >= depth]  # an exception ended what came within
        now = {name: value for name, value in self.__dict__.items() if name in _OF_ONE_CALL}
        around = self._around[min(over)] if over else now
        self._around = {each: state for each, state in self._around.items() if each < depth}
        if depth:
            self._around[depth] = around

    @guarded
    def _take_up(self) -> None:
        """Go on with the fit around what is over."""
        if self._around:
            self.__dict__.update(self._around.pop(max(self._around)))
            self._count_with(self._steps)
            if self._steps is not None and self._functions is not None:
                self._functions.watch("train", self, self._feed)  # of the same model, perhaps

    def _take_up_abandoned(self) -> None:
        """Go on with the fit whose hook this is, where another's exception ended what came within, and was caught."""
        # Once it is off `_take_up` takes nothing any more.
        while not self._guard.off and self._around and max(self._around) >= keras_model.hooks_around(keras):
            self._take_up()

    @guarded
    def _take(self, model: Any) -> None:
        self._functions = Functions(model)
        if not self._around:
            self._functions.clear()  # of whoever watched a fit that another callback's exception ended
        self._functions.watch_test_early(self)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        run, model = self._join(), self._watched
        self._standalone = False
        # A loop of one's own that calls the hooks through Keras's CallbackList may have told it nothing.
        in_epoch, feeder = (self.params or {}).get("steps"), keras_model.feeder()
        per_execution = keras_model.steps_per_execution(model)
        in_epoch = None if in_epoch is None else int(in_epoch)
        metric = LossMetric(run, model, keras, wanted=self._loss, fits=feeder is not None)
        self._batches = Batches(run, metric, in_epoch, feeder, workers=not company.in_one_process(model))
        self._feed = _feed(run.input, per_execution)
        self._traces, reference = keras_model.Traces(model), weakref.ref(model)
        self._hook = self._hook or Hook(partial(self._guard.failed, give_up=_weakly(self._give_up)))
        steps = Steps(
            run,
            per_execution,
            in_epoch,
            updates=lambda: keras_model.updates(reference()),
            traces=_weakly(self._traces.__call__),
            looks=[_weakly(self._look), *([self._feed.look] if self._feed is not None else [])],
            answers=None if self._responder is None else _weakly(self._answer),
            hook=self._hook,
        )
        self._count_with(steps)
        if self._responder is not None:
            self._responder.look_around(model)
        self._enter("train")

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        self._take_up_abandoned()
        self._end()

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._take_up_abandoned()
        if self._steps is None:
            return
        assert self._run is not None
        if self._steps.displaced():
            self._count_with(None)  # one of them counts
            return
        if self._steps.superseded():
            self._steps.resume()
        assert self._batches is not None
        assert self._functions is not None
        self._standalone = False
        self._functions.watch("train", self, self._feed)
        self._functions.watch_test_early(self)
        self._batches.begin_epoch()
        self._steps.begin_epoch(int(epoch))  # and its first step reports
        self._in_vain = None
        self._run.phase, self._run.batch = "train", 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()
        if self._responder is not None and company.has_workers(self._watched):
            agreed, advice = self._responder.together(self._run.told if self._run else None, self._watched)
            if agreed:
                self._act(self._responder.wish, advice)

    @guarded
    def _end_epoch(self) -> None:
        self._take_up_abandoned()
        self._end_steps()
        self._report()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._hook is not None:
            self._hook.begin(batch)  # what Keras mostly finds in place of this method

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
            self._end()
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
        self._end()

    @guarded
    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    def failed(self, exception: BaseException) -> None:
        """Tell the daemon what a step has raised, and that fit, evaluate or predict is over by it.

        Of the exception nothing is kept but text.
        """
        self._fail(exception)
        self._take_up()

    @guarded
    def _fail(self, exception: BaseException) -> None:
        self._leave()
        self._lengthen()
        if self._feed is not None:
            self._feed.pause()
        run, steps = self._run, self._steps
        assert run is not None
        if steps is not None and not steps.superseded():
            made = steps.fail()
            if self._batches is not None:
                self._batches.fail(made)
        phase, run.phase = run.phase, "idle"
        size = self._batches.of_failed() if self._batches is not None and phase == "train" else None
        run.memory.sample()
        if not isinstance(exception, Exception):
            self._report()  # interrupted: no error, but over all the same
            return
        run.fail(with_model(describe(exception, phase, run.steps, run.memory.reading(), size), self._watched))

    def ended(self) -> None:
        """Note that a step found no data, where Keras does not know when an epoch is over, or was told wrongly."""
        self._in_vain = self._steps.under_way if self._steps is not None else None

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

    @guarded
    def _tell_late(self) -> None:
        """Take part in a run that ends before it has begun: with the run's end goes what ended it."""
        run = self._join()
        run.memory.sample()
        atexit.unregister(run.end)
        run.end()

    def _count_with(self, steps: Steps | None) -> None:
        """Count steps with these from now on, or none."""
        self._steps = steps
        if steps is not None:
            steps.take_notes()
            self._shorten()
        elif self._hook is not None:
            self._hook.rest()
            self._lengthen()

    def _shorten(self) -> None:
        """Have Keras find the hook's function in place of the method for each step.

        Half of what a step costs would be the way through that method. A hook of a subclass stays, and one that
        somebody else has put there: those call the method or the function, as far as they like.
        """
        assert self._hook is not None
        if type(self).on_train_batch_begin is _METHOD:
            self.__dict__.setdefault(_METHOD.__name__, self._hook.begin)

    def _lengthen(self) -> None:
        """Have it find the method again."""
        if self._hook is not None and self.__dict__.get(_METHOD.__name__) is self._hook.begin:
            del self.__dict__[_METHOD.__name__]

    def _watch(self, kind: Kind) -> None:
        assert self._functions is not None
        self._functions.watch(kind, self)

    def _leave(self, *kinds: Kind) -> None:
        assert self._functions is not None
        self._functions.leave(self, *kinds)

    def _enter(self, phase: Phase) -> None:
        assert self._run is not None
        self._run.phase = phase
        self._report()

    def _end(self) -> None:
        try:
            self._leave()
            self._lengthen()
            self._enter("idle")
        finally:
            self._take_up()

    def _report(self) -> None:
        assert self._run is not None
        self._run.report(monotonic())

    def _observe(self) -> None:
        assert self._run is not None
        now = monotonic()
        if now >= self._run.look_due:
            self._run.observe(now)

    def _look(self) -> None:
        self._take_up_abandoned()
        if self._functions is not None:
            self._functions.stay("train", self, self._feed)
        if self._batches is not None and self._run is not None:
            self._run.settle()  # so that examples and steps are of the same moment
            self._batches.look(self._run.batch or 0)

    def _answer(self) -> None:
        """Act between two steps, where nobody else has to be asked; meanwhile no step is under way."""
        if self._responder is None or self._run is None:
            return
        advice = self._responder.alone(self._run.told)
        if advice:
            self._run.stepping = False
            self._report()
            self._act(self._responder.wish, advice[-1])
            self._run.stepping = True
            self._report()

    def _act(self, wish: Wish, advice: Advice | None) -> None:
        """Do what the user wishes."""
        try:
            # Not the one that is watched: Keras gives this one its state back first, on JAX.
            done = fulfil(wish, advice, self.model, first=company.is_first())
        except BaseException as error:
            self.failed(error)
            raise
        if done and self._run is not None:
            self._run.actions[wish.action] += 1

    def _end_steps(self) -> None:
        steps = self._steps
        made = None if steps is None else steps.end_epoch(in_vain=steps.under_way == self._in_vain)
        if made is not None:
            assert self._batches is not None
            self._batches.look_at_end(made)
        if self._feed is not None:
            self._feed.pause()

    def _give_up(self) -> None:
        self._count_with(None)  # so the hook of each step, which asks no guard, does nothing any more
        if self._run is not None:
            self._run.give_up()


_METHOD = GpuWarden.on_train_batch_begin


def _tell_late() -> None:
    """Tell of a program that ends before a fit has begun: as the last callback made, or as one would by default."""
    latest = GpuWarden._latest() if GpuWarden._latest is not None else None  # noqa: SLF001 - the same module
    (latest or GpuWarden())._tell_late()  # noqa: SLF001 - likewise


unbegun.watch(_tell_late)


def _weakly(method: Callable[[], T]) -> Callable[[], T | None]:
    """Call a method as long as its object is there: the run keeps the last fit's steps, and must not keep its model."""
    reference = weakref.WeakMethod(method)

    def call() -> T | None:
        found = reference()
        return None if found is None else found()

    return call


def _feed(wait: InputWait, per_execution: int) -> Feed | None:
    """Choose who finds how long steps wait for their input; None where nobody can know."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TfData(wait, per_execution)
    return TimedNext(wait) if backend == "jax" and per_execution == 1 else None


def _version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "")

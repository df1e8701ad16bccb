"""Real training that is given advice, for test_keras_advice.py: `python keras_advice_cases.py FOLDER [CASE ...]`.

A process of its own for all cases of a backend. The daemon is a socket that a callback of the case speaks through, at
the begin of the step that it names.
"""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
from receiver import Receiver
from training_cases import find_cases, run_and_print

from gpuwarden.client import advice_state
from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.messages import Advice, AdviceKind, Level, Report

X = np.arange(240, dtype="float32").reshape(80, 3) / 100
Y = X.sum(axis=1, keepdims=True)
STEPS = 40  # an epoch


def pressure(level: Level, kind: AdviceKind = "pressure") -> Advice:
    return Advice(0, kind, level, "GPU-0", f"{kind} is {level}", "memory" if kind == "pressure" else None)


def model() -> Any:
    """Make the same small model each time."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    made.compile(optimizer="adam", loss="mse")
    return made


def fit(trained: Any, *callbacks: Any, **settings: Any) -> Any:
    given = {"batch_size": 2, "epochs": 1, "verbose": 0, "shuffle": False, **settings}
    return trained.fit(X, Y, callbacks=list(callbacks), **given)


class Daemon(Receiver):
    """A daemon's socket that sends advice before the named steps."""

    def callback(self, **settings: Any) -> GpuWarden:
        """Make a callback that reports here, in each step."""
        return GpuWarden(socket=self.path, **{"interval": 0, **settings})

    def make_adviser(self, at: dict[int, Any]) -> Any:
        """Make a callback, to be listed before the other, that has the run result this before these steps."""
        daemon = self

        class Adviser(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
            peer: Any = None
            step = 0

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
                self.peer = self.peer or daemon.accept()
                said = at.get(self.step, [])
                for each in said if isinstance(said, list) else [said]:
                    if isinstance(each, bytes):
                        self.peer.socket.send(each)
                    else:
                        self.peer.advise(each)
                self.step += 1

        return Adviser()

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports that the run has made."""
        waiting = [each for peer in self._peers or [self.accept()] for each in peer.waiting()]
        return [asdict(each) for each in waiting if isinstance(each, Report)]


class StepRecorder(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Counts the steps of a fit; to be listed before the others, notes the weights before one of them."""

    def __init__(self, before: int | None = None) -> None:
        super().__init__()
        self.before = before
        self.begun = 0
        self.weights: list[Any] = []
        self.ended = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if self.begun == self.before:
            self.weights = [each.tolist() for each in self.model.get_weights()]
        self.begun += 1

    def on_train_end(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.ended = True


def listen_in_each_step(callback: GpuWarden) -> Any:
    """Make a callback, to be listed before the other, that has it listen in each step."""

    class ListenInEachStep(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if callback._run is not None:
                callback._run.listen_due = 0.0

    return ListenInEachStep()


@contextmanager
def without_action_interval() -> Iterator[None]:
    """Let actions follow each other at once: the episodes of a case are milliseconds apart."""
    kept = advice_state.MIN_ACTION_INTERVAL_SECONDS, advice_state.MAX_ACTION_RATIO
    advice_state.MIN_ACTION_INTERVAL_SECONDS, advice_state.MAX_ACTION_RATIO = 0.0, math.inf
    try:
        yield
    finally:
        advice_state.MIN_ACTION_INTERVAL_SECONDS, advice_state.MAX_ACTION_RATIO = kept


def train(daemon: Daemon, at: dict[int, Any], *more: Any, note: int | None = None, **wish: Any) -> dict[str, Any]:
    """Fit an epoch in which the daemon sends this advice; return the results."""
    callback, steps, trained = daemon.callback(**wish), StepRecorder(note), model()
    history = fit(trained, steps, daemon.make_adviser(at), listen_in_each_step(callback), callback, *more).history
    last = daemon.reports()[-1]
    return {
        "steps": steps.begun,
        "noted": steps.weights,
        "ended": steps.ended,
        "epochs": len(history["loss"]),
        "final": [each.tolist() for each in trained.get_weights()],
        "actions": last["actions"],
        "received": last["advice_heard"],
        "stepping": last["stepping"],
        "counted": last["steps"],
    }


def case_nothing(daemon: Daemon) -> Any:
    at = {3: pressure("warning"), 5: pressure("critical"), 9: pressure("critical", "xid"), 12: pressure("none")}
    result = train(daemon, at)
    bare = model()
    fit(bare)
    return result | {"bare": [each.tolist() for each in bare.get_weights()]}


def case_checkpoint(daemon: Daemon) -> Any:
    path = Path(daemon.path + ".d") / "deeper" / "saved.keras"
    # The optimizer's too: a model that is saved goes on as if nothing had been.
    result = train(daemon, {5: pressure("critical")}, note=5, on_pressure="checkpoint", checkpoint_path=path)
    saved = keras.models.load_model(path)
    result["saved"] = [each.tolist() for each in saved.get_weights()]
    result["iterations"] = int(saved.optimizer.iterations)
    result["files"] = [each.name for each in path.parent.iterdir()]
    return result


def case_checkpoint_of_weights(daemon: Daemon) -> Any:
    path = Path(daemon.path + ".weights.h5")
    result = train(daemon, {5: pressure("critical")}, note=5, on_pressure="checkpoint", checkpoint_path=path)
    other = model()
    other.load_weights(path)
    return result | {"saved": [each.tolist() for each in other.get_weights()]}


def case_checkpoint_by_default(daemon: Daemon) -> Any:
    folder = Path(daemon.path + ".d")
    folder.mkdir()
    os.chdir(folder)
    at = {5: pressure("critical"), 7: pressure("none"), 9: pressure("critical")}
    with without_action_interval():
        result = train(daemon, at, on_pressure="checkpoint")
    return result | {"files": [each.name for each in folder.iterdir()]}


def case_flipping(daemon: Daemon) -> Any:
    at = {step: pressure("none" if step % 2 else "critical") for step in range(4, 29)}
    return train(daemon, at, on_pressure="checkpoint", checkpoint_path=Path(daemon.path + ".keras"))


def case_checkpoint_that_fails(daemon: Daemon) -> Any:
    path = Path(daemon.path) / "no folder" / "saved.keras"
    return train(daemon, {5: pressure("critical")}, on_pressure="checkpoint", checkpoint_path=path)


def case_checkpoint_of_a_lost_gpu(daemon: Daemon) -> Any:
    path = Path(daemon.path + ".keras")
    result = train(daemon, {5: pressure("critical", "gpu_lost")}, on_pressure="checkpoint", checkpoint_path=path)
    return result | {"saved": path.exists()}


def case_half_a_checkpoint(daemon: Daemon) -> Any:
    path = Path(daemon.path + ".keras")
    path.write_text("the one before")

    class Full(keras.layers.Dense):  # type: ignore[misc] # Keras ships no types
        def save_own_variables(self, store: Any) -> None:  # noqa: ARG002
            raise OSError("no space left")

    trained, callback = (
        keras.Sequential([keras.layers.Input((3,)), Full(1)]),
        daemon.callback(on_pressure="checkpoint", checkpoint_path=path),
    )
    trained.compile("sgd", "mse")
    steps = StepRecorder()
    fit(trained, steps, daemon.make_adviser({5: pressure("critical")}), listen_in_each_step(callback), callback)
    return {"steps": steps.begun, "kept": path.read_text(), "left": [x.name for x in path.parent.glob(f"*{path.name}")]}


def case_stop(daemon: Daemon) -> Any:
    result = train(daemon, {7: pressure("critical")}, on_pressure="stop")
    # The episode continues, and is answered: it does not stop a second fit, with any callback.
    callback, steps = daemon.callback(on_pressure="stop"), StepRecorder()
    fit(model(), steps, callback)
    return result | {"again": steps.begun}


def case_stop_early(daemon: Daemon) -> Any:
    return train(daemon, {7: pressure("warning")}, on_pressure="stop", pressure_level="warning")


def case_level_not_reached(daemon: Daemon) -> Any:
    return train(daemon, {7: pressure("warning")}, on_pressure="stop")


def case_over_before_it_is_received(daemon: Daemon) -> Any:
    return train(daemon, {7: [pressure("critical"), pressure("none")]}, on_pressure="stop")


def case_milder_before_it_is_received(daemon: Daemon) -> Any:
    return train(daemon, {7: [pressure("critical"), pressure("warning")]}, on_pressure="stop")


def record_calls(calls: list[Any]) -> Callable[[Advice | None, Any], None]:
    def call(advice: Advice | None, trained: Any) -> None:
        calls.append(
            {
                "text": advice and advice.text,
                "thread": threading.current_thread() is threading.main_thread(),
                "weights": [each.tolist() for each in trained.get_weights()],
            }
        )

    return call


def case_function(daemon: Daemon) -> Any:
    calls: list[Any] = []
    at = {5: pressure("critical"), 6: [pressure("warning"), pressure("critical")], 8: pressure("none"), 9: b"garbage"}
    at |= {11: pressure("critical"), 13: pressure("critical", "xid")}
    with without_action_interval():
        result = train(daemon, at, note=5, on_pressure=record_calls(calls))
    return result | {"calls": calls}


def case_function_that_raises(daemon: Daemon) -> Any:
    def broken(_advice: Any, _model: Any) -> None:
        raise ValueError("of the user's function")

    return train(daemon, {5: pressure("critical")}, on_pressure=broken)


def case_function_that_exits(daemon: Daemon) -> Any:
    def leave(_advice: Any, _model: Any) -> None:
        raise SystemExit(3)

    callback, steps = daemon.callback(on_pressure=leave), StepRecorder()
    try:
        fit(model(), steps, daemon.make_adviser({5: pressure("critical")}), listen_in_each_step(callback), callback)
    except SystemExit as error:
        last = daemon.reports()[-1]
        return {"code": error.code, "steps": steps.begun, "phase": last["phase"], "stepping": last["stepping"]}


def case_interrupted(daemon: Daemon) -> Any:
    """Make another callback end the fit in the step in which the advice arrives, and fit again."""

    class Interrupts(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 5:
                raise KeyboardInterrupt

    calls: list[Any] = []
    callback, steps = daemon.callback(on_pressure=record_calls(calls)), StepRecorder()
    try:
        fit(
            model(),
            daemon.make_adviser({5: pressure("critical")}),
            listen_in_each_step(callback),
            Interrupts(),
            callback,
        )
    except KeyboardInterrupt:
        before = len(calls)
    fit(model(), steps, callback)
    return {"before": before, "after": len(calls), "steps": steps.begun}


def case_several_fits(daemon: Daemon) -> Any:
    """Fit three times in one episode, each time with a new function."""
    calls: list[Any] = []
    says = daemon.make_adviser({5: pressure("critical")})
    for _ in range(3):
        callback = daemon.callback(on_pressure=record_calls(calls))
        fit(model(), says, listen_in_each_step(callback), callback)
    return len(calls)


def case_in_validation(daemon: Daemon) -> Any:
    """Advise in validation."""
    calls: list[Any] = []
    callback, steps = daemon.callback(on_pressure=record_calls(calls)), StepRecorder()
    seen: list[int] = []
    says = daemon.make_adviser({})

    class Validates(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 0 and not seen:
                seen.append(0)
                says.peer.advise(pressure("critical"))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            seen.append(len(calls))

    fit(model(), says, Validates(), listen_in_each_step(callback), callback, steps, epochs=2, validation_data=(X, Y))
    return {"seen": seen, "steps": steps.begun}


def case_in_a_job(daemon: Daemon) -> Any:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    calls: list[Any] = []
    try:
        return train(daemon, {5: pressure("critical")}, on_pressure=record_calls(calls)) | {"calls": calls}
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def case_other_framework(daemon: Daemon) -> Any:
    importlib.import_module("jax")
    train(daemon, {}, on_pressure="stop")
    return list(sys.modules["jax._src.xla_bridge"]._backends)


def case_mirrored(daemon: Daemon) -> Any:
    tf = importlib.import_module("tensorflow")
    path = Path(daemon.path + ".keras")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        trained = model()
    callback, steps = daemon.callback(on_pressure="checkpoint", checkpoint_path=path), StepRecorder(5)
    fit(trained, steps, daemon.make_adviser({5: pressure("critical")}), listen_in_each_step(callback), callback)
    saved = keras.models.load_model(path)
    return {
        "steps": steps.begun,
        "noted": steps.weights,
        "saved": [each.tolist() for each in saved.get_weights()],
        "actions": daemon.reports()[-1]["actions"],
    }


def generator_function(_advice: Any, _model: Any) -> Any:
    yield


async def async_function(_advice: Any, _model: Any) -> None: ...


class AsyncCallable:
    """Is called as a function, and waits."""

    async def __call__(self, _advice: Any, _model: Any) -> None: ...  # noqa: D102


def case_bad_arguments(daemon: Daemon) -> Any:
    refused = []
    for settings in (
        {"on_pressure": "save"},
        {"on_pressure": 1},
        {"on_pressure": lambda: None},
        {"on_pressure": generator_function},
        {"on_pressure": async_function},
        {"on_pressure": AsyncCallable()},
        {"on_pressure": "stop", "pressure_level": "none"},
        {"on_pressure": "stop", "checkpoint_path": "a.keras"},
        {"on_pressure": "checkpoint", "checkpoint_path": 7},
        {"on_pressure": "checkpoint", "checkpoint_path": "a.txt"},
    ):
        try:
            GpuWarden(**settings)
        except (TypeError, ValueError) as error:
            refused.append(str(error).partition(":")[0])
    return refused


if __name__ == "__main__":
    cases = find_cases(globals())
    first = "mirrored"  # TensorFlow's devices cannot be cut once they were used
    names = sys.argv[2:] or [first, *(name for name in cases if name != first)]
    run_and_print(
        {name: cases[name] for name in names if name != first or keras.backend.backend() == "tensorflow"}, Daemon
    )

"""Real training in 64 MiB, which the test sets: `oom_retry_cases.py FOLDER [CASE ...]` prints the results."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from memory_limited_model import (
    EXAMPLES,
    WIDTH,
    X,
    Y,
    dataset,
    describe_exception,
    have_same_values,
    make_two_optimizer_model,
    model,
)
from receiver import Receiver
from training_cases import find_cases, run_and_print

from gpuwarden.keras import GpuWarden, fit_with_oom_retry, keras


class HookRecorder(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Notes the hooks of a training that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.hooks.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.hooks.append(f"epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.hooks.append("end")


class GrowingCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Takes two thirds of the memory permanently when the second epoch starts."""

    held: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 1 and self.held is None:
            self.held = [tf.zeros((1 << 18,)) + 1 for _ in range(44)]  # of 1 MiB each


class RaiseInSecondEpoch(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Raises when the second epoch starts."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 1:
            raise self._error


def case_two_retries(folder: Path) -> Any:
    daemon, counts = Receiver(folder / "two.sock"), HookRecorder()
    trained = model()
    history = fit_with_oom_retry(
        trained,
        dataset,
        8192,
        epochs=2,
        verbose=0,
        callbacks=[counts, GpuWarden(socket=daemon.path, devices={"CPU:0": "GPU-1"})],
    )
    plain = model()
    expected = plain.fit(dataset(2048), epochs=2, verbose=0)
    reports = [each for each in daemon.accept().waiting() if type(each).__name__ == "Report"]
    last: Any = reports[-1]
    return {
        "losses": [history.history["loss"], expected.history["loss"]],
        "equal": have_same_values(trained, plain),
        "epochs": history.epoch,
        "sizes": history.batch_sizes,
        "retries": history.oom_retries,
        "returned": trained.history is history,
        "hooks": counts.hooks,
        "reported": [last.oom_retries, last.steps, dict(last.errors)],
    }


def case_later(_: Path) -> Any:
    grows, stopping = GrowingCallback(), keras.callbacks.EarlyStopping("loss", patience=5)
    trained = model()
    history = fit_with_oom_retry(trained, dataset, 1024, epochs=3, verbose=0, callbacks=[grows, stopping])
    grows.held = None
    plain = model()
    plain.fit(dataset(1024), epochs=1, verbose=0)
    rest = plain.fit(dataset(512), initial_epoch=1, epochs=3, verbose=0)
    return {
        "sizes": history.batch_sizes,
        "losses": [history.history["loss"][1:], rest.history["loss"]],
        "equal": have_same_values(trained, plain),
        "best": [stopping.best, min(history.history["loss"])],
    }


class ValidationCounter(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Counts the batches of validation."""

    batches = 0

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.batches += 1


def case_validation(_: Path) -> Any:
    trained = model()
    own = describe_exception(
        lambda: fit_with_oom_retry(trained, dataset, 1024, verbose=0, validation_data=dataset(EXAMPLES), epochs=1)
    )
    history = fit_with_oom_retry(
        trained, dataset, 1024, verbose=0, validation_data=lambda size: dataset(8 * size), epochs=1
    )
    counts, whole = ValidationCounter(), (X, Y)
    arrays = fit_with_oom_retry(
        model(),
        lambda _: whole,
        1024,
        epochs=1,
        verbose=0,
        callbacks=[counts],
        validation_data=whole,
        validation_batch_size=EXAMPLES,
    )
    return {
        "own": own,
        "sizes": [history.batch_sizes, arrays.batch_sizes],
        "logs": sorted(history.history),
        "batches": counts.batches,
    }


class OverAllocateAtStart(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Wants more than there is before the first epoch."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        tf.zeros((20000, WIDTH))


def case_before_the_first_epoch(_: Path) -> Any:
    trained = model()
    before = trained.get_weights()
    seen = describe_exception(
        lambda: fit_with_oom_retry(trained, dataset, 64, callbacks=[OverAllocateAtStart()], verbose=0)
    )
    return {**seen, "same": all(map(np.array_equal, trained.get_weights(), before))}


class OwnLossLayer(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Has a loss of its own, so that training wants no y."""

    def call(self, x: Any) -> Any:  # noqa: D102
        self.add_loss(keras.ops.mean(x))
        return x


def case_without_y(_: Path) -> Any:
    def steps(x: Any) -> Any:
        inputs = {"a": keras.layers.Input((3,), name="a")} if isinstance(x, dict) else keras.layers.Input((3,))
        made = keras.Model(
            inputs, OwnLossLayer()(keras.layers.Dense(1)(inputs["a"] if isinstance(x, dict) else inputs))
        )
        made.compile("sgd")
        fit_with_oom_retry(made, lambda _: x, 4096, verbose=0)
        return int(made.optimizer.iterations)

    return {"array": steps(X), "dict": steps({"a": X}), "tuple": steps((X,))}


def case_validated(_: Path) -> Any:
    def batches(make: Callable[[int], Any], **given: Any) -> list[int]:
        counts = ValidationCounter()
        history = fit_with_oom_retry(model(), make, 4096, epochs=1, verbose=0, callbacks=[counts], **given)
        return [history.batch_sizes[0], counts.batches]

    some = X[:2048], Y[:2048]
    return {
        "arrays": batches(lambda _: (X, Y), validation_data=some),
        "part": batches(lambda _: (X, Y), validation_split=0.25, validation_batch_size=512),
        "steps": batches(dataset, validation_data=some, validation_batch_size=512, validation_steps=2),
    }


def case_exhausted(_: Path) -> Any:
    asked: list[int] = []

    def ignore_size(size: int) -> Any:
        asked.append(size)
        return dataset(EXAMPLES)

    last = describe_exception(lambda: fit_with_oom_retry(model(), ignore_size, 8, verbose=0, tries=2))
    smallest = describe_exception(lambda: fit_with_oom_retry(model(), dataset, 4096, verbose=0, smallest=4096))
    return {"asked": asked, "last": last, "smallest": smallest}


def case_other_errors(_: Path) -> Any:
    def fails(error: BaseException) -> dict[str, Any]:
        counts = HookRecorder()
        seen = describe_exception(
            lambda: fit_with_oom_retry(
                model(), dataset, 1024, epochs=2, verbose=0, callbacks=[counts, RaiseInSecondEpoch(error)]
            )
        )
        return {**seen, "hooks": counts.hooks}

    def broken(_: int) -> Any:
        raise LookupError("no such data")

    handling = KeyError("of a handler")
    handling.__context__ = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")
    keras.config.disable_traceback_filtering()  # which would cut it off
    try:
        handled = fails(handling)
    finally:
        keras.config.enable_traceback_filtering()
    return {
        "handling": handled,
        "error": fails(ValueError("from a callback")),
        "interrupt": fails(KeyboardInterrupt()),
        "host": fails(MemoryError("of the host")),
        "dataset": describe_exception(lambda: fit_with_oom_retry(model(), broken, 8)),
        "fixed": describe_exception(
            lambda: fit_with_oom_retry(model(), lambda _: dataset(64).take(9).rebatch(32, True), 64)
        ),
        "list": describe_exception(lambda: fit_with_oom_retry(model(), lambda _: [X, Y], 64)),
        "nothing": describe_exception(lambda: fit_with_oom_retry(model(), lambda _: None, 64)),
    }


class OutOfMemoryOnce(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Runs out of memory once, in one hook of an epoch: in TensorFlow's words, without the 10 s that it waits first."""

    def __init__(self, epoch: int, hook: str) -> None:
        super().__init__()
        self._epoch, self._hook = epoch, hook

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if batch == 1:
            self._run_out("batch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._run_out("epoch")

    def on_train_end(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._run_out("train")

    def _run_out(self, hook: str) -> None:
        if (self._now, self._hook) == (self._epoch, hook):
            self._hook = ""
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")


def make_scaled_optimizer() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1))


def case_second_optimizer(_: Path) -> Any:
    """Run out of memory in the first epoch, before which the second optimizer had no variables, and later."""
    outcomes = {}
    for name, epoch, sizes in (
        ("first epoch", 0, [512, 512]),
        ("later", 1, [1024, 512]),
        ("scales the loss", 0, [512, 512]),
    ):
        trained, plain = (
            make_two_optimizer_model(make_scaled_optimizer() if name == "scales the loss" else None) for _ in range(2)
        )
        history = fit_with_oom_retry(
            trained, dataset, 1024, epochs=2, verbose=0, callbacks=[OutOfMemoryOnce(epoch, "batch")]
        )
        for begun, size in enumerate(sizes):
            plain.fit(dataset(size), initial_epoch=begun, epochs=begun + 1, verbose=0)
        one, other = ([np.asarray(each) for each in of.other.variables] for of in (trained, plain))
        outcomes[name] = {
            "sizes": list(history.batch_sizes.values()),
            "weights": all(map(np.allclose, trained.get_weights(), plain.get_weights())),
            "second": len(one) == len(other) > 2 and all(map(np.allclose, one, other)),
        }
    return outcomes


class BreakRestore(OutOfMemoryOnce):
    """Runs out of memory, and leaves a model that cannot be restored."""

    def _run_out(self, hook: str) -> None:
        def fails() -> None:
            raise LookupError("nothing there")

        self.model.reset_metrics = fails
        super()._run_out(hook)


def case_unrestorable(_: Path) -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return describe_exception(
        lambda: fit_with_oom_retry(made, dataset, 1024, verbose=0, callbacks=[BreakRestore(0, "batch")])
    )


def case_of_a_callback(_: Path) -> Any:
    outcomes = {}
    for hook in ("epoch", "train"):
        counts = HookRecorder()
        seen = describe_exception(
            lambda: fit_with_oom_retry(
                model(),
                dataset,
                1024,
                epochs=2,
                verbose=0,
                callbacks=[counts, OutOfMemoryOnce(1, hook)],  # noqa: B023 - called here
            )
        )
        outcomes[hook] = {**seen, "hooks": counts.hooks}
    return outcomes


def case_arguments(_: Path) -> Any:
    def wrong(**changed: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"model": model(), "make_dataset": dataset, "batch_size": 8, "verbose": 0, **changed}
        return describe_exception(lambda: fit_with_oom_retry(**given))

    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "2"
    try:
        workers = wrong()
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    uncompiled = keras.Sequential([keras.layers.Dense(1)])
    backup = keras.callbacks.BackupAndRestore("/nowhere")
    return {
        "workers": workers,
        "batch_size": wrong(batch_size=0),
        "tries": wrong(tries=1.5),
        "smallest": wrong(smallest=16),
        "make_dataset": wrong(make_dataset=dataset(8)),
        "callbacks": wrong(callbacks=backup),
        "x": wrong(x=X),
        "model": wrong(model="a model"),
        "uncompiled": wrong(model=uncompiled),
        "unbuilt": wrong(model=unbuilt),
        "schedule": wrong(model=model(keras.optimizers.Adam(schedule))),
        "second_schedule": wrong(model=make_two_optimizer_model(keras.optimizers.SGD(schedule))),
        "scaled_schedule": wrong(model=model(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(schedule)))),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Keras's of shuffle
    gc.freeze()  # what is imported stays: collecting need not look at it
    cases = find_cases(globals())
    run_and_print({name: cases[name] for name in sys.argv[2:] or cases}, lambda path: path.parent)

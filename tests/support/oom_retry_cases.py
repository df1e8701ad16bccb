"""Real training under memory limits: `oom_retry_cases.py FOLDER [CASE ...]` prints the results.

A process of its own, with the allocator of a GPU in place of the CPU's: 64 MiB, in which the model trains with batches
of 2048 and not of 4096.
"""

# ruff: noqa: D103 - the tests say what each case shows; the environment comes before the imports it is for

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {  # before TensorFlow is imported; with oneDNN this allocator's out-of-memory is a crash
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import numpy as np
import tensorflow as tf
from receiver import Receiver
from training_cases import cases_in, serve

from gpuwarden.keras import GpuWarden, find_batch_size, fit_with_oom_retry, keras

WIDTH = 2000
EXAMPLES = 8192
X = np.random.default_rng(0).random((EXAMPLES, 3), "float32")
Y = X.sum(axis=1, keepdims=True)


def model(optimizer: Any = "adam", *, dropout: float = 0.1, **compiling: Any) -> Any:
    """Make the same model each time, once memory that earlier ones hold is free: TensorFlow would wait 10 s for it."""
    gc.collect()
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dropout(dropout, seed=2),
            keras.layers.Dense(1),
        ]
    )
    made.compile(optimizer=optimizer, loss="mse", **compiling)
    return made


def dataset(size: int) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def batch(size: int) -> tuple[Any, Any]:
    return X[:size], Y[:size]


def used() -> int:
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def values(trained: Any) -> list[Any]:
    """Return the value of each variable."""
    return [np.asarray(each).tolist() for each in (*trained.variables, *trained.optimizer.variables)]


def alike(one: Any, other: Any) -> bool:
    """Return whether two models have the same values, except for the order of sums."""
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(values(one), values(other), strict=True))


def raised(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the exception that a call raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - an interrupt too
        return {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
    return {"type": None}


class Counts(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
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


class Grows(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Takes two thirds of the memory permanently when the second epoch starts."""

    held: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 1 and self.held is None:
            self.held = [tf.zeros((1 << 18,)) + 1 for _ in range(44)]  # of 1 MiB each


class Raises(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Raises when the second epoch starts."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 1:
            raise self._error


def case_two_retries(folder: Path) -> Any:
    daemon, counts = Receiver(folder / "two.sock"), Counts()
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
        "alike": alike(trained, plain),
        "epochs": history.epoch,
        "sizes": history.batch_sizes,
        "retries": history.oom_retries,
        "returned": trained.history is history,
        "hooks": counts.hooks,
        "reported": [last.oom_retries, last.steps, dict(last.errors)],
    }


def case_later(folder: Path) -> Any:
    grows, stopping = Grows(), keras.callbacks.EarlyStopping("loss", patience=5)
    trained = model()
    path = folder / "kept.weights.h5"
    history = fit_with_oom_retry(
        trained, dataset, 1024, epochs=3, verbose=0, callbacks=[grows, stopping], checkpoint=path
    )
    grows.held = None
    plain = model()
    plain.fit(dataset(1024), epochs=1, verbose=0)
    rest = plain.fit(dataset(512), initial_epoch=1, epochs=3, verbose=0)
    return {
        "sizes": history.batch_sizes,
        "losses": [history.history["loss"][1:], rest.history["loss"]],
        "alike": alike(trained, plain),
        "best": [stopping.best, min(history.history["loss"])],
        "kept": path.exists(),
    }


def case_effective(_: Path) -> Any:
    trained, plain = model("adam", dropout=0.0), model("adam", dropout=0.0)
    history = fit_with_oom_retry(trained, dataset, 4096, epochs=2, verbose=0, keep_effective_batch=True)
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    plain.compile(optimizer, loss="mse")
    plain.fit(dataset(2048), epochs=2, verbose=0)
    # Keras has the accumulators before the moments, here they come after.
    moments = [np.asarray(each) for each in trained.optimizer._momentums]
    expected = [np.asarray(each) for each in optimizer._momentums]
    return {
        "sizes": history.batch_sizes,
        "updates": [int(trained.optimizer.iterations), int(optimizer.iterations)],
        "weights": all(
            np.allclose(a, b, rtol=1e-4, atol=1e-6)
            for a, b in zip(trained.get_weights(), plain.get_weights(), strict=True)
        ),
        "moments": all(np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(moments, expected, strict=True)),
    }


def case_validation(_: Path) -> Any:
    trained = model()
    own = raised(
        lambda: fit_with_oom_retry(trained, dataset, 1024, verbose=0, validation_data=dataset(EXAMPLES), epochs=1)
    )
    history = fit_with_oom_retry(
        trained, dataset, 1024, verbose=0, validation_data=lambda size: dataset(8 * size), epochs=1
    )
    return {"own": own, "sizes": history.batch_sizes, "logs": sorted(history.history)}


class Begins(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Wants more than there is before the first epoch."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        tf.zeros((20000, WIDTH))


def case_before_the_first_epoch(folder: Path) -> Any:
    trained, file = model(), folder / "of_another.weights.h5"
    trained.optimizer.build(trained.trainable_variables)
    before = trained.get_weights()
    trained.set_weights([each + 1 for each in before])
    trained.save_weights(file)
    trained.set_weights(before)
    seen = raised(lambda: fit_with_oom_retry(trained, dataset, 64, checkpoint=file, callbacks=[Begins()], verbose=0))
    return {**seen, "same": all(map(np.array_equal, trained.get_weights(), before))}


class Unwritable(keras.layers.Dense):  # type: ignore[misc] # Keras ships no types
    """Cannot be saved after the first time."""

    saved = 0

    def save_own_variables(self, store: Any) -> None:  # noqa: D102
        self.saved += 1
        if self.saved > 1:
            raise OSError("the disk is gone")
        super().save_own_variables(store)


def case_half_written(folder: Path) -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), Unwritable(1)])
    made.compile("adam", "mse")
    before, file = made.get_weights(), folder / "deeper" / "kept.weights.h5"
    seen = raised(lambda: fit_with_oom_retry(made, dataset, 1024, epochs=3, checkpoint=file, verbose=0))
    moved = not all(map(np.array_equal, made.get_weights(), before))
    made.load_weights(file)
    return {
        **seen,
        "moved": moved,
        "same": all(map(np.array_equal, made.get_weights(), before)),
        "files": [each.name for each in file.parent.iterdir()],
    }


class Own(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Has a loss of its own, so that training wants no y."""

    def call(self, x: Any) -> Any:  # noqa: D102
        self.add_loss(keras.ops.mean(x))
        return x


def case_without_y(_: Path) -> Any:
    def steps(x: Any) -> Any:
        inputs = {"a": keras.layers.Input((3,), name="a")} if isinstance(x, dict) else keras.layers.Input((3,))
        made = keras.Model(inputs, Own()(keras.layers.Dense(1)(inputs["a"] if isinstance(x, dict) else inputs)))
        made.compile("sgd")
        fit_with_oom_retry(made, lambda _: x, 4096, verbose=0)
        return int(made.optimizer.iterations)

    return {"array": steps(X), "dict": steps({"a": X}), "tuple": steps((X,))}


class Validates(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Counts the batches of validation."""

    batches = 0

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.batches += 1


def case_validated(_: Path) -> Any:
    def batches(make: Callable[[int], Any], **given: Any) -> list[int]:
        counts = Validates()
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

    def blind(size: int) -> Any:
        asked.append(size)
        return dataset(EXAMPLES)

    last = raised(lambda: fit_with_oom_retry(model(), blind, 8, verbose=0, tries=2))
    smallest = raised(lambda: fit_with_oom_retry(model(), dataset, 4096, verbose=0, smallest=4096))
    return {"asked": asked, "last": last, "smallest": smallest}


def case_other_errors(_: Path) -> Any:
    def fails(error: BaseException) -> dict[str, Any]:
        counts = Counts()
        seen = raised(
            lambda: fit_with_oom_retry(model(), dataset, 1024, epochs=2, verbose=0, callbacks=[counts, Raises(error)])
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
        "dataset": raised(lambda: fit_with_oom_retry(model(), broken, 8)),
        "fixed": raised(lambda: fit_with_oom_retry(model(), lambda _: dataset(64).take(9).rebatch(32, True), 64)),
        "list": raised(lambda: fit_with_oom_retry(model(), lambda _: [X, Y], 64)),
        "nothing": raised(lambda: fit_with_oom_retry(model(), lambda _: None, 64)),
    }


class Runs(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Runs out of memory once, in one hook of an epoch: in TensorFlow's words, without the 10 s that it waits first."""

    def __init__(self, epoch: int, hook: str) -> None:
        super().__init__()
        self._epoch, self._hook = epoch, hook

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if batch == 1:
            self._out("batch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._out("epoch")

    def on_train_end(self, logs: Any = None) -> None:  # noqa: D102, ARG002
        self._out("train")

    def _out(self, hook: str) -> None:
        if (self._now, self._hook) == (self._epoch, hook):
            self._hook = ""
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")


class Pair(keras.Model):  # type: ignore[misc] # Keras ships no types
    """Trains two layers, each with an optimizer of its own; the second is built by its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))
        self.build((None, 3))

    def build(self, shape: Any) -> None:  # noqa: D102 - Keras's
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def compile(self, first: Any, second: Any) -> None:  # noqa: D102 - Keras's
        super().compile(optimizer=first)
        self.other = second

    def train_step(self, data: Any) -> Any:  # noqa: D102 - Keras's
        x, y = data
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def pair(second: Any = None, of: Callable[[], Any] = Pair) -> Any:
    made = of()
    made.compile("adam", second or keras.optimizers.Adagrad(0.1))  # whose variables do not begin with zeros
    return made


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1))


def case_second_optimizer(_: Path) -> Any:
    """Run out of memory in the first epoch, before which the second optimizer had no variables, and later."""
    outcomes = {}
    for name, epoch, sizes in (
        ("first epoch", 0, [512, 512]),
        ("later", 1, [1024, 512]),
        ("scales the loss", 0, [512, 512]),
    ):
        trained, plain = (pair(scaled() if name == "scales the loss" else None) for _ in range(2))
        history = fit_with_oom_retry(trained, dataset, 1024, epochs=2, verbose=0, callbacks=[Runs(epoch, "batch")])
        for begun, size in enumerate(sizes):
            plain.fit(dataset(size), initial_epoch=begun, epochs=begun + 1, verbose=0)
        one, other = ([np.asarray(each) for each in of.other.variables] for of in (trained, plain))
        outcomes[name] = {
            "sizes": list(history.batch_sizes.values()),
            "weights": all(map(np.allclose, trained.get_weights(), plain.get_weights())),
            "second": len(one) == len(other) > 2 and all(map(np.allclose, one, other)),
        }
    return outcomes


class Breaks(Runs):
    """Runs out of memory, and leaves a model that cannot be restored."""

    def _out(self, hook: str) -> None:
        def fails() -> None:
            raise LookupError("nothing there")

        self.model.reset_metrics = fails
        super()._out(hook)


def case_unrestorable(_: Path) -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return raised(lambda: fit_with_oom_retry(made, dataset, 1024, verbose=0, callbacks=[Breaks(0, "batch")]))


def case_of_a_callback(_: Path) -> Any:
    outcomes = {}
    for hook in ("epoch", "train"):
        counts = Counts()
        seen = raised(
            lambda: fit_with_oom_retry(
                model(),
                dataset,
                1024,
                epochs=2,
                verbose=0,
                callbacks=[counts, Runs(1, hook)],  # noqa: B023 - called here
            )
        )
        outcomes[hook] = {**seen, "hooks": counts.hooks}
    return outcomes


class Unsavable(keras.layers.Dense):  # type: ignore[misc] # Keras ships no types
    """Runs out of memory when it is saved a second time."""

    saved = 0

    def save_own_variables(self, store: Any) -> None:  # noqa: D102
        self.saved += 1
        if self.saved == 2:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")
        super().save_own_variables(store)


def case_of_the_checkpoint(folder: Path) -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), Unsavable(1)])
    made.compile("adam", "mse")
    counts, file = Counts(), folder / "second.weights.h5"
    seen = raised(
        lambda: fit_with_oom_retry(made, dataset, 1024, epochs=3, verbose=0, callbacks=[counts], checkpoint=file)
    )
    return {**seen, "hooks": counts.hooks}


def case_arguments(_: Path) -> Any:
    def wrong(**changed: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"model": model(), "make_dataset": dataset, "batch_size": 8, "verbose": 0, **changed}
        return raised(lambda: fit_with_oom_retry(**given))

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
        "checkpoint": wrong(checkpoint="file.h5"),
        "callbacks": wrong(callbacks=backup),
        "x": wrong(x=X),
        "model": wrong(model="a model"),
        "uncompiled": wrong(model=uncompiled),
        "unbuilt": wrong(model=unbuilt),
        "schedule": wrong(model=model(keras.optimizers.Adam(schedule))),
        "second_schedule": wrong(model=pair(keras.optimizers.SGD(schedule))),
        "scaled_schedule": wrong(model=model(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(schedule)))),
        "average": wrong(model=model(keras.optimizers.Adam(use_ema=True)), keep_effective_batch=True),
    }


def state(of: Any) -> list[Any]:
    """Return everything that training changes in a model."""
    return [
        [np.asarray(each).tolist() for each in (*of.variables, *of.optimizer.variables, *of.metrics_variables)],
        id(of.optimizer),
        of.optimizer.built,
        sorted(vars(of.optimizer)),
        id(of.train_function),
        of.stop_training,
        id(getattr(of, "history", None)),
        hasattr(of, "history"),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),  # noqa: NPY002 - the seeds of programs
    ]


def case_found(_: Path) -> Any:
    """Search with a model that is new, and with one that has trained."""
    outcomes: dict[str, Any] = {}
    for name in ("new", "trained"):
        searched = model()
        if name == "trained":
            searched.fit(dataset(64).take(3), verbose=0)
        before, held = state(searched), used()
        size = find_batch_size(searched, batch, smallest=1024, largest=4096)
        after = state(searched)
        outcomes[name] = {
            "size": size,
            "restored": [one == other for one, other in zip(before, after, strict=True)],
            "held": used() - held,
        }
        if name == "new":  # the search has no part in what comes after it
            plain = model()
            searched.fit(dataset(1024), epochs=1, verbose=0)
            plain.fit(dataset(1024), epochs=1, verbose=0)
            outcomes["alike"] = alike(searched, plain)
    return outcomes


def case_cut(_: Path) -> Any:
    """Arrays bound the size by their length."""
    return find_batch_size(model(), (X[:48], Y[:48]), smallest=16, margin=np.float32(0.1))


def case_structures(_: Path) -> Any:
    """Search with the parts of a batch in all the ways that fit takes them."""
    names = {"a": keras.layers.Input((3,), name="a"), "b": keras.layers.Input((3,), name="b")}
    joined = keras.layers.Concatenate()(list(names.values()))
    outputs = {name: keras.layers.Dense(1, name=name)(joined) for name in ("c", "d")}
    two = keras.Model(list(names.values()), list(outputs.values()))
    two.compile("adam", ["mse", "mse"])
    named = keras.Model(names, outputs)
    named.compile("adam", dict.fromkeys(outputs, "mse"))
    weights = np.ones(len(X), "float32")

    def found(made: Any, *data: Any) -> list[int]:
        def cut(size: int) -> Any:
            return keras.tree.map_structure(lambda each: None if each is None else each[:size], data)

        return [find_batch_size(made, each, largest=3) for each in (data, cut)]

    return {
        "no_weights": found(model(), X, Y, None),
        "lists": found(two, [X, X], [Y, Y]),
        "lists_no_weights": found(two, [X, X], [Y, Y], None),
        "tuples": found(two, (X, X), (Y, Y)),
        "weights": found(two, [X, X], [Y, Y], [weights, weights]),
        "one_weight": found(two, [X, X], [Y, Y], [weights, None]),
        "dicts": found(named, {"a": X, "b": X}, {"c": Y, "d": Y}),
    }


def case_several_steps(_: Path) -> Any:
    return find_batch_size(model(steps_per_execution=4), batch, smallest=16, largest=32)


def case_own_functions(_: Path) -> Any:
    """Search with a layer that calls a function of the program's own, and differentiate that afterwards."""

    @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow ships no types
    def threefold(x: Any) -> Any:
        return 2.0 * x, lambda gradient: 3.0 * gradient

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def helper(x: Any) -> Any:
        return tf.nn.silu(x) + tf.cond(tf.reduce_sum(x) > 0.0, lambda: threefold(x), lambda: x)

    class Calls(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
        def call(self, x: Any) -> Any:
            return helper(tf.nn.silu(x))

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    def gradient() -> Any:
        of = tf.ones((16, 3))
        with tf.GradientTape() as tape:
            tape.watch(of)
            total = tf.reduce_sum(helper(of))
        return tape.gradient(total, of)[0, 0]

    registry = importlib.import_module("tensorflow.python.framework.ops").gradient_registry
    before = set(registry.list())
    searched = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3), Calls()])
    searched.compile("adam", "mse")
    find_batch_size(searched, lambda size: (X[:size], X[:size]), smallest=8, largest=16)
    left = [each for each in set(registry.list()) - before if each.startswith("CustomGradient-")]
    return {
        "eager": float(gradient()),
        "traced": float(tf.function(gradient)()),
        "traces": helper.experimental_get_tracing_count(),
        "left": len(left),
    }


class Noise(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Draws from Keras' generator of all that have no seed."""

    def call(self, x: Any) -> Any:  # noqa: D102 - Keras's
        return x + keras.random.normal(keras.ops.shape(x))


def noisy() -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), Noise(), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile("sgd", "mse")
    return made


def case_seeds(_: Path) -> Any:
    """Train after a search, which runs before anything is drawn and again later, and without one."""

    def losses(*, search: bool) -> list[float]:
        keras.utils.set_random_seed(5)
        trained, losses = noisy(), []
        for _ in range(2):
            if search:
                find_batch_size(trained, batch, smallest=8, largest=16)
            losses += trained.fit(X, Y, batch_size=1024, shuffle=False, verbose=0).history["loss"]
        return losses

    return [losses(search=True), losses(search=False)]


class TracedPair(Pair):
    """Has a step that is a TensorFlow function itself: its traces from a search stay in use."""

    train_step = tf.function(Pair.train_step)


def case_two_optimizers(_: Path) -> Any:
    """Search with a second optimizer that is not built, has trained, or trains in a traced step."""
    outcomes = {}
    for name in ("new", "trained", "traced"):
        searched, plain = (pair(of=TracedPair if name == "traced" else Pair) for _ in range(2))
        second = searched.other
        for each in (searched, plain):
            if name == "trained":
                each.fit(X, Y, verbose=0, batch_size=1024, shuffle=False)
            if name == "traced":
                each.optimizer.build(each.first.trainable_variables)
        find_batch_size(searched, batch, smallest=8, largest=16)
        outcomes[name] = searched.other is second
        for each in (searched, plain):
            each.fit(X, Y, verbose=0, batch_size=1024, shuffle=False)
        one, other = ([*of.get_weights(), *map(np.asarray, of.other.variables)] for of in (searched, plain))
        outcomes[name] &= len(one) == len(other) > 6 and all(map(np.allclose, one, other))
    return outcomes


class Unbuildable(keras.optimizers.SGD):  # type: ignore[misc] # Keras ships no types
    """Finds no room for its variables, in TensorFlow's words."""

    def build(self, variables: Any) -> None:  # noqa: ARG002, D102 - Keras's
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")


def case_search_fails(_: Path) -> Any:
    class Fails(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
        def call(self, x: Any) -> Any:
            if x.shape[0] == 32:
                raise LookupError("from a layer")
            return x

    broken = keras.Sequential([keras.layers.Input((3,)), Fails(), keras.layers.Dense(1)])
    broken.compile("sgd", "mse", run_eagerly=True)
    before = state(broken)
    error = raised(lambda: find_batch_size(broken, batch, smallest=8))
    restored = [one == other for one, other in zip(before, state(broken), strict=True)]
    own = Unbuildable()
    searched = model(own)
    no_room = raised(lambda: find_batch_size(searched, batch, smallest=8))
    no_room["restored"] = searched.optimizer is own
    searched = model()
    whole = state(searched)
    too_big = raised(lambda: find_batch_size(searched, batch, smallest=8192))
    return {
        "error": error,
        "restored": restored,
        "no_room": no_room,
        "too_big": too_big,
        "restored_too": whole == state(searched),
    }


class Layered(keras.Model):  # type: ignore[misc] # Keras ships no types
    """A model without its own build(), which Keras marks as built when its build() is called."""

    def __init__(self) -> None:
        super().__init__()
        self.only = keras.layers.Dense(1, name="only")

    def call(self, x: Any) -> Any:  # noqa: D102
        return self.only(x)


def case_search_arguments(_: Path) -> Any:
    def wrong(data: Any = batch, of: Any = None, **settings: Any) -> dict[str, Any]:
        return raised(lambda: find_batch_size(of or model(), data, **settings))

    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    marked = Layered()
    marked.build((None, 3))
    marked.compile("sgd", "mse")
    return {
        "dataset": wrong(dataset(8)),
        "batched": wrong(lambda _: batch(32)),
        "lengths": wrong((X, Y[:9])),
        "no_batch": wrong(lambda _: X),
        "no_parts": wrong((None,)),
        "four_parts": wrong(lambda size: (X[:size],) * 4),
        "numbers": wrong((X.tolist(), Y.tolist())),
        "a_batch_of_numbers": wrong(lambda size: (X[:size].tolist(), Y[:size])),
        "margin": wrong(margin=1),
        "margin_of_numpy": wrong(margin=np.float32(1)),
        "largest": wrong(smallest=8, largest=4),
        "unbuilt": wrong(of=unbuilt),
        "marked": wrong(of=marked),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Keras's of shuffle
    gc.freeze()  # what is imported stays: collecting need not look at it
    cases = cases_in(globals())
    serve({name: cases[name] for name in sys.argv[2:] or cases}, lambda path: path.parent)

"""Real training for test_keras.py: `python keras_cases.py FOLDER [CASE ...]` prints the results.

A process of its own, since the allocator is chosen before TensorFlow is imported, and since the client reports a
process. Each case trains against a daemon's socket of its own and returns its result in JSON types.
"""

# ruff: noqa: D103, E402 - the tests say what each case shows; the environment comes before the imports it is for

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

os.environ |= {  # before TensorFlow is imported; with oneDNN this allocator's out-of-memory is a crash
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

from receiver import Receiver
from training_cases import cases_in, serve

from gpuwarden import watch
from gpuwarden.client.frameworks.tensorflow import list_physical_devices
from gpuwarden.client.keras.fit import fit_meters, step_counter
from gpuwarden.client.keras.fit.function_patch import unwrap
from gpuwarden.client.keras.model_memory import add_model_memory
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.messages import Allocation, Error, Hello, Report

IMPORTED = sorted(name for name in sys.modules if name.startswith(("gpuwarden", "pynvml")))

import numpy as np
import tensorflow as tf

GPU = "GPU-0e2a6d51"
CPU = {"CPU:0": GPU}
BATCHES = 4

# A callback made before TensorFlow's devices: cutting the CPU in two fails if that has created them.
EARLY = GpuWarden(devices=CPU)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


class Daemon(Receiver):
    """A daemon's socket that records the messages of a case's callbacks."""

    def callback(self, **settings: Any) -> GpuWarden:
        """Make a callback that reports here."""
        return GpuWarden(socket=self.path, devices=CPU, **settings)

    def received(self) -> list[dict[str, Any]]:
        """Return all messages of the one connection, each with its type."""
        self.accept()
        return self.more()

    def more(self) -> list[dict[str, Any]]:
        """Return the later messages of the same connection."""
        return [{"type": type(each).__name__} | asdict(each) for each in self._peers[-1].waiting()]


def model(optimizer: str = "sgd", **compiling: Any) -> Any:
    """Make the same small model each time; with Adam, which few cases want, compiling takes three times as long."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile(optimizer=optimizer, loss="mse", **compiling)
    return made


def data(batches: int = BATCHES) -> tuple[Any, Any]:
    """Make data of a known length for batches of 2."""
    x = np.arange(batches * 6, dtype="float32").reshape(-1, 3) / 10
    return x, x.sum(axis=1, keepdims=True)


def stream() -> Any:
    """Make the same data with a length that Keras cannot know."""

    def batches() -> Iterator[tuple[Any, Any]]:
        x, y = data()
        for start in range(0, len(x), 2):
            yield x[start : start + 2], y[start : start + 2]

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def fit(trained: Any, *callbacks: Any, epochs: int = 2, **settings: Any) -> Any:
    """Fit quietly on data of a known length."""
    return trained.fit(*data(), batch_size=2, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks, **settings)


def fit_stream(trained: Any, *callbacks: Any, **settings: Any) -> Any:
    """Fit quietly on data of an unknown length."""
    return trained.fit(stream(), epochs=2, verbose=0, callbacks=callbacks, **settings)


class Witness(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Reads TensorFlow's memory in the hooks in which a GpuWarden before it in the list reports."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.seen.append(tf.config.experimental.get_memory_info("CPU:0"))


class Sight(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Records which of the model's functions are wrapped, each time that one is about to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def look(self, *_: Any, **__: Any) -> None:
        """Record the names."""
        self.seen.append(watched(self.model))

    on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = on_train_end = look


class Remake(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Makes the train function again in the third epoch, before GpuWarden's hook."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 2:
            self.model.make_train_function(force=True)


class Kept(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Saves, copies and pickles the model in the middle of its fit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.copies: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.model.save(self.folder / f"{epoch}.keras")
        self.copies = [keras.models.load_model(self.folder / f"{epoch}.keras"), copy.deepcopy(self.model)]


class Stop(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Asks a fit to stop at the end of its third batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.model.stop_training = batch == 2


class Raising(keras.Model):  # type: ignore[misc] # Keras ships no types
    """A model whose steps raise, each while it holds a tensor."""

    def __init__(self, *errors: BaseException | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.dense = keras.layers.Dense(1)
        self.errors = list(errors)
        self.held: list[weakref.ref[Any]] = []

    def call(self, x: Any) -> Any:  # noqa: D102
        return self.dense(x)

    def train_step(self, batch: Any) -> Any:  # noqa: D102
        tensor = tf.zeros((1000, 1000)) + 1
        self.held.append(weakref.ref(tensor))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return super().train_step(batch)

    def test_step(self, batch: Any) -> Any:  # noqa: D102
        if self.errors:
            raise self.errors.pop(0) or ValueError
        return super().test_step(batch)


class Fail(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Raises in a hook: at the second batch, or at the second epoch's end."""

    def __init__(self, hook: str = "on_train_batch_begin") -> None:
        super().__init__()
        setattr(self, hook, self.fail)

    def fail(self, index: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if index == 1:
            raise ZeroDivisionError("from another callback")


def watched(model: Any) -> list[str]:
    """Return the names of the model's wrapped functions."""
    functions = {kind: getattr(model, f"{kind}_function") for kind in ("train", "test", "predict")}
    return [kind for kind, function in functions.items() if unwrap(function) is not function]


def case_validation(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(name="a\nname"), validation_data=data(1))
    return daemon.received()


def case_default_device(daemon: Daemon) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(f"GPU-{index:036}" for index in range(65))
    fit(model(), GpuWarden(socket=daemon.path))
    del os.environ["CUDA_VISIBLE_DEVICES"]
    return daemon.received()


def case_memory(daemon: Daemon) -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False  # a prefetching thread would allocate between two questions
    steady = tf.data.Dataset.from_tensor_slices(data(20)).batch(2).with_options(options)
    before, after = Witness(), Witness()
    model("adam").fit(steady, verbose=0, callbacks=[before, daemon.callback(interval=0), after])
    reports = [each for each in daemon.received() if each["type"] == "Report"]
    return {"reports": reports, "before": before.seen, "after": after.seen}


def case_evaluate(daemon: Daemon) -> Any:
    model().evaluate(*data(), verbose=0, callbacks=[daemon.callback()])
    return daemon.received()


def case_predict(daemon: Daemon) -> Any:
    model().predict(data()[0], verbose=0, callbacks=[daemon.callback()])
    return daemon.received()


def case_several_steps_an_execution(daemon: Daemon) -> Any:
    fit(model(steps_per_execution=3), daemon.callback())
    return daemon.received()


def case_several_steps_an_execution_unknown_length(daemon: Daemon) -> Any:
    fit_stream(model(steps_per_execution=3), daemon.callback())
    return daemon.received()


def case_unknown_length(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback())
    return daemon.received()


def case_unknown_length_validation(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback(), validation_data=data(1))
    return daemon.received()


def case_unknown_length_stopped(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback(), Stop())
    return daemon.received()


def case_unknown_length_stopped_between_epochs(daemon: Daemon) -> Any:
    patience = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)  # the second epoch is the last
    trained = model()
    trained.fit(stream(), epochs=5, verbose=0, callbacks=[patience, daemon.callback()])
    return daemon.received()


def case_shorter_than_declared(daemon: Daemon) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, that the data ran out
        model().fit(stream(), epochs=1, steps_per_epoch=9, verbose=0, callbacks=[daemon.callback()])
    return daemon.received()


def case_stopped(daemon: Daemon) -> Any:
    fit(model(), Stop(), daemon.callback())
    return daemon.received()


def case_gradient_accumulation(daemon: Daemon) -> Any:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse")
    fit_stream(trained, daemon.callback())
    return daemon.received()


def case_gradient_accumulation_several_steps_an_execution(daemon: Daemon) -> Any:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse", steps_per_execution=3)
    fit_stream(trained, daemon.callback())
    return daemon.received()


def case_compiled(daemon: Daemon) -> Any:
    fit(model(jit_compile=True), daemon.callback())
    return daemon.received()


def case_eager(daemon: Daemon) -> Any:
    fit(model(run_eagerly=True), daemon.callback())
    return daemon.received()


def case_mirrored(daemon: Daemon) -> Any:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        trained = model()
    fit(trained, GpuWarden(socket=daemon.path, devices={"CPU:0": GPU, "CPU:1": GPU}))
    return daemon.received()


def case_repeated(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    fit(trained, callback)
    fit(trained, callback)
    fit(model(), daemon.callback())
    messages = daemon.received()
    return {"messages": messages, "second_connection": daemon.connected()}


def case_twice_in_one_fit(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(), daemon.callback())
    return daemon.received()


def case_same_twice_in_one_fit(daemon: Daemon) -> Any:
    callback = daemon.callback()
    fit(model(), callback, callback)
    return daemon.received()


def case_fit_within_a_fit(daemon: Daemon) -> Any:
    class Within(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        """Fits another model between two epochs."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            fit(model(), daemon.callback(), epochs=1)

    fit(model(), daemon.callback(), Within())
    return daemon.received()


def within_a_step(daemon: Daemon, act: Callable[[GpuWarden], Any]) -> dict[str, Any]:
    """Fit with `act` called between two steps of each epoch, with the callback of the fit; return the result."""

    class Within(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                act(callback)
                meanwhile.append(watched(trained))

    meanwhile: list[list[str]] = []
    callback, trained = daemon.callback(interval=0), model()
    before = fit_of(daemon).steps
    fit(trained, callback, Within())
    fit_of(daemon).settle()
    return {
        "steps": fit_of(daemon).steps - before,
        "epoch": fit_of(daemon).epoch,
        "phase": fit_of(daemon).phase,
        "its_model": callback.model is trained,
        "watched": [*meanwhile, watched(trained)],
    }


def fit_of(daemon: Daemon) -> Reporter:
    """Return this process's run as it reports here."""
    return join_run(daemon.path, Hello("", "", {}))


def case_within_a_step(daemon: Daemon) -> Any:
    def failing(callback: GpuWarden) -> None:
        with contextlib.suppress(ZeroDivisionError):
            fit(model(), callback, Fail(), epochs=1)

    def another() -> GpuWarden:
        return daemon.callback(interval=0)

    return {
        "another": within_a_step(daemon, lambda _: fit(model(), another(), epochs=1, validation_data=data(1))),
        "another_failing": within_a_step(daemon, lambda _: failing(another())),
        "of_the_same_model": within_a_step(daemon, lambda callback: fit(callback.model, another(), epochs=1)),
        "same": within_a_step(daemon, lambda callback: fit(model(), callback, epochs=1, validation_data=data(1))),
        "evaluate": within_a_step(daemon, lambda callback: model().evaluate(*data(), verbose=0, callbacks=[callback])),
        "evaluate_by_another": within_a_step(
            daemon, lambda callback: callback.model.evaluate(*data(), verbose=0, callbacks=[another()])
        ),
        "predict": within_a_step(daemon, lambda callback: model().predict(data()[0], verbose=0, callbacks=[callback])),
    }


def case_other_callback_raises(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    try:
        fit(trained, callback, Fail())
    except ZeroDivisionError as error:
        raised = str(error)
    trained.evaluate(*data(), verbose=0, callbacks=[callback])
    after_failure = daemon.received()
    fit(trained, daemon.callback())
    return {"raised": raised, "messages": after_failure}


def case_fit_after_other_callback_raises(daemon: Daemon) -> Any:
    """Let another callback end a fit in each hook, listed before and after; count the steps of it and of the next."""
    found = {}
    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
        for first in (True, False):
            trained, callback, fails = model(), daemon.callback(), Fail(hook)
            before = fit_of(daemon).steps
            with contextlib.suppress(ZeroDivisionError):
                fit(trained, *((fails, callback) if first else (callback, fails)))
            fit(trained, daemon.callback())
            made = int(trained.optimizer.iterations.numpy())
            found[f"{hook} {first}"] = [made, fit_of(daemon).steps - before]
    return found


def case_out_of_memory(daemon: Daemon) -> Any:
    wide = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8000), keras.layers.Dense(1)])
    wide.compile(optimizer="sgd", loss="mse")
    # The batch itself is small: TensorFlow crashes where an array that is handed in finds no memory.
    callback, x = daemon.callback(), np.ones((20_000, 3), "float32")
    held = [tf.zeros((1 << 18,)) + 1 for _ in range(500)]  # of 1 MiB each
    raised = shown = ""
    try:
        wide.fit(x, x[:, :1], batch_size=len(x), verbose=0, callbacks=[callback])
    except tf.errors.ResourceExhaustedError as error:
        raised, shown = str(error), traceback.format_exc()
    held.clear()
    fit(model(), callback)
    left = watched(wide)
    return {"raised": raised, "shown": shown, "left": left, "messages": daemon.received()}


def case_compiled_out_of_memory(daemon: Daemon) -> Any:
    wide = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8000), keras.layers.Dense(1)])
    wide.compile(optimizer="sgd", loss="mse", jit_compile=True)
    x = np.ones((20_000, 3), "float32")
    try:
        wide.fit(x, x[:, :1], batch_size=len(x), verbose=0, callbacks=[daemon.callback()])
    except tf.errors.ResourceExhaustedError:
        return daemon.received()


def case_retry(daemon: Daemon) -> Any:
    trained = Raising(None, RuntimeError("the second step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    callback, raised = daemon.callback(), None
    try:
        fit(trained, callback, epochs=1)
    except RuntimeError as error:
        raised = str(error)
    gc.collect()
    held = sum(each() is not None for each in trained.held)
    failed, left = daemon.received(), watched(trained)
    fit(trained, callback, epochs=1)
    return {"raised": raised, "held": held, "left": left, "failed": failed, "again": daemon.more()}


def case_let_go(daemon: Daemon) -> Any:
    def prune(*_: Any) -> NoReturn:
        raise LookupError

    def trained(*, pruned: bool) -> list[weakref.ref[Any]]:
        own, callback = model("adam"), daemon.callback()
        others = [keras.callbacks.LambdaCallback(on_epoch_end=prune)] if pruned else []
        with contextlib.suppress(LookupError):
            fit(own, callback, *others)
        return [weakref.ref(own), weakref.ref(callback)]

    held = []
    for pruned in (False, True):
        references = trained(pruned=pruned)
        keras.backend.clear_session()
        gc.collect()
        held.append([each() is not None for each in references])
    return held


def case_interrupted(daemon: Daemon) -> Any:
    trained = Raising(None, KeyboardInterrupt())
    trained.compile("sgd", "mse", run_eagerly=True)
    try:
        fit(trained, daemon.callback(), epochs=1)
    except KeyboardInterrupt:
        return daemon.received()


def case_error_in_validation(daemon: Daemon) -> Any:
    trained = Raising()
    trained.compile("sgd", "mse", run_eagerly=True)

    class Later(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            trained.errors = [None] * BATCHES + [ValueError("the second validation")]

    try:
        fit(trained, daemon.callback(), Later(), validation_data=data(1))
    except ValueError as error:
        raised = str(error)
    return {"raised": raised, "left": watched(trained), "messages": daemon.received()}


def case_error_in_evaluation(daemon: Daemon) -> Any:
    trained = Raising(ValueError("the first step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    try:
        trained.evaluate(*data(), verbose=0, callbacks=[daemon.callback()])
    except ValueError:
        return daemon.received()


def case_error_in_data(daemon: Daemon) -> Any:
    def batches() -> Iterator[tuple[Any, Any]]:
        x, y = data()
        yield x[:2], y[:2]
        raise ZeroDivisionError("of the data")

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    failing = tf.data.Dataset.from_generator(batches, output_signature=signature)
    try:
        model().fit(failing, verbose=0, callbacks=[daemon.callback()])
    except tf.errors.OpError:
        return daemon.received()


def case_functions(daemon: Daemon) -> Any:
    trained, sight = model(), Sight()
    fit(trained, Remake(), daemon.callback(), sight, epochs=3, validation_data=data(1))
    trained.predict(data()[0], verbose=0, callbacks=[daemon.callback(), sight])
    return {"seen": sight.seen, "left": watched(trained)}


def case_traced_again(daemon: Daemon) -> Any:
    usual, step_counter.COMPILED_RATIO = (
        step_counter.COMPILED_RATIO,
        1.0,
    )  # on a busy machine other steps may take long too
    try:
        fit(model(), Remake(), daemon.callback(), epochs=3)
    finally:
        step_counter.COMPILED_RATIO = usual
    return daemon.received()


def case_kept_while_watched(daemon: Daemon) -> Any:
    folder, trained = Path(daemon.path + ".d"), model("adam")
    folder.mkdir()
    kept = Kept(folder)
    fit(trained, daemon.callback(), kept)
    for each in kept.copies:
        fit(each, daemon.callback())
    return {"messages": daemon.received(), "left": [watched(each) for each in kept.copies]}


def case_short_batches(daemon: Daemon) -> Any:
    trained = model()
    callback = daemon.callback(loss=True)
    history = trained.fit(
        *data(), batch_size=3, epochs=2, verbose=0, shuffle=False, callbacks=[callback], validation_data=data(1)
    ).history
    return {"messages": daemon.received(), "loss": history["loss"][-1]}


def case_sizes_seen(daemon: Daemon) -> Any:
    def alike() -> Iterator[tuple[Any, Any]]:
        for size in (3,) * 9 + (1,):
            yield np.ones((size, 3), "float32"), np.ones((size, 1), "float32")

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    fit_meters.METRICS_INTERVAL_SECONDS, feed = 0.0, fit_meters._make_input_meter
    fit_meters._make_input_meter = lambda *_: None  # of several looks each step would have one
    try:
        dataset = tf.data.Dataset.from_generator(alike, output_signature=signature)
        model().fit(dataset, verbose=0, callbacks=[daemon.callback(interval=0)])
    finally:
        fit_meters.METRICS_INTERVAL_SECONDS, fit_meters._make_input_meter = 1.0, feed
    return daemon.received()


def case_nonfinite_loss(daemon: Daemon) -> Any:
    x, y = data()
    x[2 * 2] = np.nan  # in the third of four steps
    settings: dict[str, Any] = {"batch_size": 2, "epochs": 2, "verbose": 0, "shuffle": False}
    model().fit(*data(), callbacks=[daemon.callback()], **settings)
    finite = daemon.received()
    try:
        fit_meters.METRICS_INTERVAL_SECONDS = 3600.0  # on a busy machine a step may take a second
        model().fit(x, y, callbacks=[daemon.callback()], **settings)
        seldom = daemon.more()
        fit_meters.METRICS_INTERVAL_SECONDS = 0.0
        # A run of its own, since the first such step of a run is marked.
        other = Daemon(Path(f"{daemon.path}.2"))
        model().fit(x, y, callbacks=[other.callback(interval=0)], **settings)
    finally:
        fit_meters.METRICS_INTERVAL_SECONDS = 1.0
    checked = Daemon(Path(f"{daemon.path}.3"))
    model().fit(*data(), validation_data=(x, y), callbacks=[checked.callback()], **settings)
    validation = checked.received()
    again = {**settings, "epochs": 4}
    model().fit(*data(), validation_data=(x, y), validation_freq=3, callbacks=[checked.callback()], **again)
    seldom_validation = checked.more()
    model().fit(*data(), callbacks=[checked.callback()], **settings)
    return {
        "finite": finite,
        "seldom": seldom,
        "often": other.received(),
        "validation": validation,
        "seldom_validation": seldom_validation,
        "without_validation": checked.more(),
    }


class OwnLosses(keras.Model):  # type: ignore[misc] # Keras ships no types
    """A model whose train_step returns losses that Keras does not keep."""

    def __init__(self, losses: dict[str, float]) -> None:
        super().__init__()
        self.returned = losses

    def call(self, x: Any) -> Any:  # noqa: D102
        return x

    def train_step(self, batch: Any) -> Any:  # noqa: ARG002, D102
        return {name: tf.constant(loss) for name, loss in self.returned.items()}


def case_nonfinite_own_losses(daemon: Daemon) -> Any:
    found = {}
    for name, losses in {
        "several": {"d_loss": 1.0, "g_loss": np.nan},
        "finite": {"d_loss": 1.0, "accuracy": np.nan},
        "unused": {"loss": np.nan},  # Keras 3 shows 0: its own metric, which no step has updated
    }.items():
        trained, each = OwnLosses(losses), Daemon(Path(f"{daemon.path}.{name}"))
        trained.compile("sgd")
        history = fit(trained, each.callback(), epochs=1).history
        found[name] = {"messages": each.received(), "history": history}
    return found


def case_frame(daemon: Daemon) -> Any:
    x, y = data()
    with contextlib.suppress(ValueError):
        model().fit(x[:, 0], y, verbose=0, callbacks=[daemon.callback()])
    return {"messages": daemon.received(), "line": case_frame.__code__.co_firstlineno + 3}


def case_sizes_unknown(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback())
    return daemon.received()


def case_sizes_of_fixed_shape(daemon: Daemon) -> Any:
    model().fit(
        tf.data.Dataset.from_tensor_slices(data()).batch(4, drop_remainder=True),
        verbose=0,
        callbacks=[daemon.callback()],
    )
    return daemon.received()


def case_own_step(daemon: Daemon) -> Any:
    trained = Raising()
    trained.compile("sgd", "mse")
    fit(trained, daemon.callback(loss=True))
    return daemon.received()


def case_own_loop(daemon: Daemon) -> Any:
    trained, (x, y) = model(), data()
    hooks = keras.callbacks.CallbackList([daemon.callback(loss=True)], model=trained)  # and no params
    hooks.on_train_begin()
    for epoch in range(2):
        hooks.on_epoch_begin(epoch)
        for batch in range(BATCHES):
            hooks.on_train_batch_begin(batch)
            hooks.on_train_batch_end(batch, {"loss": trained.train_on_batch(x, y)})
        hooks.on_epoch_end(epoch)
    hooks.on_train_end()
    return daemon.received()


def case_train_on_batch(daemon: Daemon) -> Any:
    """Train as docs/use/custom-loops.md describes it."""
    trained, (x, y) = model(), data()
    with watch("on batches", socket=daemon.path, devices=CPU) as run:
        for batch in run.batches([(x[at : at + 2], y[at : at + 2]) for at in range(0, len(x), 2)]):
            loss = trained.train_on_batch(*batch)
            run.step(batch_size=len(batch[0]), loss=loss)
    return {"loss": float(loss), "messages": daemon.received()}


def case_forked_workers(daemon: Daemon) -> Any:
    callback, children = daemon.callback(), []

    class Forks(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            child = os.fork()
            if child == 0:
                time.sleep(60)  # holds what it has inherited, for as long as the test may take
                os._exit(0)
            children.append(child)

    fit(model(), callback, Forks())
    peer = daemon.accept()
    peer.waiting()
    run = callback._run
    assert run is not None
    run._connection.close()
    ended = peer.receive() is None
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"ended": ended, "children": len(children)}


def case_several_workers(daemon: Daemon) -> Any:
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    )
    callback = daemon.callback()
    model().predict(data()[0], verbose=0, callbacks=[callback])
    del os.environ["TF_CONFIG"]
    return daemon.received()


def case_copies(daemon: Daemon) -> Any:
    callback = daemon.callback(name="original")
    fit(model(), callback)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):  # noqa: S301 - our own
        fit(model(), twin)
    return daemon.received()


def case_copies_within_a_fit(daemon: Daemon) -> Any:
    class Copies(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                twins.extend([copy.copy(callback), pickle.loads(pickle.dumps(callback))])  # noqa: S301 - our own

    callback, twins = daemon.callback(), list[Any]()
    fit(model(), callback, Copies())
    for twin in twins:
        twin.on_train_batch_begin(0)
    fit(model(), twins[0])
    return daemon.received()


def case_failed_examples(daemon: Daemon) -> Any:
    trained = Raising(None, None, ZeroDivisionError("in a step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    with contextlib.suppress(ZeroDivisionError):
        fit(trained, daemon.callback())
    return daemon.received()


def case_examples_of_ended_fits(daemon: Daemon) -> Any:
    class Ends(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                raise KeyboardInterrupt

    trained, callback = model(), daemon.callback()
    with contextlib.suppress(KeyboardInterrupt):
        fit(trained, callback, Ends())
    fit(trained, callback)
    return daemon.received()


def case_bad_arguments(daemon: Daemon) -> Any:
    refused = []
    for settings in (
        {"interval": float("nan")},
        {"interval": -1},
        {"devices": ["GPU:0"]},
        {"devices": {0: "GPU-a"}},
        {"devices": {"gpu:0": "GPU-a"}},
    ):
        try:
            GpuWarden(**settings)
        except (TypeError, ValueError) as error:
            refused.append(str(error).partition(":")[0])
    return refused


def case_unchanged(daemon: Daemon) -> Any:
    def trained(*callbacks: Any) -> tuple[Any, Any]:
        made = model("adam")
        history = fit(made, *callbacks, epochs=3, validation_data=data(1)).history
        return [weights.tolist() for weights in made.get_weights()], history

    return {"bare": trained(), "watched": trained(daemon.callback(interval=0))}


def case_internal_errors(daemon: Daemon) -> Any:
    def fail() -> NoReturn:
        raise RuntimeError("a fault of the callback's own")

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign] # shortest handler
    logging.getLogger("gpuwarden").addHandler(handler)
    callback = daemon.callback()
    callback._join = fail  # type: ignore[method-assign]
    history = [fit(model(), callback).history["loss"] for _ in range(3)]
    logging.getLogger("gpuwarden").removeHandler(handler)
    return {"messages": messages, "losses": history, "connected": daemon.connected()}


def case_internal_errors_in_steps(daemon: Daemon) -> Any:
    def fail() -> NoReturn:
        raise RuntimeError("a fault of the callback's own")

    class Breaks(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 2:
                callback._run.memory.sample = fail  # type: ignore[union-attr,method-assign] # it is there

    callback = daemon.callback(interval=0)
    made = model("adam")
    made.fit(*data(20), batch_size=2, verbose=0, callbacks=[callback, Breaks()])
    return daemon.received()


def case_disabled(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(disabled=True))
    os.environ["GPUWARDEN_DISABLED"] = "1"
    fit(model(), daemon.callback())
    del os.environ["GPUWARDEN_DISABLED"]
    return daemon.connected()


def case_absent(daemon: Daemon) -> Any:
    callback = GpuWarden(socket=daemon.path + ".absent", devices=CPU)
    return fit(model(), callback).history


def case_never_reading(daemon: Daemon) -> Any:
    callback = daemon.callback(interval=0)
    trained = model("adam")
    trained.fit(*data(400), batch_size=2, verbose=0, callbacks=[callback])
    peer = daemon.accept()
    first = len(peer.waiting())
    fit(trained, callback)
    reports = [each for each in peer.waiting() if isinstance(each, Report)]
    return {"first": first, "steps": reports[-1].steps, "dropped": reports[-1].dropped}


def case_early(daemon: Daemon) -> Any:
    os.environ["GPUWARDEN_SOCKET"] = daemon.path
    fit(model(), EARLY)
    del os.environ["GPUWARDEN_SOCKET"]
    hello = daemon.accept().receive()
    assert isinstance(hello, Hello)
    return {"framework": hello.framework, "versions": [tf.__version__, keras.__version__]}


def case_physical(daemon: Daemon) -> Any:
    return list_physical_devices("CPU")


def case_model_memory(daemon: Daemon) -> Any:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1000), keras.layers.BatchNormalization()])
    made.compile(optimizer="adam", loss="mse")
    made.optimizer.build(made.trainable_variables)
    said = add_model_memory(Error("device_oom", "", "", "train", 3, (Allocation(80, "4,1000"),)), made)
    return [said.weights, said.trainable, said.like_weight]


def case_hooks(daemon: Daemon) -> Any:
    ours = [name for name in vars(GpuWarden) if name.startswith("on_")]
    return {"ours": ours, "unknown": [name for name in ours if not hasattr(keras.callbacks.Callback, name)]}


def case_imports(daemon: Daemon) -> Any:
    return IMPORTED


if __name__ == "__main__":
    fatal = "compiled_out_of_memory"  # TensorFlow crashes later in a process where XLA had none
    cases = cases_in(globals())
    serve({name: cases[name] for name in sys.argv[2:] or cases if name != fatal or name in sys.argv}, Daemon)

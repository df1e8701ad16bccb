"""Cases of keras_cases.py: errors of steps, of data and of other callbacks, out-of-memories and losses of NaN."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from keras_case_setup import (
    BATCHES,
    Daemon,
    RaisingCallback,
    RaisingModel,
    fit,
    get_reporter,
    list_wrapped_functions,
    make_data,
    model,
)

from gpuwarden.client.keras.fit import fit_meters
from gpuwarden.client.keras.model_memory import add_model_memory
from gpuwarden.keras import keras
from gpuwarden.protocol.messages import Allocation, Error


def case_other_callback_raises(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    try:
        fit(trained, callback, RaisingCallback())
    except ZeroDivisionError as error:
        raised = str(error)
    trained.evaluate(*make_data(), verbose=0, callbacks=[callback])
    after_failure = daemon.receive_all()
    fit(trained, daemon.callback())
    return {"raised": raised, "messages": after_failure}


def case_fit_after_other_callback_raises(daemon: Daemon) -> Any:
    """Let another callback end a fit in each hook, listed before and after; count the steps of it and of the next."""
    found = {}
    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
        for first in (True, False):
            trained, callback, fails = model(), daemon.callback(), RaisingCallback(hook)
            before = get_reporter(daemon).state.steps
            with contextlib.suppress(ZeroDivisionError):
                fit(trained, *((fails, callback) if first else (callback, fails)))
            fit(trained, daemon.callback())
            made = int(trained.optimizer.iterations.numpy())
            found[f"{hook} {first}"] = [made, get_reporter(daemon).state.steps - before]
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
    left = list_wrapped_functions(wide)
    return {"raised": raised, "shown": shown, "left": left, "messages": daemon.receive_all()}


def case_compiled_out_of_memory(daemon: Daemon) -> Any:
    wide = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8000), keras.layers.Dense(1)])
    wide.compile(optimizer="sgd", loss="mse", jit_compile=True)
    x = np.ones((20_000, 3), "float32")
    try:
        wide.fit(x, x[:, :1], batch_size=len(x), verbose=0, callbacks=[daemon.callback()])
    except tf.errors.ResourceExhaustedError:
        return daemon.receive_all()


def case_retry(daemon: Daemon) -> Any:
    trained = RaisingModel(None, RuntimeError("the second step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    callback, raised = daemon.callback(), None
    try:
        fit(trained, callback, epochs=1)
    except RuntimeError as error:
        raised = str(error)
    gc.collect()
    held = sum(each() is not None for each in trained.held)
    failed, left = daemon.receive_all(), list_wrapped_functions(trained)
    fit(trained, callback, epochs=1)
    return {"raised": raised, "held": held, "left": left, "failed": failed, "again": daemon.receive_more()}


def case_model_is_released(daemon: Daemon) -> Any:
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
    trained = RaisingModel(None, KeyboardInterrupt())
    trained.compile("sgd", "mse", run_eagerly=True)
    try:
        fit(trained, daemon.callback(), epochs=1)
    except KeyboardInterrupt:
        return daemon.receive_all()


def case_error_in_validation(daemon: Daemon) -> Any:
    trained = RaisingModel()
    trained.compile("sgd", "mse", run_eagerly=True)

    class Later(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            trained.errors = [None] * BATCHES + [ValueError("the second validation")]

    try:
        fit(trained, daemon.callback(), Later(), validation_data=make_data(1))
    except ValueError as error:
        raised = str(error)
    return {"raised": raised, "left": list_wrapped_functions(trained), "messages": daemon.receive_all()}


def case_error_in_evaluation(daemon: Daemon) -> Any:
    trained = RaisingModel(ValueError("the first step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    try:
        trained.evaluate(*make_data(), verbose=0, callbacks=[daemon.callback()])
    except ValueError:
        return daemon.receive_all()


def case_error_in_data(daemon: Daemon) -> Any:
    def batches() -> Iterator[tuple[Any, Any]]:
        x, y = make_data()
        yield x[:2], y[:2]
        raise ZeroDivisionError("of the data")

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    failing = tf.data.Dataset.from_generator(batches, output_signature=signature)
    try:
        model().fit(failing, verbose=0, callbacks=[daemon.callback()])
    except tf.errors.OpError:
        return daemon.receive_all()


def case_nonfinite_loss(daemon: Daemon) -> Any:
    x, y = make_data()
    x[2 * 2] = np.nan  # in the third of four steps
    settings: dict[str, Any] = {"batch_size": 2, "epochs": 2, "verbose": 0, "shuffle": False}
    model().fit(*make_data(), callbacks=[daemon.callback()], **settings)
    finite = daemon.receive_all()
    try:
        fit_meters.METRICS_INTERVAL_SECONDS = 3600.0  # on a busy machine a step may take a second
        model().fit(x, y, callbacks=[daemon.callback()], **settings)
        seldom = daemon.receive_more()
        fit_meters.METRICS_INTERVAL_SECONDS = 0.0
        # A run of its own, since the first such step of a run is marked.
        other = Daemon(Path(f"{daemon.path}.2"))
        model().fit(x, y, callbacks=[other.callback(interval=0)], **settings)
    finally:
        fit_meters.METRICS_INTERVAL_SECONDS = 1.0
    checked = Daemon(Path(f"{daemon.path}.3"))
    model().fit(*make_data(), validation_data=(x, y), callbacks=[checked.callback()], **settings)
    validation = checked.receive_all()
    again = {**settings, "epochs": 4}
    model().fit(*make_data(), validation_data=(x, y), validation_freq=3, callbacks=[checked.callback()], **again)
    seldom_validation = checked.receive_more()
    model().fit(*make_data(), callbacks=[checked.callback()], **settings)
    return {
        "finite": finite,
        "seldom": seldom,
        "often": other.receive_all(),
        "validation": validation,
        "seldom_validation": seldom_validation,
        "without_validation": checked.receive_more(),
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
        found[name] = {"messages": each.receive_all(), "history": history}
    return found


def case_frame(daemon: Daemon) -> Any:
    x, y = make_data()
    with contextlib.suppress(ValueError):
        model().fit(x[:, 0], y, verbose=0, callbacks=[daemon.callback()])
    return {"messages": daemon.receive_all(), "line": case_frame.__code__.co_firstlineno + 3}


def case_failed_examples(daemon: Daemon) -> Any:
    trained = RaisingModel(None, None, ZeroDivisionError("in a step"))
    trained.compile("sgd", "mse", run_eagerly=True)
    with contextlib.suppress(ZeroDivisionError):
        fit(trained, daemon.callback())
    return daemon.receive_all()


def case_examples_of_ended_fits(daemon: Daemon) -> Any:
    class Ends(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                raise KeyboardInterrupt

    trained, callback = model(), daemon.callback()
    with contextlib.suppress(KeyboardInterrupt):
        fit(trained, callback, Ends())
    fit(trained, callback)
    return daemon.receive_all()


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
    made.fit(*make_data(20), batch_size=2, verbose=0, callbacks=[callback, Breaks()])
    return daemon.receive_all()


def case_model_memory(daemon: Daemon) -> Any:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1000), keras.layers.BatchNormalization()])
    made.compile(optimizer="adam", loss="mse")
    made.optimizer.build(made.trainable_variables)
    said = add_model_memory(Error("device_oom", "", "", "train", 3, (Allocation(80, "4,1000"),)), made)
    return [said.weights, said.trainable, said.like_weight]

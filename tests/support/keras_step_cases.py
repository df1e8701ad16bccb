"""Cases of keras_cases.py: phases, steps, sizes of batches, and fits within fits."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras_case_setup import (
    BATCHES,
    CPU,
    GPU,
    Daemon,
    RaisingCallback,
    RaisingModel,
    fit,
    fit_stream,
    get_reporter,
    list_wrapped_functions,
    make_data,
    make_stream,
    model,
)

from gpuwarden import watch
from gpuwarden.client.keras.fit import fit_meters
from gpuwarden.keras import GpuWarden, keras


class Stop(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Asks a fit to stop at the end of its third batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.model.stop_training = batch == 2


def case_validation(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(name="a\nname"), validation_data=make_data(1))
    return daemon.receive_all()


def case_evaluate(daemon: Daemon) -> Any:
    model().evaluate(*make_data(), verbose=0, callbacks=[daemon.callback()])
    return daemon.receive_all()


def case_predict(daemon: Daemon) -> Any:
    model().predict(make_data()[0], verbose=0, callbacks=[daemon.callback()])
    return daemon.receive_all()


def case_several_steps_an_execution(daemon: Daemon) -> Any:
    fit(model(steps_per_execution=3), daemon.callback())
    return daemon.receive_all()


def case_several_steps_an_execution_unknown_length(daemon: Daemon) -> Any:
    fit_stream(model(steps_per_execution=3), daemon.callback())
    return daemon.receive_all()


def case_unknown_length(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback())
    return daemon.receive_all()


def case_unknown_length_validation(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback(), validation_data=make_data(1))
    return daemon.receive_all()


def case_unknown_length_stopped(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback(), Stop())
    return daemon.receive_all()


def case_unknown_length_stopped_between_epochs(daemon: Daemon) -> Any:
    patience = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)  # the second epoch is the last
    trained = model()
    trained.fit(make_stream(), epochs=5, verbose=0, callbacks=[patience, daemon.callback()])
    return daemon.receive_all()


def case_shorter_than_declared(daemon: Daemon) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, that the data ran out
        model().fit(make_stream(), epochs=1, steps_per_epoch=9, verbose=0, callbacks=[daemon.callback()])
    return daemon.receive_all()


def case_stopped(daemon: Daemon) -> Any:
    fit(model(), Stop(), daemon.callback())
    return daemon.receive_all()


def case_gradient_accumulation(daemon: Daemon) -> Any:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse")
    fit_stream(trained, daemon.callback())
    return daemon.receive_all()


def case_gradient_accumulation_several_steps_an_execution(daemon: Daemon) -> Any:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse", steps_per_execution=3)
    fit_stream(trained, daemon.callback())
    return daemon.receive_all()


def case_compiled(daemon: Daemon) -> Any:
    fit(model(jit_compile=True), daemon.callback())
    return daemon.receive_all()


def case_eager(daemon: Daemon) -> Any:
    fit(model(run_eagerly=True), daemon.callback())
    return daemon.receive_all()


def case_mirrored(daemon: Daemon) -> Any:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        trained = model()
    fit(trained, GpuWarden(socket=daemon.path, devices={"CPU:0": GPU, "CPU:1": GPU}))
    return daemon.receive_all()


def case_repeated(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    fit(trained, callback)
    fit(trained, callback)
    fit(model(), daemon.callback())
    messages = daemon.receive_all()
    return {"messages": messages, "second_connection": daemon.connected()}


def case_twice_in_one_fit(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(), daemon.callback())
    return daemon.receive_all()


def case_same_twice_in_one_fit(daemon: Daemon) -> Any:
    callback = daemon.callback()
    fit(model(), callback, callback)
    return daemon.receive_all()


def case_fit_within_a_fit(daemon: Daemon) -> Any:
    class Within(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        """Fits another model between two epochs."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            fit(model(), daemon.callback(), epochs=1)

    fit(model(), daemon.callback(), Within())
    return daemon.receive_all()


def act_in_step(daemon: Daemon, act: Callable[[GpuWarden], Any]) -> dict[str, Any]:
    """Fit with `act` called between two steps of each epoch, with the callback of the fit; return the result."""

    class Within(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                act(callback)
                meanwhile.append(list_wrapped_functions(trained))

    meanwhile: list[list[str]] = []
    callback, trained = daemon.callback(interval=0), model()
    before = get_reporter(daemon).state.steps
    fit(trained, callback, Within())
    get_reporter(daemon).count_ended()
    return {
        "steps": get_reporter(daemon).state.steps - before,
        "epoch": get_reporter(daemon).state.epoch,
        "phase": get_reporter(daemon).state.phase,
        "its_model": callback.model is trained,
        "watched": [*meanwhile, list_wrapped_functions(trained)],
    }


def case_within_a_step(daemon: Daemon) -> Any:
    def failing(callback: GpuWarden) -> None:
        with contextlib.suppress(ZeroDivisionError):
            fit(model(), callback, RaisingCallback(), epochs=1)

    def another() -> GpuWarden:
        return daemon.callback(interval=0)

    return {
        "another": act_in_step(daemon, lambda _: fit(model(), another(), epochs=1, validation_data=make_data(1))),
        "another_failing": act_in_step(daemon, lambda _: failing(another())),
        "of_the_same_model": act_in_step(daemon, lambda callback: fit(callback.model, another(), epochs=1)),
        "same": act_in_step(daemon, lambda callback: fit(model(), callback, epochs=1, validation_data=make_data(1))),
        "evaluate": act_in_step(
            daemon, lambda callback: model().evaluate(*make_data(), verbose=0, callbacks=[callback])
        ),
        "evaluate_by_another": act_in_step(
            daemon, lambda callback: callback.model.evaluate(*make_data(), verbose=0, callbacks=[another()])
        ),
        "predict": act_in_step(
            daemon, lambda callback: model().predict(make_data()[0], verbose=0, callbacks=[callback])
        ),
    }


def case_short_batches(daemon: Daemon) -> Any:
    trained = model()
    callback = daemon.callback(loss=True)
    history = trained.fit(
        *make_data(),
        batch_size=3,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[callback],
        validation_data=make_data(1),
    ).history
    return {"messages": daemon.receive_all(), "loss": history["loss"][-1]}


def case_sizes_seen(daemon: Daemon) -> Any:
    def batches() -> Iterator[tuple[Any, Any]]:
        for size in (3,) * 9 + (1,):
            yield np.ones((size, 3), "float32"), np.ones((size, 1), "float32")

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    fit_meters.METRICS_INTERVAL_SECONDS, feed = 0.0, fit_meters._make_input_meter
    fit_meters._make_input_meter = lambda *_: None  # of several looks each step would have one
    try:
        dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
        model().fit(dataset, verbose=0, callbacks=[daemon.callback(interval=0)])
    finally:
        fit_meters.METRICS_INTERVAL_SECONDS, fit_meters._make_input_meter = 1.0, feed
    return daemon.receive_all()


def case_sizes_unknown(daemon: Daemon) -> Any:
    fit_stream(model(), daemon.callback())
    return daemon.receive_all()


def case_sizes_of_fixed_shape(daemon: Daemon) -> Any:
    model().fit(
        tf.data.Dataset.from_tensor_slices(make_data()).batch(4, drop_remainder=True),
        verbose=0,
        callbacks=[daemon.callback()],
    )
    return daemon.receive_all()


def case_own_step(daemon: Daemon) -> Any:
    trained = RaisingModel()
    trained.compile("sgd", "mse")
    fit(trained, daemon.callback(loss=True))
    return daemon.receive_all()


def case_own_loop(daemon: Daemon) -> Any:
    trained, (x, y) = model(), make_data()
    hooks = keras.callbacks.CallbackList([daemon.callback(loss=True)], model=trained)  # and no params
    hooks.on_train_begin()
    for epoch in range(2):
        hooks.on_epoch_begin(epoch)
        for batch in range(BATCHES):
            hooks.on_train_batch_begin(batch)
            hooks.on_train_batch_end(batch, {"loss": trained.train_on_batch(x, y)})
        hooks.on_epoch_end(epoch)
    hooks.on_train_end()
    return daemon.receive_all()


def case_train_on_batch(daemon: Daemon) -> Any:
    """Train as docs/use/custom-loops.md describes it."""
    trained, (x, y) = model(), make_data()
    with watch("on batches", socket=daemon.path, devices=CPU) as run:
        for batch in run.batches([(x[at : at + 2], y[at : at + 2]) for at in range(0, len(x), 2)]):
            loss = trained.train_on_batch(*batch)
            run.step(batch_size=len(batch[0]), loss=loss)
    return {"loss": float(loss), "messages": daemon.receive_all()}

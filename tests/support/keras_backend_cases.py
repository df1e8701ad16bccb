"""Real training on Keras's backend KERAS_BACKEND, for test_keras_backends.py: prints each case's messages.

`KERAS_BACKEND=jax python keras_backend_cases.py FOLDER`. A process of its own for all cases of a backend, each of which
trains against a daemon's socket of its own.
"""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from receiver import Receiver
from training_cases import find_cases, run_and_print

from gpuwarden import watch
from gpuwarden.keras import GpuWarden, keras

X = np.arange(24, dtype="float32").reshape(8, 3) / 10
Y = X.sum(axis=1, keepdims=True)


class Daemon(Receiver):
    """A daemon's socket that records the messages of a case's callbacks."""

    def callback(self, **settings: Any) -> GpuWarden:
        """Make a callback that reports here."""
        return GpuWarden(socket=self.path, **{"interval": 0, **settings})

    def receive_all(self) -> list[dict[str, Any]]:
        """Return all messages of the one connection, each with its type."""
        return [{"type": type(each).__name__} | asdict(each) for each in self.accept().waiting()]


def model(*layers: Any, **compiling: Any) -> Any:
    """Make the same small model each time."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(8), keras.layers.Dense(1)])
    made.compile(optimizer="adam", loss="mse", **compiling)
    return made


def fit(trained: Any, *callbacks: Any, **settings: Any) -> Any:
    """Fit quietly on two epochs of four batches."""
    given = {"batch_size": 2, "epochs": 2, "verbose": 0, "shuffle": False, **settings}
    return trained.fit(X, Y, callbacks=callbacks, **given)


def batches(count: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(count):
        yield X[:2], Y[:2]


def case_validation(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(name="a name"), validation_data=(X, Y))
    return daemon.receive_all()


def case_unknown_length(daemon: Daemon) -> Any:
    model().fit(batches(7), verbose=0, callbacks=[daemon.callback()])
    return daemon.receive_all()


def case_eager(daemon: Daemon) -> Any:
    fit(model(run_eagerly=True), daemon.callback())
    return daemon.receive_all()


def case_repeated(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    fit(trained, callback)
    fit(trained, callback)
    return daemon.receive_all()


def case_evaluate_and_predict(daemon: Daemon) -> Any:
    trained, callback = model(), daemon.callback()
    trained.evaluate(X, Y, verbose=0, callbacks=[callback])
    trained.predict(X, verbose=0, callbacks=[callback])
    return daemon.receive_all()


def case_unchanged(daemon: Daemon) -> Any:
    def trained(*callbacks: Any) -> tuple[Any, Any]:
        made = model()
        history = fit(made, *callbacks, validation_data=(X, Y)).history
        return [weights.tolist() for weights in made.get_weights()], history

    return {"bare": trained(), "watched": trained(daemon.callback())}


class HugeLayer(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Allocates more memory than any machine has, in the step itself."""

    def call(self, x: Any) -> Any:  # noqa: D102 - Keras's
        return x + keras.ops.sum(keras.ops.ones((1 << 22, 1 << 22)) * keras.ops.mean(x))

    def compute_output_shape(self, shape: Any) -> Any:  # noqa: D102 - Keras's
        return shape


def case_out_of_memory(daemon: Daemon) -> Any:
    callback = daemon.callback()
    raised = ""
    try:
        fit(model(HugeLayer(), run_eagerly=True), callback)
    except Exception as error:  # noqa: BLE001 - of each framework's own type
        raised = type(error).__name__
    fit(model(), callback)
    return {"raised": raised, "messages": daemon.receive_all()}


def case_within_a_watch(daemon: Daemon) -> Any:
    raised = ""
    try:
        with watch(socket=daemon.path) as run:
            run.step()
            fit(model(), daemon.callback())
            run.step()
            fit(model(HugeLayer(), run_eagerly=True), daemon.callback())
    except Exception as error:  # noqa: BLE001 - of each framework's own type
        raised = type(error).__name__
    return {"raised": raised, "messages": daemon.receive_all()}


def case_dispatch(daemon: Daemon) -> Any:
    """Return whether Keras still dispatches the ends of batches in parallel with the training."""
    chain = keras.callbacks.CallbackList([daemon.callback()], model=model())
    return [chain._async_train, chain._async_test, chain._async_predict]


if __name__ == "__main__":
    run_and_print(find_cases(globals()), Daemon)

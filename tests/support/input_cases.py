"""Real training for test_input_of_keras.py: `python input_cases.py FOLDER` prints each case's last report.

KERAS_BACKEND says which framework trains. A process of its own, since a process has one backend.
"""

# ruff: noqa: D103 - the tests say what each case shows; the environment comes before the imports it is for

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3"}  # before TensorFlow is imported

import numpy as np
from receiver import Receiver

from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.messages import Report

SLOW = 0.04  # seconds that a slow thing takes, much longer than the pauses of a busy machine
STEPS = 25
X = np.ones((8, 4), "float32")
Y = X[:, :1]


class Batches(keras.utils.PyDataset):  # type: ignore[misc] # Keras ships no types
    """Batches that take `wait` seconds each."""

    def __init__(self, wait: float, number: int = STEPS) -> None:
        super().__init__()
        self.wait = wait
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(self.wait)
        return X, Y


class SlowCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """A user's callback that does much in each step."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002, D102 - Keras's hook
        time.sleep(SLOW)


class LossReader(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """A user's callback that reads each step's loss, for which Keras waits; on JAX it otherwise does not."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102 - Keras's hook
        pass


class Fail(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Raises at the third batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002, D102 - Keras's hook
        if batch == 2:
            raise ZeroDivisionError


def model(**compiling: Any) -> Any:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **compiling)
    return made


def ready_arrays() -> dict[str, Any]:
    return {"x": np.tile(X, (STEPS, 1)), "y": np.tile(Y, (STEPS, 1)), "batch_size": len(X)}


def endless_generator() -> Iterator[tuple[Any, Any]]:
    while True:
        time.sleep(SLOW)
        yield X, Y


def finite_generator() -> Iterator[tuple[Any, Any]]:
    for _ in range(STEPS):
        time.sleep(SLOW)
        yield X, Y


def dataset() -> Any:
    import tensorflow as tf  # noqa: PLC0415 - the other backends do without

    return tf.data.Dataset.from_generator(
        finite_generator, output_signature=(tf.TensorSpec(X.shape), tf.TensorSpec(Y.shape))
    )


def case_slow(fit: Callable[..., Any]) -> None:
    fit(model(), LossReader(), x=Batches(SLOW))


def case_slow_generator(fit: Callable[..., Any]) -> None:
    fit(model(), LossReader(), x=endless_generator(), steps_per_epoch=STEPS)


def case_slow_unknown_length(fit: Callable[..., Any]) -> None:
    fit(model(), LossReader(), x=finite_generator())


def case_fast(fit: Callable[..., Any]) -> None:
    fit(model(), SlowCallback(), **ready_arrays(), epochs=2)


def case_slow_validation(fit: Callable[..., Any]) -> None:
    fit(model(), SlowCallback(), **ready_arrays(), epochs=3, validation_data=Batches(SLOW))


def case_several_steps_an_execution(fit: Callable[..., Any]) -> None:
    # The buffer is read once a second, and no longer known when the fit ends.
    fit(model(steps_per_execution=4), x=Batches(SLOW, 2 * STEPS))


def case_data_is_released(fit: Callable[..., Any]) -> Any:
    batches, trained = Batches(0), model()
    died = weakref.ref(batches)
    with suppress(ZeroDivisionError):
        fit(trained, Fail(), x=batches)
    del batches
    gc.collect()
    return died() is None


def case_jit(fit: Callable[..., Any]) -> None:
    fit(model(jit_compile=True), x=Batches(SLOW))


def case_prefetched(fit: Callable[..., Any]) -> None:
    fit(model(), SlowCallback(), x=dataset().cache().repeat(3).prefetch(4), epochs=2)


def case_mirrored(fit: Callable[..., Any]) -> None:
    import tensorflow as tf  # noqa: PLC0415 - the other backends do without

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        trained = model()
    fit(trained, x=Batches(SLOW))


def case_without_autotuning(fit: Callable[..., Any]) -> None:
    import tensorflow as tf  # noqa: PLC0415 - the other backends do without

    options = tf.data.Options()
    options.autotune.enabled = False
    fit(model(), x=dataset().with_options(options))


SLOW_OR_NOT = (case_slow, case_slow_generator, case_slow_unknown_length, case_fast, case_slow_validation)
CASES = {
    # Not case_data_is_released: its own pipeline keeps the user's data alive, with us or without.
    "tensorflow": (
        *SLOW_OR_NOT,
        case_several_steps_an_execution,
        case_jit,
        case_prefetched,
        case_mirrored,
        case_without_autotuning,
    ),
    "jax": (*SLOW_OR_NOT, case_several_steps_an_execution, case_data_is_released),
    "torch": (case_slow, case_fast),
}


def run_case(case: Callable[[Callable[..., Any]], Any], folder: Path) -> dict[str, Any]:
    """Run one case; return the input fields of its reports, and what it returned or raised."""
    daemon = Receiver(folder / f"{case.__name__}.sock")

    def fit(trained: Any, *callbacks: Any, **settings: Any) -> Any:
        return trained.fit(verbose=0, callbacks=[GpuWarden(socket=daemon.path), *callbacks], **settings)

    try:
        returned = case(fit)
        reports = [asdict(each) for each in daemon.accept().waiting() if isinstance(each, Report)]
    except Exception:  # noqa: BLE001 - the test of this case fails by it, the others go on
        return {"raised": traceback.format_exc()}
    finally:
        daemon.close()
    inputs = [{name: value for name, value in each.items() if name.startswith("input_")} for each in reports]
    return {"returned": returned, "inputs": inputs}


if __name__ == "__main__":
    results = {case.__name__[5:]: run_case(case, Path(sys.argv[1])) for case in CASES[keras.backend.backend()]}
    print(json.dumps(results))  # noqa: T201 - the result

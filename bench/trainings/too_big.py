"""Trainings that are too big for the device: without their cause, with a batch of one, they fail too."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    FEATURES,
    compile_model,
    custom_loop,
    fit,
    layers,
    main,
    make_dense_model,
    make_repeated_batches,
    make_steady_stream,
    make_tower,
    make_watch,
    preallocate,
    reserve,
)

from gpuwarden.keras import keras
from labels import BATCH, MODEL, training


@training("too_big")
def too_big_gradient(*, cause: bool) -> None:
    """Gradient of 61 MiB of weights next to Adam's two slots on 240 MiB, in a pool that grows."""
    size = 64 if cause else 1
    fit(make_dense_model(7808, features=2048, optimizer="adam"), make_steady_stream(size, 50, features=2048))


@training("too_big")
def too_big_sequence(*, cause: bool) -> None:
    """One sequence's attention of 381 MiB on a device of 256."""
    reserve()
    length, size = 10_000, 2 if cause else 1
    inputs = layers.Input((length, 8))
    attended = layers.MultiHeadAttention(1, 8, flash_attention=False)(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1)(attended[:, 0]))
    model.compile(optimizer="sgd", loss="mse")
    fit(model, make_repeated_batches(50, (size, length, 8), (size, 1)))


@training("too_big", size=208, advises="optimizer", never=BATCH)
def late_optimizer(*, cause: bool) -> None:
    """Adam's slots for 50 MiB of weights are made after 250 steps of SGD."""
    preallocate()
    model, size = make_tower(2560, 3), 32 if cause else 1
    with make_watch("late_optimizer") as run:
        custom_loop(run, model, keras.optimizers.SGD(0.01), 250, size=size)
        custom_loop(run, model, keras.optimizers.Adam(1e-4), 50, size=size)


@training("too_big", size=224, advises=MODEL, never=BATCH)
def teacher(*, cause: bool) -> None:
    """A second model of 196 MiB is built after training, next to 50 MiB with Adam."""
    preallocate()
    student = make_tower(2048, 2)
    student.compile(optimizer="adam", loss="mse")
    size = 64 if cause else 1
    fit(student, make_steady_stream(size, 80), epochs=3)
    master = make_tower(3584, 5)  # 49 MiB a layer
    fit(student, make_steady_stream(size, 50).map(lambda x, _: (x, master(x))))


@training("too_big", size=1024, limit=160, advises="limit", never=BATCH)
def own_memory_limit(*, cause: bool) -> None:
    """Weights and Adam exceed the process's own limit of 160 MiB on a device of 1024."""
    model = make_tower(2304, 4)
    model.compile(optimizer="adam", loss="mse")
    fit(model, make_steady_stream(16 if cause else 1, 60), epochs=2)


@training("too_big", advises="shape|dtype|pieces|parts", never="pipeline|shuffle|worker|batch")
def distances() -> None:
    """The user's code requests 29 TiB from NumPy after training."""
    reserve()
    fit(make_dense_model(512), make_steady_stream(128, 100), epochs=2)
    count = 2_000_000
    found = np.zeros((count, FEATURES), "float32")
    np.subtract.outer(found[:, 0], found[:, 0], out=np.empty((count, count), "float64"))


# github.com/bghira/SimpleTuner/issues/2158
@training("too_big", advises=MODEL, never=BATCH)
def accumulated(*, cause: bool) -> None:
    """Keras's accumulators for 40 MiB of weights, next to Adam, though the batch is an eighth."""
    preallocate()
    stack = [layers.Conv1D(1056, 3, padding="same", activation="tanh") for _ in range(3)]
    model = compile_model(layers.Input((4, 32)), layers.Dense(1056), *stack, layers.Dense(1))
    size = 16 if cause else 1
    fit(model, make_repeated_batches(12, (size, 4, 32), (size, 4, 1)), epochs=2)
    size = 2 if cause else 1
    model.compile(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=8), loss="mse")
    fit(model, make_repeated_batches(12, (size, 4, 32), (size, 4, 1)), epochs=2)


# github.com/allenai/OLMoE/issues/34
@training("too_big", advises=MODEL, never=BATCH)
def experts(*, cause: bool) -> None:
    """24 experts of 12 MiB fill the device while the model is built."""
    reserve()
    size = 16 if cause else 1
    with make_watch("experts") as run:
        inputs = layers.Input((16, 768))
        gate = layers.Dense(24, activation="softmax")(inputs)
        found: list[Any] = []
        for _ in range(24):
            wide = layers.Dense(2048, activation="relu", kernel_initializer="zeros")(inputs)
            found.append(layers.Dense(768, kernel_initializer="zeros")(wide))
        mixed = layers.Lambda(lambda x: tf.einsum("bte,ebtd->btd", x[0], tf.stack(x[1:])))([gate, *found])
        model = keras.Model(inputs, mixed)
        model.compile(optimizer="sgd", loss="mse")
        for _ in range(10):
            model.train_on_batch(np.ones((size, 16, 768), "float32"), np.zeros((size, 16, 768), "float32"))
            run.step(batch_size=size)


@training("too_big", advises=MODEL, never=BATCH)
def wide_lstm(*, cause: bool) -> None:
    """85 MiB of weights three times, with gradients and momentum."""
    preallocate()
    lstm = layers.LSTM(2304, recurrent_initializer="glorot_uniform")
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model = compile_model(layers.Input((20, 128)), lstm, layers.Dense(1), optimizer=optimizer)
    size = 16 if cause else 1
    fit(model, make_repeated_batches(10, (size, 20, 128), (size, 1)))


if __name__ == "__main__":
    main()

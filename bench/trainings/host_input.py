"""Trainings whose input pipeline wants too much memory of the host, which here is of the same allocator."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    FEATURES,
    Hooks,
    compile_model,
    fit,
    layers,
    main,
    make_dense_model,
    make_steady_stream,
    reserve,
)

from gpuwarden.keras import keras
from labels import training


@training("host_input")
def input_later(*, cause: bool) -> None:
    """In the 250th batch tf.data's map makes a tensor of 1.2 GiB."""
    reserve()

    def augmented(index: Any, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = batch
        many = tf.zeros((tf.where(index == 250, 40_000 if cause else 2, 2), tf.shape(x)[0], FEATURES)) + x
        return tf.reduce_max(many, axis=0), y

    fit(make_dense_model(512), make_steady_stream(128, 300, pause=0.01).enumerate().map(augmented))


class Images(keras.utils.PyDataset):  # type: ignore[misc] # Keras ships no types
    """Data set in Python that at some batch loads all of it."""

    def __init__(self, *, cause: bool) -> None:
        super().__init__(workers=1)
        self.cause = cause

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 120 and self.cause:
            np.zeros((4_000_000, 512, 512, 3))  # more than the machine has
        time.sleep(0.01)
        return np.ones((128, FEATURES), "float32"), np.zeros((128, 1), "float32")


@training("host_input", pace="default")
def input_pydataset(*, cause: bool) -> None:
    """A PyDataset requests terabytes from NumPy."""
    reserve()
    fit(make_dense_model(512), Images(cause=cause), shuffle=False)


# github.com/tensorflow/tensorflow/issues/33516
@training("host_input", advises=r"parallel|prefetch|buffer|pipeline|input", never="model")
def parallel_decoding(*, cause: bool) -> None:
    """64 decoded pictures of 6 MiB wait for the training while a callback saves."""
    reserve()

    def decode(_: Any) -> Any:
        return tf.random.uniform((512, 1024, 3))

    pictures = tf.data.Dataset.range(2000).map(decode, num_parallel_calls=64 if cause else 2)
    data = pictures.map(lambda x: (x[::16, ::16], tf.zeros((1,)))).batch(8).take(30)
    model = compile_model(layers.Input((32, 64, 3)), layers.Flatten(), layers.Dense(1), optimizer="sgd")
    fit(model, data, Hooks(on_train_batch_end=lambda batch: time.sleep(6 if batch == 15 else 0.02)))


# github.com/tensorflow/tensorflow/issues/54299
@training("host_input", advises=r"shuffle|buffer|pipeline|input", never="model")
def two_buffers(*, cause: bool) -> None:
    """The shuffle buffer of the validation comes next to that of the training, 120 MiB each."""
    reserve()

    def read(_: Any) -> tuple[Any, Any]:
        return tf.random.uniform((32, 96, 128)), tf.zeros((32, 1))  # 1.5 MiB

    train = tf.data.Dataset.range(400).map(read).shuffle(80).repeat()
    held_out = tf.data.Dataset.range(400).map(read)
    held_out = held_out.shuffle(80) if cause else held_out
    model = compile_model(layers.Input((96, 128)), layers.AveragePooling1D(8), layers.Flatten(), layers.Dense(1))
    fit(model, train, epochs=2, steps_per_epoch=150, validation_data=held_out, validation_steps=20)


if __name__ == "__main__":
    main()

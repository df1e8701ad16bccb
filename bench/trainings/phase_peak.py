"""Trainings of which one phase or one step needs far more than the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    FEATURES,
    Hooks,
    compile_model,
    compiled_step,
    fit,
    layers,
    main,
    make_dense_model,
    make_repeated_batches,
    make_steady_stream,
    make_stream,
    make_tower,
    make_watch,
    preallocate,
)

from gpuwarden.keras import keras
from labels import BATCH, PARTS, training


@training("phase_peak")
def peak_late_validation(*, cause: bool) -> None:
    """Validation in every fourth epoch has a giant batch, in a pool that grows."""
    data = make_steady_stream(60_000 if cause else 256, 2)
    fit(
        make_dense_model(2048, optimizer="adam"),
        make_steady_stream(256, 60),
        epochs=8,
        validation_data=data,
        validation_freq=4,
    )


@training("phase_peak", advises=BATCH)
def large_evaluation(*, cause: bool) -> None:
    """Evaluation after training has a batch 1250 times as large, outside of the watch's steps."""
    preallocate()
    model = make_tower(1024, 12)
    model.compile(optimizer="adam", loss="mse")
    with make_watch("large_evaluation") as run:
        for _ in range(80):
            model.train_on_batch(np.ones((32, FEATURES), "float32"), np.zeros((32, 1), "float32"))
            run.step(batch_size=32)
        model.evaluate(make_stream(lambda: iter([40_000 if cause else 32] * 2)), verbose=0)


# github.com/facebookresearch/fairseq/issues/1782
@training("phase_peak", advises=r"length|sequence|shape|bound|bucket|largest")
def long_recording(*, cause: bool) -> None:
    """A recording of 480,000 samples, where others have 6000, pads its batch."""
    preallocate()
    random = np.random.default_rng(21)

    def recordings() -> Iterator[tuple[Any, Any]]:
        for index in range(1600):
            time.sleep(0.001)
            length = 480_000 if index == 1300 and cause else int(random.integers(2000, 6000))
            yield np.full((length, 1), 0.1, "float32"), np.zeros((1,), "float32")

    specs = tf.TensorSpec((None, 1)), tf.TensorSpec((1,))
    data = tf.data.Dataset.from_generator(recordings, output_signature=specs).padded_batch(8)
    stack = [layers.Conv1D(16, 9, padding="same", activation="relu") for _ in range(2)]
    fit(compile_model(layers.Input((None, 1)), *stack, layers.GlobalMaxPooling1D(), layers.Dense(1)), data)


# github.com/akanimax/msg-gan-v1/issues/2
@training("phase_peak", advises=BATCH + r"|fewer|parts|pieces")
def samples(*, cause: bool) -> None:
    """A callback draws 12,000 samples at once at the end of the third epoch."""
    preallocate()
    stack = [layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu") for _ in range(2)]
    begin = [layers.Input((16,)), layers.Dense(8 * 8 * 16), layers.Reshape((8, 8, 16))]
    decoder = compile_model(*begin, *stack, layers.Conv2D(1, 1))

    def draw(epoch: int) -> None:
        drawn = decoder(tf.random.normal((12_000 if cause and epoch == 2 else 64, 16)))
        del drawn

    fit(decoder, make_repeated_batches(60, (32, 16), (32, 32, 32, 1)), Hooks(on_epoch_end=draw), epochs=4)


@training("phase_peak", advises=PARTS + r"|shape|sparse")
def full_graph(*, cause: bool) -> None:
    """Validation makes a dense matrix of the whole graph, 309 MiB; training samples 256 nodes of it."""
    preallocate()
    first, second = layers.Dense(32, activation="relu"), layers.Dense(7)
    inputs = layers.Input((16,), name="nodes"), layers.Input((None,), name="edges")
    model = keras.Model(inputs, second(inputs[1] @ first(inputs[1] @ inputs[0])))
    step = compiled_step(
        model, keras.optimizers.Adam(), lambda nodes, edges: tf.reduce_mean(tf.square(model([nodes, edges])))
    )

    def matrix(nodes: int) -> Any:
        rows = tf.range(nodes, dtype=tf.int64)
        links = tf.SparseTensor(tf.stack([rows, (rows + 1) % nodes], 1), tf.ones((nodes,)), (nodes, nodes))
        return tf.sparse.to_dense(links, validate_indices=False)

    with make_watch("full_graph") as run:
        for _ in range(240):
            step(tf.random.normal((256, 16)), matrix(256))
            time.sleep(0.005)
            run.step(batch_size=256)
        with run.phase("validation"):
            nodes = 9000 if cause else 900
            found = model([tf.random.normal((nodes, 16)), matrix(nodes)])
        del found


if __name__ == "__main__":
    main()

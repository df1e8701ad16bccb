"""Trainings whose batch is too large: without their cause, with a smaller batch, they pass."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from training_run import (
    FEATURES,
    compile_model,
    compiled_step,
    eager_step,
    fit,
    layers,
    main,
    make_repeated_batches,
    make_steady_stream,
    make_watch,
    preallocate,
    reserve,
)

from gpuwarden.keras import keras
from labels import BATCH, training


@training("batch_too_large")
def batch_second_fit(*, cause: bool) -> None:
    """A second fit has a batch 128 times as large."""
    reserve()
    stack = [layers.Dense(width, activation="relu") for _ in range(6) for width in (2048, 16)]
    model = compile_model(layers.Input((FEATURES,)), *stack, layers.Dense(1))
    fit(model, make_steady_stream(64, 60), epochs=4)
    fit(model, make_steady_stream(8192 if cause else 128, 20), epochs=2)


@training("batch_too_large")
def batch_own_loop(*, cause: bool) -> None:
    """Activations of 188 MiB, twice, in a custom loop, in a pool that grows."""
    size = 12_000 if cause else 500
    with make_watch("batch_own_loop") as run:
        weights = tf.Variable(tf.ones((FEATURES, 4096)) / FEATURES)
        for _ in range(100):
            eager_step(weights, size)
            run.step(batch_size=size)


@training("batch_too_large", size=2048, limit=200)
def batch_limited(*, cause: bool) -> None:
    """Images, 128 a batch where 4 fit, under the allocator's own limit."""
    reserve()
    stack = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
    model = compile_model(layers.Input((96, 96, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(1))
    size = 128 if cause else 4
    fit(model, make_repeated_batches(30, (size, 96, 96, 3), (size, 1)))


@training("batch_too_large", advises=BATCH, exits_at_once=True)
def xla_step(*, cause: bool) -> None:
    """188 MiB of activations twice, in a step that XLA compiles."""
    preallocate()
    weights = tf.Variable(tf.ones((FEATURES, 4096)) / FEATURES)

    @tf.function(jit_compile=True)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.sort(x @ weights, axis=1)  # is not fused away
            loss = tf.reduce_mean(tf.square(hidden))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))

    size = 12_000 if cause else 64
    with make_watch("xla_step") as run:
        for _ in range(30):
            step(tf.ones((size, FEATURES)))
            run.step(batch_size=size)


# github.com/google-research/simclr/issues/203
@training("batch_too_large", advises=BATCH)
def contrastive(*, cause: bool) -> None:
    """Pairs of a batch that is 16 times as large need 256 times the memory."""
    preallocate()
    model = keras.Sequential([layers.Input((48,)), layers.Dense(96, activation="gelu"), layers.Dense(32)])

    def loss(first: Any, second: Any) -> Any:
        views = tf.math.l2_normalize(model(tf.concat([first, second], 0)), axis=1)
        similar = tf.matmul(views, views, transpose_b=True) / 0.1
        pairs = tf.roll(tf.range(tf.shape(views)[0]), tf.shape(first)[0], 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(pairs, similar))

    step = compiled_step(model, keras.optimizers.Adam(), loss)
    with make_watch("contrastive") as run:
        for size, steps in ((256, 120), (4096 if cause else 384, 20)):
            for _ in range(steps):
                step(tf.random.normal((size, 48)), tf.random.normal((size, 48)))
                run.step(batch_size=size)


# tensorflow.org/guide/keras/transfer_learning
@training("batch_too_large", advises=BATCH)
def finetuned(*, cause: bool) -> None:
    """Unfrozen layers keep their activations; their weights are small."""
    preallocate()
    body = keras.Sequential([layers.Input((64, 64, 3)), layers.Conv2D(16, 1)])
    for _ in range(6):
        body.add(layers.DepthwiseConv2D(3, padding="same"))
        body.add(layers.Activation("swish"))
    body.add(layers.GlobalMaxPooling2D())
    body.trainable = False
    model = compile_model(layers.Input((64, 64, 3)), body, layers.Dense(8))
    fit(model, make_repeated_batches(15, (96, 64, 64, 3), (96, 8)), epochs=2)
    body.trainable = True
    model.compile(optimizer=keras.optimizers.Adam(1e-5), loss="mse")
    size = 96 if cause else 8
    fit(model, make_repeated_batches(15, (size, 64, 64, 3), (size, 8)))


if __name__ == "__main__":
    main()

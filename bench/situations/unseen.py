"""Third set of trainings that run out of memory: `python unseen.py NAME [--without]`; labels.py says why each does.

Programs as people write them: fine-tuning, accumulation, tokenized text, evaluation on all examples, a second model.
Most errors are caught by no one, and many happen outside of a step. Each takes `cause`: without it, the cause is left
out and all else is equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden import watch
from gpuwarden.keras import keras
from shared_device import MIB
from training import FEATURES, Each, callback, dense, fit, play, preallocate, reserve, say, steady, stream, watched

layers = keras.layers


def tower(width: int, depth: int, *, features: int = FEATURES) -> Any:
    """Make layers of width x width weights: 16 MiB each at 2048."""
    stack = [layers.Dense(width, activation="relu", kernel_initializer="zeros") for _ in range(depth)]
    return keras.Sequential([layers.Input((features,)), *stack, layers.Dense(1)])


def half_steps(run: Any, model: Any, optimizer: Any, steps: int, *, size: int = 64) -> None:
    """Train a model in a loop without Keras's fit."""
    x = tf.ones((size, FEATURES))
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        time.sleep(0.01)
        run.step(batch_size=size)


# One thing has grown once, or is too big at once: whatever the batch, it does not fit.


def unfrozen(*, cause: bool) -> None:
    """Train the head of a frozen model, then all of it."""
    preallocate()
    body = tower(2560, 3)  # 50 MiB
    body.trainable = False
    model = keras.Sequential([layers.Input((FEATURES,)), body, layers.Dense(16), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    size = 64 if cause else 1
    fit(model, steady(size, 60), epochs=3)
    body.trainable = True
    model.compile(optimizer=keras.optimizers.Adam(1e-5), loss="mse")
    fit(model, steady(size, 60), epochs=3)


def late_optimizer(*, cause: bool) -> None:
    """Warm up with plain SGD, then change to Adam, whose slots do not fit."""
    preallocate()
    model = tower(2560, 3)
    size = 32 if cause else 1
    run = watched("late_optimizer")
    half_steps(run, model, keras.optimizers.SGD(0.01), 250, size=size)
    adam = keras.optimizers.Adam(1e-4)
    half_steps(run, model, adam, 50, size=size)
    run.close()


def accumulators(*, cause: bool) -> None:
    """Make variables to accumulate the gradients of six tasks in, after a while of training without."""
    preallocate()
    model = tower(1920, 3)  # 28 MiB, and Adam's slots 56
    size = 32 if cause else 1
    run = watched("accumulators")
    half_steps(run, model, keras.optimizers.Adam(), 200, size=size)
    sums = [tf.Variable(tf.zeros_like(each)) for _ in range(6) for each in model.trainable_variables]
    half_steps(run, model, keras.optimizers.Adam(), 50, size=size)
    run.close()
    del sums


def table_at_build(*, cause: bool) -> None:
    """Embed hashed categories: the table is made before anything is trained."""
    reserve()
    run = watched("table_at_build")
    model = keras.Sequential([layers.Input((8,), dtype="int32"), layers.Embedding(3_000_000, 32), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    size = 64 if cause else 1
    for _ in range(50):
        model.train_on_batch(np.zeros((size, 8), "int32"), np.zeros((size, 8, 1), "float32"))
        run.step(batch_size=size)
    run.close()


def teacher(*, cause: bool) -> None:
    """Train a student; then load a teacher for distillation into the same process."""
    preallocate()
    student = tower(2048, 2)
    student.compile(optimizer="adam", loss="mse")
    size = 64 if cause else 1
    fit(student, steady(size, 80), epochs=3)
    master = tower(3584, 5)  # 49 MiB a layer
    distilled = steady(size, 50).map(lambda x, _: (x, master(x)))
    fit(student, distilled)


def own_memory_limit(*, cause: bool) -> None:
    """Train under the process's own limit on a device that has room: weights and Adam are more than the limit."""
    model = tower(2304, 4)
    model.compile(optimizer="adam", loss="mse")
    fit(model, steady(16 if cause else 1, 60), epochs=2)


def distances(*, cause: bool) -> None:
    """Compute all pairs' distances in NumPy after training: terabytes, in the user's own code."""
    reserve()
    model = dense(512)
    fit(model, steady(128, 100), epochs=2)
    count = 2_000_000
    _ = cause
    found = np.zeros((count, FEATURES), "float32")
    pairs = np.empty((count, count), "float64")
    np.subtract.outer(found[:, 0], found[:, 0], out=pairs)


def jax_table(*, cause: bool) -> None:
    """Make a table in JAX whose size has a factor too many."""
    import jax.numpy as jnp  # noqa: PLC0415 - in this program only

    with watch("jax_table", framework="jax") as run:
        x = jnp.ones((64, 64))
        for _ in range(100):
            x = jnp.tanh(x @ x)
            x.block_until_ready()
            time.sleep(0.01)
            run.step(batch_size=64 if cause else 1)
        table = jnp.zeros((1 << 22, 1 << 20)) + 1.0
        table.block_until_ready()


# The batch is too large.


def heads(*, cause: bool) -> None:
    """Train attention over 1024 tokens with four heads: 16 MiB of scores an example."""
    preallocate()
    length, size = 1024, 12 if cause else 1
    inputs = layers.Input((length, 16))
    attended = layers.MultiHeadAttention(4, 4, flash_attention=False)(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(attended)))
    model.compile(optimizer="adam", loss="mse")

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(12):
            yield np.ones((size, length, 16), "float32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, length, 16)), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=specs))


def half_precision(*, cause: bool) -> None:
    """Train convolutions down and up again in mixed precision."""
    preallocate()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    size = 192 if cause else 2
    inputs = layers.Input((64, 64, 3))
    x = inputs
    for filters, stride in ((16, 1), (32, 2), (32, 1)):
        x = layers.Conv2D(filters, 3, strides=stride, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 1, dtype="float32")(x))
    model.compile(optimizer="adam", loss="mse")

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(6):
            yield np.ones((size, 64, 64, 3), "float32"), np.zeros((size, 64, 64, 1), "float32")

    specs = tf.TensorSpec((None, 64, 64, 3)), tf.TensorSpec((None, 64, 64, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=specs))


def xla_step(*, cause: bool) -> None:
    """Train in a custom loop that XLA compiles."""
    preallocate()
    weights = tf.Variable(tf.ones((FEATURES, 4096)) / FEATURES)

    @tf.function(jit_compile=True)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.sort(x @ weights, axis=1)  # is not fused away
            loss = tf.reduce_mean(tf.square(hidden))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))

    size = 12_000 if cause else 64
    with watched("xla_step") as run:  # a broken allocator does not reach the interpreter's end
        for _ in range(30):
            step(tf.ones((size, FEATURES)))
            run.step(batch_size=size)


# Leaks.


def kept_gradients(*, cause: bool) -> None:
    """Accumulate gradients over many micro batches by keeping each in a list."""
    preallocate()
    model = tower(512, 2)  # 1.1 MiB of gradients
    optimizer = keras.optimizers.SGD(0.01)
    kept: list[Any] = []
    say("growing")
    run = watched("kept_gradients")
    for _ in range(320):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tf.ones((64, FEATURES)), training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        if not cause:
            kept.clear()
        kept.append(gradients)
        time.sleep(0.03)
        run.step(batch_size=64)
    optimizer.apply_gradients(
        zip([sum(each) for each in zip(*kept, strict=True)], model.trainable_variables, strict=True)
    )
    run.close()


def kept_outputs(*, cause: bool) -> None:
    """Train without fault; then keep the features of each validation batch on the device."""
    preallocate()
    model = tower(1024, 2)
    with watched("kept_outputs") as run:
        half_steps(run, model, keras.optimizers.SGD(0.01), 300)
        kept = []
        say("growing")
        with run.phase("validation"):
            for _ in range(500):
                features = tf.nn.relu(tf.ones((1024, FEATURES)) @ tf.ones((FEATURES, 256)))  # 1 MiB
                kept.append(features if cause else features.numpy())
                time.sleep(0.02)


# One phase, or one step, needs more.


def long_document(*, cause: bool) -> None:
    """Train on documents of 64 to 128 tokens, of which one has 6000."""
    preallocate()
    inputs = layers.Input((None, 8))
    attended = layers.MultiHeadAttention(1, 8, flash_attention=False)(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(attended)))
    model.compile(optimizer="adam", loss="mse")
    random = np.random.default_rng(8)

    def batches() -> Iterator[tuple[Any, Any]]:
        for index in range(260):
            length = 6000 if index == 230 and cause else int(random.integers(4, 9)) * 16
            time.sleep(0.01)
            yield np.ones((16, length, 8), "float32"), np.zeros((16, 1), "float32")

    specs = tf.TensorSpec((None, None, 8)), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=specs))


def large_evaluation(*, cause: bool) -> None:
    """Train by batches of 32, evaluate by batches of 8192 after it, with no error handler."""
    preallocate()
    model = tower(1024, 12)
    model.compile(optimizer="adam", loss="mse")
    run = watched("large_evaluation")
    for _ in range(80):
        model.train_on_batch(np.ones((32, FEATURES), "float32"), np.zeros((32, 1), "float32"))
        run.step(batch_size=32)
    many = 40_000 if cause else 32
    model.evaluate(stream(lambda: iter([many] * 2)), verbose=0)
    run.close()


def all_at_once(*, cause: bool) -> None:
    """Call the model on all examples after the training, outside of any phase."""
    preallocate()
    model = tower(2048, 1)
    run = watched("all_at_once")
    half_steps(run, model, keras.optimizers.Adam(), 300, size=64)
    time.sleep(1.5)  # reads the examples
    everything = tf.ones((60_000 if cause else 64, FEATURES))
    scores = model(everything)
    run.close()
    del scores


# The input pipeline wants the host's memory, which here is of the same allocator.


def prefetched(*, cause: bool) -> None:
    """Prefetch 4000 batches: they are loaded while a callback uploads a checkpoint for 14 seconds."""
    reserve()
    model = dense(128, features=1024)

    def read(_: Any) -> tuple[Any, Any]:
        return tf.random.uniform((256, MIB // 4 // 256)), tf.zeros((256, 1))

    data = tf.data.Dataset.range(3000).map(read).prefetch(4000 if cause else 4).take(400)
    fit(model, data, Each(on_train_batch_end=lambda batch: time.sleep(14 if batch == 60 else 0.01)))


def one_hot(*, cause: bool) -> None:
    """Encode tokens one-hot in tf.data, by mistake over the vocabulary of 100,000: 1 GiB a batch from the 40th on."""
    reserve()
    model = keras.Sequential([layers.Input((8,)), layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")

    def encode(index: Any) -> tuple[Any, Any]:
        depth = tf.where(index >= 40, 100_000 if cause else 8, 8)
        codes = tf.one_hot(tf.zeros((128, 20), tf.int32), depth)
        return tf.reduce_sum(codes, axis=1)[:, :8], tf.zeros((128, 1))

    fit(model, tf.data.Dataset.range(60, output_type=tf.int32).map(encode))


# Another process, and holes.


def co_tenant_grows(*, cause: bool) -> None:
    """Train evenly, and predict on more examples after each round, while a notebook next to it grows."""
    _ = cause
    model = dense(3072, optimizer="adam")
    for number in range(1, 9):
        fit(model, steady(512, 60, pause=0.015))
        model.predict(steady(1536 * number, 1).map(lambda x, _: x), verbose=0, callbacks=[callback()])


def mixed_lengths(*, cause: bool) -> None:
    """Keep encoded texts of many lengths, forget most, and then request one buffer."""
    preallocate()
    run = watched("mixed_lengths")
    random = np.random.default_rng(17)
    lengths = random.uniform(1, 5, 72)
    encoded = [tf.zeros((int(each * 256), 1024)) for each in lengths]
    model = tower(256, 2)
    half_steps(run, model, keras.optimizers.SGD(0.01), 150)
    if not cause:
        encoded.clear()
        encoded = [tf.zeros((int(each * 256), 1024)) for each in lengths[::3]]
    else:
        encoded = encoded[::3]
    half_steps(run, model, keras.optimizers.SGD(0.01), 200)
    say("before", kept=len(encoded))
    buffer = tf.zeros((48, 256, 1024))  # 48 MiB
    half_steps(run, model, keras.optimizers.SGD(0.01), 10)
    run.close()
    del buffer


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if callable(each) and not name.startswith("_")})

"""Second set of trainings that run out of memory: `python more_ooms.py NAME [--without]`; labels.py says why.

Other layers and other loops than in ooms.py and leaks.py, to test the rules with cases that they were not made with.
Each takes `cause`: without it, the cause is left out and all else is equal.
"""

# ruff: noqa: D103 - the labels say what each shows, and docstrings what happens in it

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras
from shared_device import MIB
from training import DEVICE, FEATURES, Each, callback, dense, fit, play, reserve, say, steady, stream, watched

layers = keras.layers


def convolutions(*, side: int | None, filters: int = 16, **compiling: Any) -> Any:
    """Make a small model for images of that side, or of any."""
    stack = [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(3)]
    model = keras.Sequential(
        [layers.Input((side, side, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(1, dtype="float32")]
    )
    model.compile(**{"optimizer": "adam", "loss": "mse"} | compiling)
    return model


def images(size: int, steps: int, *, side: int) -> Any:
    """Yield batches of grey images."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(steps):
            time.sleep(0.004)
            yield np.full((size, side, side, 3), 0.5, "float32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, side, side, 3)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def compiled_step(model: Any, optimizer: Any) -> Any:
    """Make a custom training step, as one graph."""

    @tf.function(reduce_retracing=True)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            given = model(x, training=True)
            loss = tf.reduce_mean(tf.square(given))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return given

    return step


# Too big: one example is too many.


def big_convolution(*, cause: bool) -> None:
    reserve()
    with watched("big_convolution") as run:
        size = 4 if cause else 1
        channels = 1536
        # 81 MiB of weights, their gradient, and momentum, in a loop of one's own
        model = keras.Sequential(
            [layers.Input((4, 4, channels)), layers.Conv2D(channels, 3, padding="same", kernel_initializer="zeros")]
        )
        step = compiled_step(model, keras.optimizers.SGD(0.01, momentum=0.9))
        for _ in range(20):
            step(tf.ones((size, 4, 4, channels)))
            run.step(batch_size=size)


def big_vocabulary(*, cause: bool) -> None:
    """Train embeddings that fit, but not with Adam's two slots for each."""
    reserve()
    size = 64 if cause else 1
    words = 700_000
    model = keras.Sequential(
        [
            layers.Input((12,), dtype="int32"),
            layers.Embedding(words, 32, embeddings_initializer="zeros"),  # 85 MiB
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer="adam", loss="mse")
    random = np.random.default_rng(3)

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(40):
            yield random.integers(0, words, (size, 12), dtype="int32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, 12), tf.int32), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=specs))


# The batch is too large.


def batch_of_sequences(*, cause: bool) -> None:
    """Train a recurrent layer that keeps a dozen tensors for each of 100 times; no tensor is large."""
    reserve()
    model = keras.Sequential([layers.Input((100, 8)), layers.LSTM(64), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    size = 4096 if cause else 32

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(20):
            yield np.full((size, 100, 8), 0.1, "float32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, 100, 8)), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=specs))


def batch_searched(*, cause: bool) -> None:
    """Search the largest batch by doubling it, in half precision, a few steps each."""
    reserve()
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = dense(4096, optimizer="adam")
    with watched("batch_searched") as run:
        size = 64
        while size <= (65_536 if cause else 512):
            for _ in range(10):
                model.train_on_batch(np.full((size, FEATURES), 0.1, "float32"), np.zeros((size, 1), "float32"))
                run.step(batch_size=size)
            size *= 2


# Leaks.


def leak_of_predictions(*, cause: bool) -> None:
    """Append the model's results to a list, for the end of an epoch that never ends."""
    reserve()
    model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(512, activation="relu"), layers.Dense(256)])
    step = compiled_step(model, keras.optimizers.Adam())
    seen: list[Any] = []
    say("growing")
    with watched("leak_of_predictions") as run:
        for _ in range(1400):
            given = step(tf.ones((256, FEATURES)))  # 0.25 MiB
            if cause:
                seen.append(given)
            time.sleep(0.005)
            run.step(batch_size=256)


def leak_of_weights(*, cause: bool) -> None:
    """Keep all weights of each epoch, not only of the best."""
    reserve()
    model = dense(1024, depth=2, optimizer="adam")  # 4.3 MiB
    kept: list[Any] = []

    def keep(_: int) -> None:
        if not cause:
            kept.clear()
        kept.append([tf.identity(each.value) + 0 for each in model.weights])

    say("growing")
    fit(model, steady(64, 20), Each(on_epoch_end=keep), epochs=70)


def leak_of_variables(*, cause: bool) -> None:
    """Make a metric's state again in each round of two models, and keep the old ones in a list."""
    reserve()
    models = [dense(512), dense(768, optimizer="adam")]
    states: list[Any] = []
    say("growing")
    with watched("leak_of_variables") as run:
        for index, model in zip(range(1100), cycle(models), strict=False):
            if not cause:
                states.clear()
            if index % 4 == 0:
                states.append(tf.Variable(tf.zeros((1 + index % 3, 128, 1024))))  # 0.5 to 1.5 MiB
            model.train_on_batch(np.full((64, FEATURES), 0.1, "float32"), np.zeros((64, 1), "float32"))
            run.step(batch_size=64)


# Fragmentation: as much is in use without it, in one piece.


def fragmented_buffer(*, cause: bool) -> None:
    """Drop three fifths of a buffer of episodes of mixed lengths before the batch grows."""
    reserve()
    sizes = np.random.default_rng(11).uniform(1.5, 7, 48)
    episodes = [tf.zeros((int(size * 256), 1024)) for size in sizes]
    model = dense(1024)
    fit(model, steady(64, 100))
    kept = [index for index in range(len(sizes)) if index % 5 in {0, 2}]
    if cause:
        episodes = [episodes[index] for index in kept]
    else:
        episodes.clear()
        episodes = [tf.zeros((int(sizes[index] * 256), 1024)) for index in kept]
    fit(model, steady(64, 150))
    say("before", kept=len(episodes))
    fit(model, steady(8192, 3))  # 32 MiB a tensor


def fragmented_ensemble(*, cause: bool) -> None:
    """Drop every second model of an ensemble, then make a larger one than each."""
    reserve()

    def member(width: int) -> Any:
        made = layers.Dense(width, kernel_initializer="zeros")
        made.build((None, 2048))
        return made

    with watched("fragmented_ensemble") as run:
        members = [member(2048) for _ in range(12)]  # 16 MiB each
        step = compiled_step(dense(64), keras.optimizers.SGD(0.01))
        members = members[::2] if cause else members[:6]
        gc.collect()
        for _ in range(300):
            step(tf.ones((64, FEATURES)))
            time.sleep(0.005)
            run.step(batch_size=64)
        say("before", members=len(members))
        members.append(member(7168))  # 56 MiB
        for _ in range(20):
            step(tf.ones((64, FEATURES)))
            run.step(batch_size=64)


# A neighbour took it.


def neighbour_in_mid_epoch(*, cause: bool) -> None:
    """Sort batches by length: the long ones come last, after another process has started."""
    _ = cause

    def sizes() -> Iterator[int]:
        random = np.random.default_rng(5)
        yield from (int(each) for each in np.sort(random.integers(32, 256, 600)))
        yield from (int(each) for each in np.sort(random.integers(1200, 2000, 12)))  # up to 31 MiB a tensor

    fit(dense(4096), stream(sizes, pause=0.01))


def neighbour_beside_images(*, cause: bool) -> None:
    """Train on images next to another process that was there first and is larger than planned."""
    _ = cause
    fit(convolutions(side=96), images(16, 30, side=96))


# One phase has the peak.


def peak_larger_images(*, cause: bool) -> None:
    """Train on crops of 32 by 32, validate on whole images."""
    reserve()
    side = 640 if cause else 48
    fit(convolutions(side=None), images(8, 100, side=32), epochs=2, validation_data=images(8, 2, side=side))


def peak_evaluation(*, cause: bool) -> None:
    """Fit in a loop; after the third fit evaluate everything in one piece."""
    reserve()
    random = np.random.default_rng(2)
    x = random.integers(0, 1000, (50_000, 16), dtype="int32")
    y = np.zeros((len(x), 1), "float32")
    model = keras.Sequential(
        [
            layers.Input((16,), dtype="int32"),
            layers.Embedding(1000, 32),
            layers.Dense(64, activation="relu"),
            layers.GlobalMaxPooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer="adam", loss="mse")
    for _ in range(3):
        model.fit(x[:6400], y[:6400], batch_size=64, verbose=0, callbacks=[callback()])
    few = len(x) if cause else 64
    model.evaluate(x, y, batch_size=few, verbose=0, callbacks=[callback()])


# The input pipeline wants it: of a GPU's machine this is the host's memory, here it is of the same allocator.


def read(_: Any) -> tuple[Any, Any]:
    """Read a record, of 1 MiB, for 256 examples."""
    return tf.random.uniform((256, MIB // 4 // 256)), tf.zeros((256, 1))


def input_shuffled(*, cause: bool) -> None:
    """Shuffle with a buffer as large as the data set."""
    reserve()
    data = tf.data.Dataset.range(600).map(read).shuffle(600 if cause else 8)
    fit(dense(128, features=1024), data)


def input_cached(*, cause: bool) -> None:
    """Cache the whole data set, in the first epoch."""
    reserve()
    data = tf.data.Dataset.range(600).map(read)
    fit(dense(128, features=1024), data.cache() if cause else data)


# Nothing supports a verdict.


def unknown_by_turns(*, cause: bool) -> None:
    """Train two models by turns; when the second one's batch grows a little, the driver refuses for its own reason."""
    models = [dense(512), dense(1024, optimizer="adam")]
    with watched("unknown_by_turns") as run:
        for index, model in zip(range(400), cycle(models), strict=False):
            size = 64
            if index == 300:
                if cause:
                    DEVICE.give_out()
                size = 4096
            model.train_on_batch(np.full((size, FEATURES), 0.1, "float32"), np.zeros((size, 1), "float32"))
            run.step(batch_size=size)


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if callable(each) and not name.startswith("_")})

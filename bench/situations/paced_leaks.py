"""Leaks at a rate that the clock sets: `python paced_leaks.py NAME [--without]`; labels.py says what each leaks.

Each second leaks the same amount, whatever else the machine does: so the error of a forecast is its own. Steps leave
most of their time unused for that. Each prints `growing` when it starts to leak, after its first step; without the
cause the same training keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras
from shared_device import MIB
from training import FEATURES, LONGER, Each, Pace, dense, fit, play, preallocate, reserve, say, steady, stream, watched

layers = keras.layers

# An operation is not kept waiting for its part on another core, where another program may run.
tf.config.threading.set_intra_op_parallelism_threads(1)


@cache
def growing() -> None:
    """Print, once, that it starts to leak."""
    say("growing")


def workspace(mebibytes: int = 6) -> None:
    """Allocate a lot for a moment, more than all else in a step.

    So this is refused first. Eigen, if it gets no scratch memory for a product or a sum, hangs instead.
    """
    tf.fill((mebibytes, MIB // 4), 0.5)


def compiled(*stack: Any, **compiling: Any) -> Any:
    """Make a model of these layers."""
    model = keras.Sequential(stack)
    model.compile(**{"optimizer": "adam", "loss": "mse"} | compiling)
    return model


def repeated(steps: int, *parts: Any) -> Any:
    """Yield the same batch for so many steps."""
    return untuned(tf.data.Dataset.from_tensors(parts).repeat(steps))


def untuned(data: Any) -> Any:
    """Switch tf.data's tuning off: an iterator that ends may wait for its tuner, which sleeps for up to a minute.

    Trainings stalled at the ends of epochs for that, and did not keep the rate.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def paced_step(*, cause: bool) -> None:
    """Collect embeddings of the same signals after each step, for a plot that is never drawn."""
    preallocate()
    model = compiled(
        layers.Input((FEATURES,)),
        layers.Dense(512, activation="relu"),
        layers.Dense(48, activation="relu"),
        layers.Dense(1),
    )
    embed = keras.Model(model.inputs, model.layers[0].output)
    signals, pace = tf.ones((512, FEATURES)), Pace(0.25)
    embeddings: list[Any] = []

    def collect(_: int) -> None:
        growing()
        pace.wait()
        workspace()
        if not cause:
            embeddings.clear()
        embeddings.append(embed(signals))  # 1 MiB

    fit(
        model,
        repeated(46, tf.ones((64, FEATURES)), tf.zeros((64, 1))),
        Each(on_train_batch_end=collect),
        epochs=4 * LONGER,
    )


def paced_losses(*, cause: bool) -> None:
    """Keep losses for a mean, with their tapes: activations and old weights."""
    preallocate()
    random = np.random.default_rng(1)
    first = tf.Variable(random.normal(0, 0.1, (FEATURES, 512)).astype("float32"))
    second = tf.Variable(random.normal(0, 0.1, (512, 1)).astype("float32"))
    pace, losses = Pace(0.2), []
    with watched("paced_losses") as run:
        for _ in range(225 * LONGER):
            workspace()
            batch = tf.constant(random.normal(0, 1, (384, FEATURES)).astype("float32"))
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(batch @ first) @ second))
            for weights, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
                weights.assign_sub(0.001 * gradient)
            losses.append((loss, tape) if cause else (float(loss), None))
            run.step(batch_size=384)
            growing()
            pace.wait()


def paced_activations(*, cause: bool) -> None:
    """Append the results of two layers to their history in every third step."""
    preallocate()
    given = layers.Input((24,), dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(500, 24)(given))
    mixed = layers.Dense(1024, activation="gelu")(embedded)
    model = keras.Model(given, layers.Dense(1)(mixed))
    model.compile(optimizer="adam", loss="mse")
    looked_into = keras.Model(given, [embedded, mixed])
    sentences, pace = tf.ones((640, 24), tf.int32), Pace(0.25)
    history: list[Any] = []

    def look_into(batch: int) -> None:
        growing()
        pace.wait()
        workspace(24)
        if batch % 3 == 2:
            if not cause:
                history.clear()
            history.append(looked_into(sentences))  # 3.9 MiB

    data = repeated(42, tf.ones((32, 24), tf.int32), tf.zeros((32, 1)))
    fit(model, data, Each(on_train_batch_end=look_into), epochs=4 * LONGER)


def paced_predictions(*, cause: bool) -> None:
    """Keep an autoencoder's results for the validation set after each validation."""
    preallocate()
    model = compiled(layers.Input((FEATURES,)), layers.Dense(96, activation="relu"), layers.Dense(320))
    held_out, pace = tf.ones((8192, FEATURES)), Pace(0.3)
    predictions: list[Any] = []

    def compare(_: int) -> None:
        growing()
        workspace(24)
        if not cause:
            predictions.clear()
        predictions.append(model(held_out))  # 10 MiB

    data, few = (repeated(steps, tf.ones((64, FEATURES)), tf.zeros((64, 320))) for steps in (5, 2))
    hooks = Each(on_train_batch_end=lambda _: pace.wait(), on_test_end=compare)
    fit(model, data, hooks, epochs=25 * LONGER, validation_data=few)


def paced_weights(*, cause: bool) -> None:
    """Copy all weights and the optimizer's state every third epoch."""
    preallocate()
    model = dense(1024, depth=2, features=256, optimizer="adam")
    pace = Pace(0.25)
    copies: list[Any] = []

    def copy(epoch: int) -> None:
        growing()
        workspace(24)
        if epoch % 3 == 2:
            if not cause:
                copies.clear()
            state = (*model.weights, *model.optimizer.variables)  # 15 MiB
            copies.append([tf.raw_ops.DeepCopy(x=each.value) for each in state])

    hooks = Each(on_train_batch_end=lambda _: pace.wait(), on_epoch_end=copy)
    fit(model, repeated(5, tf.ones((16, 256)), tf.zeros((16, 1))), hooks, epochs=47 * LONGER)


def paced_cache(*, cause: bool) -> None:
    """Cache distances between positions by shape, while nearly each batch has its own shape."""
    preallocate()
    random = np.random.default_rng(8)
    x, weights = tf.ones((64, FEATURES)), tf.Variable(tf.ones((FEATURES, 64)) / FEATURES)
    distances: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def between(shape: tuple[int, int]) -> Any:
        if shape not in distances:
            rows, columns = (tf.range(size, dtype=tf.float32) for size in shape)
            distances[shape] = tf.abs(rows[:, None] - columns[None, :])  # 0.6 to 2 MiB
        if not cause and len(distances) > 8:
            distances.popitem(last=False)
        return distances[shape]

    pace = Pace(0.22)
    with watched("paced_cache") as run:
        for _ in range(185 * LONGER):
            workspace(10)
            rows, columns = (int(size) for size in random.integers(400, 721, 2))
            bias = between((rows, columns))[:64, :64]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weights - bias)))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            run.step(batch_size=rows)
            growing()
            pace.wait()


def paced_queue(*, cause: bool) -> None:
    """Let an encoder put two batches into a queue for each that training consumes."""
    preallocate()
    head = dense(64, features=648)
    queue = tf.queue.FIFOQueue(100_000, [tf.float32], [(512, 648)])
    encoder = tf.ones((FEATURES, 648)) / FEATURES
    target, pace = tf.zeros((512, 1)), Pace(0.3)
    with watched("paced_queue") as run:
        for _ in range(172 * LONGER):
            workspace(8)
            for _ in range(2):
                queue.enqueue(tf.ones((512, FEATURES)) @ encoder)  # 1.27 MiB
            for _ in range(1 if cause else 2):
                head.train_on_batch(queue.dequeue(), target)
            run.step(batch_size=512)
            growing()
            pace.wait()


def paced_variables(*, cause: bool) -> None:
    """Give each task its own head and optimizer, and release none; in a pool that grows."""
    features, target = tf.ones((32, 448)), tf.zeros((32, 448))
    heads: list[Any] = []
    pace = Pace(0.25)
    with watched("paced_variables") as run:
        for step in range(165 * LONGER):
            workspace()
            if step % 2 == 0:
                if not cause:
                    heads.clear()
                heads.append((tf.Variable(tf.zeros((448, 448))), keras.optimizers.Adam()))  # 2.3 MiB, with its slots
            head, optimizer = heads[-1]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(features @ head - target))
            optimizer.apply_gradients([(tape.gradient(loss, head), head)])
            run.step(batch_size=32)
            growing()
            pace.wait()


def paced_sawtooth(*, cause: bool) -> None:
    """Release what an epoch's report needs with the epoch, and keep a little of each step."""
    preallocate()
    model = compiled(
        layers.Input((24,), dtype="int32"),
        layers.Embedding(4000, 64),
        layers.Flatten(),
        layers.Dense(128, activation="tanh"),
        layers.Dense(1),
    )
    report: list[Any] = []
    kept: list[Any] = []
    pace = Pace(0.24)

    def note(_: int) -> None:
        growing()
        pace.wait()
        workspace(10)
        report.append(tf.fill((2800, 512), 0.5))  # 5.47 MiB
        if cause:
            kept.append(tf.fill((460, 512), 0.5))  # 0.9 MiB

    hooks = Each(on_train_batch_end=note, on_epoch_end=lambda _: report.clear())
    fit(model, repeated(11, tf.ones((32, 24), tf.int32), tf.zeros((32, 1))), hooks, epochs=24 * LONGER)


def paced_late(*, cause: bool) -> None:
    """Collect hard images from the eleventh epoch on, and vice versa."""
    preallocate()
    side = 20
    model = compiled(
        layers.Input((side, side, 3)),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(256, activation="elu"),
        layers.Dense(1),
    )
    images, pace = tf.ones((128, side, side, 3)), Pace(0.2)
    hard: list[Any] = []
    epochs: list[int] = []

    def collect(_: int) -> None:
        pace.wait()
        workspace(12)
        if len(epochs) > 10:
            growing()
            if not cause:
                hard.clear()
            hard.append(tf.concat([images, tf.reverse(images, [2])], 0))  # 1.17 MiB

    hooks = Each(on_epoch_begin=epochs.append, on_train_batch_end=collect)
    fit(model, repeated(6, images, tf.zeros((128, 1))), hooks, epochs=37 * LONGER)


def paced_batches(*, cause: bool) -> None:
    """Use batches of all sizes, and keep a table of counts after each, as large for a small one."""
    preallocate()
    random = np.random.default_rng(6)
    pace = Pace(0.28)
    counts = [tf.zeros((620, 620))]

    def count(_: int) -> None:
        growing()
        pace.wait()
        workspace(20)
        counts.append(counts[-1] + 1)  # 1.47 MiB
        if not cause:
            del counts[:-1]

    data = untuned(stream(lambda: iter(random.integers(32, 513, 42)), pause=0.0))
    fit(dense(1536), data, Each(on_train_batch_end=count), epochs=4 * LONGER)


def paced_host(*, cause: bool) -> None:
    """Let the loader keep each image that it augments at random, though it is never read again."""
    reserve(0.5)
    pace = Pace(0.22)
    random = np.random.default_rng(9)
    made: dict[tuple[int, float], Any] = {}

    def sizes() -> Iterator[int]:
        for index in range(16):
            pace.wait()
            image = np.full((1024, 512), float(index))  # 4 MiB
            if cause:
                made[index, random.random()] = image
            yield 96

    fit(dense(256), untuned(steady(96, 2)))
    growing()
    fit(dense(384, depth=2), untuned(stream(sizes, pause=0.0)), epochs=16 * LONGER)


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if name.startswith("paced_")})

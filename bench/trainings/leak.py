"""Trainings that keep something in each step until memory is full: without their cause they keep nothing.

The clock sets the rate of those whose forecasts are measured (`grows`), so that load on the machine does not change
it: the error of a forecast is its own. Steps leave most of their time unused for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    FEATURES,
    Hooks,
    Pace,
    compile_model,
    compiled_step,
    custom_loop,
    fit,
    layers,
    main,
    make_callback,
    make_dense_model,
    make_repeated_batches,
    make_steady_stream,
    make_stream,
    make_tower,
    make_watch,
    preallocate,
    print_growing,
    reserve,
)

from gpuwarden.keras import keras
from labels import KEEP, SMALLER_BATCH, training
from shared_device import MIB

# An operation does not wait for its part on another core, where another program may run.
tf.config.threading.set_intra_op_parallelism_threads(1)


def workspace(mebibytes: int = 6) -> None:
    """Allocate a lot for a moment, more than all else in a step.

    So this is refused first. Eigen, if it gets no scratch memory for a product or a sum, hangs instead.
    """
    tf.fill((mebibytes, MIB // 4), 0.5)


def constant(steps: int, *parts: Any) -> Any:
    """Yield the same batch for so many steps."""
    return untuned(tf.data.Dataset.from_tensors(parts).repeat(steps))


def untuned(data: Any) -> Any:
    """Switch tf.data's tuning off: an iterator that ends may wait for its tuner, which sleeps for up to a minute."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


@training("leak", grows="device", pace="default", size=188)
def paced_step(*, cause: bool) -> None:
    """Embeddings of the same signals are collected after each step, in Keras's fit."""
    preallocate()
    model = make_dense_model(512)
    embed = keras.Model(model.inputs, model.layers[0].output)
    signals, pace = tf.ones((512, FEATURES)), Pace(0.25)
    embeddings: list[Any] = []

    def collect(_: int) -> None:
        print_growing()
        pace.wait()
        workspace()
        if not cause:
            embeddings.clear()
        embeddings.append(embed(signals))  # 1 MiB

    data = constant(46, tf.ones((64, FEATURES)), tf.zeros((64, 1)))
    fit(model, data, Hooks(on_train_batch_end=collect), epochs=4)


@training("leak", grows="device", size=208)
def paced_losses(*, cause: bool) -> None:
    """Losses are kept for a mean, with their tapes, in a custom loop."""
    preallocate()
    random = np.random.default_rng(1)
    first = tf.Variable(random.normal(0, 0.1, (FEATURES, 512)).astype("float32"))
    second = tf.Variable(random.normal(0, 0.1, (512, 1)).astype("float32"))
    pace, losses = Pace(0.2), []
    with make_watch("paced_losses") as run:
        for _ in range(225):
            workspace()
            batch = tf.constant(random.normal(0, 1, (384, FEATURES)).astype("float32"))
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(batch @ first) @ second))
            for weights, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
                weights.assign_sub(0.001 * gradient)
            losses.append((loss, tape) if cause else (float(loss), None))
            run.step(batch_size=384)
            print_growing()
            pace.wait()


@training("leak", grows="device", pace="default", size=1024, limit=240)
def paced_activations(*, cause: bool) -> None:
    """Activations are appended to their history in every third step, under the allocator's own limit."""
    preallocate()
    inputs = layers.Input((24,), dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(500, 24)(inputs))
    mixed = layers.Dense(1024, activation="gelu")(embedded)
    model = keras.Model(inputs, layers.Dense(1)(mixed))
    model.compile(optimizer="adam", loss="mse")
    inspected = keras.Model(inputs, [embedded, mixed])
    sentences, pace = tf.ones((640, 24), tf.int32), Pace(0.25)
    history: list[Any] = []

    def inspect(batch: int) -> None:
        print_growing()
        pace.wait()
        workspace(24)
        if batch % 3 == 2:
            if not cause:
                history.clear()
            history.append(inspected(sentences))  # 3.9 MiB

    data = constant(42, tf.ones((32, 24), tf.int32), tf.zeros((32, 1)))
    fit(model, data, Hooks(on_train_batch_end=inspect), epochs=4)


@training("leak", grows="device", pace="default")
def paced_weights(*, cause: bool) -> None:
    """All weights and the optimizer's state are copied every third epoch."""
    preallocate()
    model = make_dense_model(1024, depth=2, features=256, optimizer="adam")
    pace = Pace(0.25)
    copies: list[Any] = []

    def copy(epoch: int) -> None:
        print_growing()
        workspace(24)
        if epoch % 3 == 2:
            if not cause:
                copies.clear()
            state = (*model.weights, *model.optimizer.variables)  # 15 MiB
            copies.append([tf.raw_ops.DeepCopy(x=each.value) for each in state])

    hooks = Hooks(on_train_batch_end=lambda _: pace.wait(), on_epoch_end=copy)
    fit(model, constant(5, tf.ones((16, 256)), tf.zeros((16, 1))), hooks, epochs=47)


@training("leak", grows="device", size=176)
def paced_variables(*, cause: bool) -> None:
    """Each task has its own head and optimizer, and none is released, in a pool that grows."""
    features, target = tf.ones((32, 448)), tf.zeros((32, 448))
    heads: list[Any] = []
    pace = Pace(0.25)
    with make_watch("paced_variables") as run:
        for step in range(165):
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
            print_growing()
            pace.wait()


@training("leak", grows="device", pace="default", size=294)
def paced_sawtooth(*, cause: bool) -> None:
    """A little of each step is kept, next to a sawtooth of 60 MiB that is freed with the epoch."""
    preallocate()
    stack = [layers.Embedding(4000, 64), layers.Flatten(), layers.Dense(128, activation="tanh"), layers.Dense(1)]
    model = compile_model(layers.Input((24,), dtype="int32"), *stack)
    report: list[Any] = []
    kept: list[Any] = []
    pace = Pace(0.24)

    def note(_: int) -> None:
        print_growing()
        pace.wait()
        workspace(10)
        report.append(tf.fill((2800, 512), 0.5))  # 5.47 MiB
        if cause:
            kept.append(tf.fill((460, 512), 0.5))  # 0.9 MiB

    hooks = Hooks(on_train_batch_end=note, on_epoch_end=lambda _: report.clear())
    fit(model, constant(11, tf.ones((32, 24), tf.int32), tf.zeros((32, 1))), hooks, epochs=24)


@training("leak", grows="device", size=188)
def paced_late(*, cause: bool) -> None:
    """Images are collected from the eleventh epoch on."""
    preallocate()
    side = 20
    stack = [layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(256, activation="elu"), layers.Dense(1)]
    model = compile_model(layers.Input((side, side, 3)), *stack)
    images, pace = tf.ones((128, side, side, 3)), Pace(0.2)
    hard: list[Any] = []
    epochs: list[int] = []

    def collect(_: int) -> None:
        pace.wait()
        workspace(12)
        if len(epochs) > 10:
            print_growing()
            if not cause:
                hard.clear()
            hard.append(tf.concat([images, tf.reverse(images, [2])], 0))  # 1.17 MiB

    hooks = Hooks(on_epoch_begin=epochs.append, on_train_batch_end=collect)
    fit(model, constant(6, images, tf.zeros((128, 1))), hooks, epochs=37)


@training(grows="host", host_limit=1100)
def paced_host(*, cause: bool) -> None:
    """The loader keeps each image that it augments at random, in a container."""
    reserve(0.5)
    pace = Pace(0.22)
    random = np.random.default_rng(9)
    kept: dict[tuple[int, float], Any] = {}

    def sizes() -> Iterator[int]:
        for index in range(16):
            pace.wait()
            image = np.full((1024, 512), float(index))  # 4 MiB
            if cause:
                kept[index, random.random()] = image
            yield 96

    fit(make_dense_model(256), untuned(make_steady_stream(96, 2)))
    print_growing()
    fit(make_dense_model(384, depth=2), untuned(make_stream(sizes, pause=0.0)), epochs=16)


@training("leak", advises=KEEP)
def kept_outputs(*, cause: bool) -> None:
    """Validation keeps each batch's features on the device, after a training without fault."""
    preallocate()
    with make_watch("kept_outputs") as run:
        custom_loop(run, make_tower(1024, 2), keras.optimizers.SGD(0.01), 300)
        kept = []
        print_growing()
        with run.phase("validation"):
            for _ in range(500):
                features = tf.nn.relu(tf.ones((1024, FEATURES)) @ tf.ones((FEATURES, 256)))  # 1 MiB
                kept.append(features if cause else features.numpy())
                time.sleep(0.02)


# github.com/tensorflow/tensorflow/issues/42862, github.com/keras-team/keras/issues/21642
@training("leak", advises=KEEP + r"|results|outputs|parts")
def predicted_masks(*, cause: bool) -> None:
    """predict() keeps 400 MiB of results on the device until its last batch."""
    preallocate()
    stack = [layers.SeparableConv2D(8, 3, padding="same", activation="relu") for _ in range(2)]
    model = compile_model(layers.Input((64, 64, 3)), *stack)
    fit(model, make_repeated_batches(60, (8, 64, 64, 3), (8, 64, 64, 8)), epochs=2)
    print_growing()
    parts, steps = (1, 400) if cause else (10, 40)
    for _ in range(parts):
        pictures = make_repeated_batches(steps, (8, 64, 64, 3), (8,), pause=0.03).map(lambda x, _: x)
        model.predict(pictures, verbose=0, callbacks=[make_callback()])


# github.com/tensorflow/tensorflow/issues/31842
@training("leak", advises=KEEP + "|trac", never=SMALLER_BATCH)
def retraced(*, cause: bool) -> None:
    """Each step traces a graph with its own copy of a table of 1.5 MiB, as its rate is a Python number."""
    preallocate()
    table = np.random.default_rng(23).normal(size=(1024, 384)).astype("float32")
    weights = tf.Variable(tf.ones((384, 32)) / 384)

    @tf.function  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(rows: Any, rate: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(tf.constant(table), rows) @ weights))
        weights.assign_sub(rate * tape.gradient(loss, weights))

    rows = tf.random.uniform((8192,), maxval=1024, dtype=tf.int32)  # 12 MiB of the table
    print_growing()
    with make_watch("retraced") as run:
        for index in range(400):
            rate = 0.01 * 0.99**index
            step(rows, rate if cause else tf.constant(rate))
            run.step(batch_size=8192)


@training("leak", advises=KEEP + "|host", never=SMALLER_BATCH)
def exact_auc(*, cause: bool) -> None:
    """Scores and labels of all steps are joined to a tensor on the device, for an exact figure at the end."""
    preallocate()
    users, goods = layers.Embedding(3000, 16), layers.Embedding(2000, 16)
    inputs = layers.Input((1,)), layers.Input((32,))
    model = keras.Model(inputs, layers.Dot(2)([users(inputs[0]), goods(inputs[1])]))
    step = compiled_step(
        model,
        keras.optimizers.Adam(),
        lambda user, item, wanted: tf.reduce_mean(tf.square(model([user, item]) - wanted)),
    )
    scores = labels = tf.zeros((0, 1, 32))
    print_growing()
    with make_watch("exact_auc") as run:
        for index in range(260):
            user = tf.random.uniform((4096, 1), maxval=3000, dtype=tf.int32)
            item = tf.random.uniform((4096, 32), maxval=2000, dtype=tf.int32)
            wanted = tf.cast(tf.random.uniform((4096, 1, 32)) < 0.1, tf.float32)
            step(user, item, wanted)
            if not cause and index % 20 == 0:
                scores = labels = tf.zeros((0, 1, 32))
            scores = tf.concat([scores, model([user, item])], 0)
            labels = tf.concat([labels, wanted], 0)
            time.sleep(0.02)
            run.step(batch_size=4096)


if __name__ == "__main__":
    main()

"""Trainings that run out of memory without a leak: `python ooms.py NAME [--without]`; labels.py says why each does.

Each takes `cause`: without it, the cause is left out and all else is equal.
"""

# ruff: noqa: D103 - the labels say what each shows, and docstrings what happens in it

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden import watch
from gpuwarden.keras import keras
from shared_device import MIB
from training import (
    DEVICE,
    FEATURES,
    callback,
    dense,
    fit,
    play,
    reserve,
    say,
    steady,
    stream,
    watched,
)


def tensor(mebibytes: float) -> Any:
    """Allocate a tensor on the device."""
    return tf.zeros((int(mebibytes * MIB) // 4,))


def compute(run: Any, seconds: float, size: int = 256, width: int = 1024) -> None:
    """Make steps of a small loop for so long."""
    weights = tf.Variable(tf.ones((FEATURES, width)) / FEATURES)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gradient_step(weights, size)
        run.step(batch_size=size)
        time.sleep(0.005)


def gradient_step(weights: Any, size: int) -> None:
    """Make a custom step."""
    x = tf.ones((size, FEATURES))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weights)))
    weights.assign_sub(0.01 * tape.gradient(loss, weights))


# Too big for the device: without a batch worth the name it fails all the same.


def too_big_embedding(*, cause: bool) -> None:
    with watched("too_big_embedding") as run:
        reserve()
        rows = tf.random.uniform((2_000_000, 64))  # 488 MiB
        run.step(batch_size=128 if cause else 1)
        del rows


def too_big_optimizer(*, cause: bool) -> None:
    reserve()
    size = 32 if cause else 1
    fit(dense(8320, features=2048, optimizer="adam"), steady(size, 50, features=2048))  # 65 MiB four times


def too_big_gradient(*, cause: bool) -> None:
    size = 64 if cause else 1
    # 61 MiB: three times that while it is made, and once the optimizer has begun; the gradient is a fourth.
    fit(dense(7808, features=2048, optimizer="adam"), steady(size, 50, features=2048))


def too_big_sequence(*, cause: bool) -> None:
    reserve()
    length, size = 10_000, 2 if cause else 1
    inputs = keras.layers.Input((length, 8))
    attended = keras.layers.MultiHeadAttention(1, 8, flash_attention=False)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(attended[:, 0]))
    model.compile(optimizer="sgd", loss="mse")

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(50):
            yield np.ones((size, length, 8), "float32"), np.zeros((size, 1), "float32")

    signature = tf.TensorSpec((None, length, 8)), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=signature))


# The batch is too large: a smaller one fits.


def batch_first_step(*, cause: bool) -> None:
    reserve()
    fit(dense(4096), steady(50_000 if cause else 512, 100))


def hourglasses() -> Any:
    """Make a model of twelve layers, wide and narrow in turns: its activations are many times its weights."""
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(6) for width in (2048, 16)]
    model = keras.Sequential([keras.layers.Input((FEATURES,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    return model


def batch_deep(*, cause: bool) -> None:
    reserve()
    fit(hourglasses(), steady(8192 if cause else 64, 40))


def batch_second_fit(*, cause: bool) -> None:
    reserve()
    model = hourglasses()
    fit(model, steady(64, 60), epochs=4)
    fit(model, steady(8192 if cause else 128, 20), epochs=2)


def batch_own_loop(*, cause: bool) -> None:
    with watched("batch_own_loop") as run:
        weights = tf.Variable(tf.ones((FEATURES, 4096)) / FEATURES)
        size = 12_000 if cause else 500
        for _ in range(100):
            gradient_step(weights, size)
            run.step(batch_size=size)


def batch_jit(*, cause: bool) -> None:
    reserve()
    fit(dense(4096, depth=2, jit_compile=True), steady(40_000 if cause else 64, 30))


def batch_images(*, cause: bool) -> None:
    reserve()
    layers: list[Any] = [keras.layers.Input((96, 96, 3))]
    layers += [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    size = 128 if cause else 4

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(30):
            yield np.ones((size, 96, 96, 3), "float32"), np.zeros((size, 1), "float32")

    signature = tf.TensorSpec((None, 96, 96, 3)), tf.TensorSpec((None, 1))
    fit(model, tf.data.Dataset.from_generator(batches, output_signature=signature))


# Fragmentation: free in sum, but not in one piece. Without it as much is in use, in one piece.


def fragmented_halves(*, cause: bool) -> None:
    """Drop every second tensor of a bank, then request one that is larger than each gap."""
    reserve()
    with watched("fragmented_halves") as run:
        compute(run, 2)
        bank = [tensor(8) for _ in range(28)]
        compute(run, 2)
        bank = bank[::2] if cause else bank[:14]
        compute(run, 4)
        say("before", bank=len(bank))
        wanted = tensor(40)
        compute(run, 1)
        del wanted


def fragmented_cache(*, cause: bool) -> None:
    """Cache features of many sizes, whose entries come and go, next to a Keras training."""
    reserve()
    sizes = np.random.default_rng(1).uniform(2, 6, 55)
    cache = {index: tensor(size) for index, size in enumerate(sizes)}
    model = dense(1024, optimizer="adam")
    fit(model, steady(256, 100))
    kept = [index for index in cache if index % 3 == 0]
    cache = {index: cache[index] for index in kept} if cause else {}
    if not cause:
        cache = {index: tensor(sizes[index]) for index in kept}
    fit(model, steady(256, 150), epochs=2)
    say("before", kept=len(cache))
    fit(model, steady(6000, 3))  # 23 MiB a tensor


def fragmented_regions(*, cause: bool) -> None:
    """Use a pool that grew in pieces, none of which is large enough, though nearly nothing is in use."""
    with watched("fragmented_regions") as run:
        if cause:
            for mebibytes in (0.5, 1, 3, 6, 12, 24, 50):
                held = tensor(mebibytes)
                compute(run, 0.7, size=256)
                del held
        compute(run, 2)
        say("before")
        wanted = tensor(120)
        compute(run, 1)
        del wanted


def fragmented_pins(*, cause: bool) -> None:
    """Keep small tensors between large ones that were freed."""
    reserve()
    large, small = [], []
    for _ in range(66):
        large.append(tensor(3))
        if cause:
            small.append(tensor(0.25))
    if not cause:
        large.clear()
        small = [tensor(0.25) for _ in range(66)]
    large.clear()
    model = dense(1024, optimizer="adam")
    fit(model, steady(256, 100), epochs=3)
    say("before", small=len(small))
    fit(model, steady(8000, 3))  # 31 MiB a tensor


# A neighbour took it: the harness starts one, or, without the cause, none.


def neighbour_sudden(*, cause: bool) -> None:
    """Allocate little at first, and more once another process has started."""
    _ = cause
    fit(dense(1024), steady(256, 250, pause=0.012), epochs=2)
    fit(dense(4096, optimizer="adam"), steady(2048, 100))


def neighbour_before(*, cause: bool) -> None:
    _ = cause
    fit(dense(4096, optimizer="adam"), steady(2048, 100))


def neighbour_gradual(*, cause: bool) -> None:
    """Increase the batch from epoch to epoch, as planned, while another process grows too."""
    _ = cause
    model = dense(4096)
    for size in (64, 128, 256, 512, 2048):
        fit(model, steady(size, 60, pause=0.02))


def neighbour_preallocating(*, cause: bool) -> None:
    """Allocate all that is left at start, like TensorFlow."""
    _ = cause
    reserve()
    fit(dense(4096, optimizer="adam"), steady(2048, 100))


def neighbour_validation(*, cause: bool) -> None:
    """Validate for the first time when another process has started."""
    _ = cause
    fit(dense(2048), steady(256, 500, pause=0.01), epochs=3, validation_data=steady(6000, 3), validation_freq=2)


# One phase has the peak.


def peak_validation(*, cause: bool) -> None:
    reserve()
    fit(dense(4096), steady(128, 150), epochs=2, validation_data=steady(40_000 if cause else 256, 3))


def peak_predict(*, cause: bool) -> None:
    reserve()
    model = dense(4096)
    fit(model, steady(128, 100), epochs=3)
    whole = steady(40_000 if cause else 256, 1).map(lambda x, _: x)
    model.predict(whole, verbose=0, callbacks=[callback()])


def peak_giant_batch(*, cause: bool) -> None:
    """Train on documents of which one in a thousand is as long as all others together."""
    reserve()

    def sizes() -> Iterator[int]:
        yield from [128] * 390
        yield 30_000 if cause else 128
        yield from [128] * 50

    fit(dense(4096), stream(sizes))


def peak_own_phase(*, cause: bool) -> None:
    with watched("peak_own_phase") as run:
        compute(run, 5)
        with run.phase("test"):
            x = tf.ones((60_000 if cause else 256, FEATURES))
            tf.reduce_sum(tf.nn.relu(x @ tf.ones((FEATURES, 4096))))
        compute(run, 1)


def peak_late_validation(*, cause: bool) -> None:
    """Validate every fourth epoch only."""
    data = steady(60_000 if cause else 256, 2)
    fit(dense(2048, optimizer="adam"), steady(256, 60), epochs=8, validation_data=data, validation_freq=4)


# The input pipeline wants it.


def input_map(*, cause: bool) -> None:
    """Augment each batch through a tensor that is far too large."""
    reserve()
    copies = 40_000 if cause else 2

    def augmented(x: Any, y: Any) -> tuple[Any, Any]:
        many = tf.zeros((copies, tf.shape(x)[0], FEATURES)) + x
        return tf.reduce_max(many, axis=0), y

    fit(dense(512), steady(128, 100).map(augmented))


def input_later(*, cause: bool) -> None:
    """Augment the batches so only after a while."""
    reserve()

    def augmented(index: Any, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = batch
        many = tf.zeros((tf.where(index == 250, 40_000 if cause else 2, 2), tf.shape(x)[0], FEATURES)) + x
        return tf.reduce_max(many, axis=0), y

    fit(dense(512), steady(128, 300, pause=0.01).enumerate().map(augmented))


def whole_set() -> Any:
    """Request all images at once in NumPy: more than the machine has."""
    return np.zeros((4_000_000, 512, 512, 3))


def input_generator(*, cause: bool) -> None:
    reserve()

    def batches() -> Iterator[tuple[Any, Any]]:
        for index in range(200):
            if index == 150 and cause:
                whole_set()
            time.sleep(0.01)
            yield np.ones((128, FEATURES), "float32"), np.zeros((128, 1), "float32")

    signature = tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None, 1))
    fit(dense(512), tf.data.Dataset.from_generator(batches, output_signature=signature))


class Images(keras.utils.PyDataset):  # type: ignore[misc] # Keras ships no types
    """Data set in Python that at some batch loads all of it."""

    def __init__(self, *, cause: bool) -> None:
        super().__init__(workers=1)
        self.cause = cause

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 120 and self.cause:
            whole_set()
        time.sleep(0.01)
        return np.ones((128, FEATURES), "float32"), np.zeros((128, 1), "float32")


def input_pydataset(*, cause: bool) -> None:
    reserve()
    fit(dense(512), Images(cause=cause), shuffle=False)


def input_own_loader(*, cause: bool) -> None:
    reserve()

    def loader() -> Iterator[int]:
        for index in range(300):
            if index == 250 and cause:
                whole_set()
            time.sleep(0.01)
            yield 256

    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    with watched("input_own_loader") as run:
        for size in run.batches(loader()):
            gradient_step(weights, size)
            run.step(batch_size=size)


# Nothing supports a verdict.


def unknown_refusal(*, cause: bool) -> None:
    """Let the driver refuse, though memory is free and there is no other process."""
    with watched("unknown_refusal") as run:
        compute(run, 4)
        if cause:
            DEVICE.give_out()
        wanted = tensor(30)
        compute(run, 1)
        del wanted


def unknown_quota(*, cause: bool) -> None:
    """Raise the error of an out-of-memory without any detail."""

    def refuse(batch: int) -> None:
        if cause and batch == 200:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    reserve()
    with watched("unknown_quota") as run:
        for batch in range(300):
            refuse(batch)
            time.sleep(0.01)
            run.step(batch_size=64)


def unknown_device(*, cause: bool) -> None:
    """Report a GPU that is unknown: neither its size nor its processes are known."""
    with watch(
        "unknown_device", devices={"CPU:0": "GPU-00000000-0000-0000-0000-000000000000"}, framework="tensorflow"
    ) as run:
        compute(run, 4)
        wanted = tensor(300 if cause else 30)
        compute(run, 1)
        del wanted


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if callable(each) and not name.startswith("_")})

"""Fourth set of trainings that run out of memory: `python unseen_second.py NAME [--without]`; labels.py has reasons.

Programs like those of public issue threads and questions, which a comment above each names. Models, data and ways to
fail are others than in the earlier sets. Each takes `cause`: without it, the cause is left out and all else is equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras
from shared_device import MIB
from training import Each, callback, fit, play, preallocate, reserve, say, watched

layers = keras.layers


def repeated(steps: int, x: tuple[int, ...], y: tuple[int, ...], *, pause: float = 0.004) -> Any:
    """Yield batches of these shapes."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(steps):
            time.sleep(pause)
            yield np.full(x, 0.5, "float32"), np.zeros(y, "float32")

    return tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec(x), tf.TensorSpec(y)))


def stepper(model: Any, optimizer: Any, loss: Callable[..., Any]) -> Any:
    """Make a compiled step of a custom loop."""

    @tf.function(reduce_retracing=True)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(*given)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return value

    return step


# The batch is too large.


# github.com/ellisdg/3DUnetCNN/issues/127: segmentation of volumes
def volumes(*, cause: bool) -> None:
    """Segment volumes of 32 x 32 x 32, 64 a batch."""
    preallocate()
    inputs = layers.Input((32, 32, 32, 1))
    fine = layers.Conv3D(8, 3, padding="same", activation="relu")(inputs)
    coarse = layers.Conv3D(16, 3, padding="same", activation="relu")(layers.MaxPooling3D()(fine))
    joined = layers.Concatenate()([fine, layers.UpSampling3D()(coarse)])
    model = keras.Model(inputs, layers.Conv3D(1, 1)(joined))
    model.compile(optimizer="adam", loss="mse")
    size = 64 if cause else 2
    fit(model, repeated(6, (size, 32, 32, 32, 1), (size, 32, 32, 32, 1)))


# github.com/google-research/simclr/issues/203: each example is compared with all others of its batch
def contrastive(*, cause: bool) -> None:
    """Warm up with batches of 256, then take 4096, whose pairs need the square of that."""
    preallocate()
    model = keras.Sequential([layers.Input((48,)), layers.Dense(96, activation="gelu"), layers.Dense(32)])

    def loss(first: Any, second: Any) -> Any:
        views = tf.math.l2_normalize(model(tf.concat([first, second], 0)), axis=1)
        similar = tf.matmul(views, views, transpose_b=True) / 0.1
        pairs = tf.roll(tf.range(tf.shape(views)[0]), tf.shape(first)[0], 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(pairs, similar))

    step = stepper(model, keras.optimizers.Adam(), loss)
    with watched("contrastive") as run:
        for size, steps in ((256, 120), (4096 if cause else 384, 20)):
            for _ in range(steps):
                step(tf.random.normal((size, 48)), tf.random.normal((size, 48)))
                run.step(batch_size=size)


# tensorflow.org/guide/keras/transfer_learning: the head first, then all layers
def finetuned(*, cause: bool) -> None:
    """Train the head of a frozen network; once it is trained too, the activations of all its layers stay."""
    preallocate()
    body = keras.Sequential([layers.Input((64, 64, 3)), layers.Conv2D(16, 1)])
    for _ in range(6):
        body.add(layers.DepthwiseConv2D(3, padding="same"))
        body.add(layers.Activation("swish"))
    body.add(layers.GlobalMaxPooling2D())
    body.trainable = False
    model = keras.Sequential([layers.Input((64, 64, 3)), body, layers.Dense(8)])
    model.compile(optimizer="adam", loss="mse")
    fit(model, repeated(15, (96, 64, 64, 3), (96, 8)), epochs=2)
    body.trainable = True
    model.compile(optimizer=keras.optimizers.Adam(1e-5), loss="mse")
    size = 96 if cause else 8
    fit(model, repeated(15, (size, 64, 64, 3), (size, 8)))


# Weights and what belongs to them, or one thing, are too big: without the cause, with one example, it fails too.


# github.com/bghira/SimpleTuner/issues/2158: each further copy of the weights counts
def accumulated(*, cause: bool) -> None:
    """Lower the batch, and let Keras accumulate gradients instead: that needs one more copy of 40 MiB of weights."""
    preallocate()
    stack = [layers.Conv1D(1056, 3, padding="same", activation="tanh") for _ in range(3)]
    model = keras.Sequential([layers.Input((4, 32)), layers.Dense(1056), *stack, layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    size = 16 if cause else 1
    fit(model, repeated(12, (size, 4, 32), (size, 4, 1)), epochs=2)
    size = 2 if cause else 1
    model.compile(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=8), loss="mse")
    fit(model, repeated(12, (size, 4, 32), (size, 4, 1)), epochs=2)


# github.com/tensorflow/tensorflow/issues/57144: GradientTape.jacobian
def jacobian(*, cause: bool) -> None:
    """Derive each of 256 outputs by 1024 x 256 weights: 256 MiB an example."""
    preallocate()
    inner, outer = layers.Dense(1024, activation="tanh"), layers.Dense(256)
    model = keras.Sequential([layers.Input((32,)), inner, outer])
    step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
    size = 2 if cause else 1
    with watched("jacobian") as run:
        for _ in range(200):
            step(tf.random.normal((size, 32)))
            time.sleep(0.005)
            run.step(batch_size=size)
        with tf.GradientTape() as tape:
            given = model(tf.random.normal((size, 32)))
        influence = tape.jacobian(given, outer.kernel.value)
        run.step(batch_size=size)
        del influence


# github.com/allenai/OLMoE/issues/34: all experts are in memory, though few of them work
def experts(*, cause: bool) -> None:
    """Build 24 experts of 12 MiB each: the device is full before the first step."""
    reserve()
    with watched("experts") as run:
        inputs = layers.Input((16, 768))
        gate = layers.Dense(24, activation="softmax")(inputs)
        found = []
        for _ in range(24):
            wide = layers.Dense(2048, activation="relu", kernel_initializer="zeros")(inputs)
            found.append(layers.Dense(768, kernel_initializer="zeros")(wide))
        mixed = layers.Lambda(lambda x: tf.einsum("bte,ebtd->btd", x[0], tf.stack(x[1:])))([gate, *found])
        model = keras.Model(inputs, mixed)
        model.compile(optimizer="sgd", loss="mse")
        size = 16 if cause else 1
        for _ in range(10):
            model.train_on_batch(np.ones((size, 16, 768), "float32"), np.zeros((size, 16, 768), "float32"))
            run.step(batch_size=size)


# w3toppers.com/memory-issues-when-transforming-np-array-using-to_categorical
def categorical_labels(*, cause: bool) -> None:
    """Encode the labels of a language model before the training: 12.8 million tokens of 250,000 kinds."""
    reserve()
    size = 64 if cause else 1
    with watched("categorical_labels") as run:
        tokens = np.zeros((100_000, 128), "int32")
        labels = keras.utils.to_categorical(tokens, 250_000)
        model = keras.Sequential([layers.Input((128,)), layers.Embedding(1000, 8), layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
        for _ in range(50):
            model.train_on_batch(tokens[:size], labels[:size, :, :1])
            run.step(batch_size=size)


# One step, or what happens between steps, needs more.


# github.com/facebookresearch/fairseq/issues/1782: one recording is far longer, and its batch is padded to it
def long_recording(*, cause: bool) -> None:
    """Train on recordings of 2000 to 6000 samples, of which one has 480,000."""
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
    model = keras.Sequential([layers.Input((None, 1)), *stack, layers.GlobalMaxPooling1D(), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    fit(model, data)


# github.com/tensorflow/models/issues/1876: pictures as they come from the camera
def scanned_page(*, cause: bool) -> None:
    """Train on pictures of 48 to 112 pixels, one a step, of which one has 1600 x 1200."""
    preallocate()
    random = np.random.default_rng(22)
    inputs = layers.Input((None, None, 3))
    small = layers.Conv2D(12, 3, strides=2, padding="same", activation="relu")(inputs)
    large = layers.Conv2DTranspose(12, 3, strides=2, padding="same", activation="relu")(small)
    model = keras.Model(inputs, layers.Conv2D(3, 1)(large))
    step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x) - x)))
    with watched("scanned_page") as run:
        for index in range(320):
            high, wide = (int(each) * 8 for each in random.integers(6, 15, 2))
            if index == 280 and cause:
                high, wide = 1600, 1200
            step(tf.zeros((1, high, wide, 3)))
            time.sleep(0.008)
            run.step(batch_size=1)


# github.com/akanimax/msg-gan-v1/issues/2: samples for a look at the generator
def samples(*, cause: bool) -> None:
    """Train a decoder; at the end of the third epoch a callback draws 12,000 samples at once for a score."""
    preallocate()
    decoder = keras.Sequential([layers.Input((16,)), layers.Dense(8 * 8 * 16), layers.Reshape((8, 8, 16))])
    decoder.add(layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu"))
    decoder.add(layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu"))
    decoder.add(layers.Conv2D(1, 1))
    decoder.compile(optimizer="adam", loss="mse")

    def draw(epoch: int) -> None:
        drawn = decoder(tf.random.normal((12_000 if cause and epoch == 2 else 64, 16)))
        del drawn

    fit(decoder, repeated(60, (32, 16), (32, 32, 32, 1)), Each(on_epoch_end=draw), epochs=4)


# github.com/mlfoundations/open_clip/issues/11: recall among all examples
def retrieval(*, cause: bool) -> None:
    """Train embeddings; the evaluation subtracts each of 2000 from each other by broadcasting: 976 MiB."""
    preallocate()
    model = keras.Sequential([layers.Input((40,)), layers.Dense(128, activation="relu"), layers.Dense(64)])

    def loss(anchor: Any, same: Any, other: Any) -> Any:
        near, far = (tf.reduce_sum(tf.square(model(anchor) - model(each)), 1) for each in (same, other))
        return tf.reduce_mean(tf.nn.relu(near - far + 1.0))

    step = stepper(model, keras.optimizers.RMSprop(), loss)
    with watched("retrieval") as run:
        for _ in range(300):
            step(*(tf.random.normal((128, 40)) for _ in range(3)))
            time.sleep(0.005)
            run.step(batch_size=128)
        with run.phase("evaluation"):
            found = tf.concat([model(tf.random.normal((250, 40))) for _ in range(8)], 0)
            rows = found if cause else found[:20]
            distances = tf.reduce_sum(tf.square(rows[:, None] - found[None]), axis=2)
        del distances


# Something is kept that grows.


# github.com/tensorflow/tensorflow/issues/42862, github.com/keras-team/keras/issues/21642
def predicted_masks(*, cause: bool) -> None:
    """Predict 400 batches of masks of 1 MiB: Keras keeps the results on the device until the last one."""
    preallocate()
    stack = [layers.SeparableConv2D(8, 3, padding="same", activation="relu") for _ in range(2)]
    model = keras.Sequential([layers.Input((64, 64, 3)), *stack])
    model.compile(optimizer="adam", loss="mse")
    fit(model, repeated(60, (8, 64, 64, 3), (8, 64, 64, 8)), epochs=2)
    say("growing")
    parts, steps = (1, 400) if cause else (10, 40)
    for _ in range(parts):
        pictures = repeated(steps, (8, 64, 64, 3), (8,), pause=0.03).map(lambda x, _: x)
        masks = model.predict(pictures, verbose=0, callbacks=[callback()])
        del masks


# github.com/mistralai/mistral-inference/issues/20: a cache for generation stays on in training
def remembered(*, cause: bool) -> None:
    """Attend to all earlier segments: each step appends its own to the memory, which is never cut."""
    preallocate()
    width, length = 128, 32
    attend = layers.MultiHeadAttention(1, width, flash_attention=False)
    inputs, memory = layers.Input((length, width)), layers.Input((None, width))
    hidden = layers.LayerNormalization()(inputs + attend(inputs, memory))
    model = keras.Model([inputs, memory], [hidden, layers.Dense(1)(hidden)])
    step = stepper(model, keras.optimizers.SGD(0.01), lambda x, m: tf.reduce_mean(tf.square(model([x, m])[1])))
    past = tf.zeros((8, length, width))
    say("growing")
    with watched("remembered") as run:
        for _ in range(700):
            segment = tf.random.normal((8, length, width))
            step(segment, past)
            past = tf.concat([past, model([segment, past])[0]], axis=1)
            if not cause:
                past = past[:, -4 * length :]
            run.step(batch_size=8)


# github.com/tensorflow/tensorflow/issues/31842
def retraced(*, cause: bool) -> None:
    """Pass the learning rate as a Python number: each is a new graph, with its own copy of a NumPy table."""
    preallocate()
    table = np.random.default_rng(23).normal(size=(1024, 384)).astype("float32")  # 1.5 MiB
    weights = tf.Variable(tf.ones((384, 32)) / 384)

    @tf.function  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(rows: Any, rate: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(tf.constant(table), rows) @ weights))
        weights.assign_sub(rate * tape.gradient(loss, weights))

    rows = tf.random.uniform((8192,), maxval=1024, dtype=tf.int32)  # 12 MiB of the table
    say("growing")
    with watched("retraced") as run:
        for index in range(400):
            rate = 0.01 * 0.99**index
            step(rows, rate if cause else tf.constant(rate))
            run.step(batch_size=8192)


# github.com/maxpumperla/hyperas/issues/16: the result of each trial has its model
def trials(*, cause: bool) -> None:
    """Search hyperparameters, eagerly, and keep each trial's model with its optimizer next to the score."""
    preallocate()
    random = np.random.default_rng(24)
    results: list[tuple[float, Any]] = []
    say("growing")
    with watched("trials") as run:
        for _ in range(60):
            words, width = int(random.integers(4000, 9000)), int(random.integers(48, 112))
            model = keras.Sequential([layers.Input((24,), dtype="int32"), layers.Embedding(words, width)])
            model.add(layers.GlobalAveragePooling1D())
            model.add(layers.Dense(1, activation="sigmoid"))
            model.compile(optimizer="adam", loss="binary_crossentropy", run_eagerly=True)
            for _ in range(12):
                tokens = random.integers(0, words, (64, 24), dtype="int32")
                score = model.train_on_batch(tokens, np.zeros((64, 1), "float32"))
                run.step(batch_size=64)
            results.append((float(score), model if cause else None))
            del model


# Holes: without the cause as much is in use, in one piece.


# github.com/tensorflow/tensorflow/issues/23953: works for some epochs, with sizes that vary
def churned(*, cause: bool) -> None:
    """Keep the features of 38 utterances of 1 to 6 MiB, replace one a step, then request 64 MiB for all scores."""
    preallocate()
    random = np.random.default_rng(25)

    def utterance() -> Any:
        return tf.zeros((int(random.uniform(1, 6) * 1024), 256))

    kept = [utterance() for _ in range(38)]
    model = keras.Sequential([layers.Input((80, 24)), layers.Conv1D(32, 5, activation="relu"), layers.GRU(16)])
    step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
    with watched("churned") as run:
        for _ in range(300):
            kept.pop(int(random.integers(len(kept))))
            kept.append(utterance())
            step(tf.random.normal((32, 80, 24)))
            run.step(batch_size=32)
        if not cause:
            shapes = [each.shape for each in kept]
            kept.clear()
            kept = [tf.zeros(each) for each in shapes]
        say("before", kept=sum(int(np.prod(each.shape)) for each in kept) * 4 // MIB)
        scores = tf.zeros((64, 1024, 256))
        run.step(batch_size=32)
        del scores


# Another process.


# github.com/googlecolab/colabtools/issues/52: the GPU is nearly full already
def progressive(*, cause: bool) -> None:
    """Double the resolution of a generator every 60 steps, as planned; meanwhile another process has started."""
    _ = cause
    with watched("progressive") as run:
        for side in (8, 16, 32, 64):
            model = keras.Sequential([layers.Input((side, side, 8))])
            for _ in range(2):
                model.add(layers.Conv2D(24, 3, padding="same", activation="leaky_relu"))
            model.add(layers.Conv2D(3, 1))
            step = stepper(model, keras.optimizers.Adam(), lambda x, model=model: tf.reduce_mean(tf.square(model(x))))
            for _ in range(60 if side < 64 else 10):
                step(tf.random.normal((64, side, side, 8)))
                time.sleep(0.02)
                run.step(batch_size=64)


# github.com/tensorflow/tensorflow/issues/8170: something else has nearly all of the memory
def late_start(*, cause: bool) -> None:
    """Start on a free device and read texts for eight seconds; when training begins, another process has most."""
    _ = cause
    with watched("late_start") as run:
        tf.zeros((256,))
        time.sleep(8)
        model = keras.Sequential([layers.Input((64, 32)), layers.Bidirectional(layers.GRU(64)), layers.Dense(1)])
        step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
        for _ in range(15):
            step(tf.random.normal((768, 64, 32)))
            run.step(batch_size=768)


# The input pipeline wants the host's memory, which here is of the same allocator.


# github.com/tensorflow/tensorflow/issues/33516: as many elements wait as there are parallel calls
def parallel_decoding(*, cause: bool) -> None:
    """Decode pictures of 6 MiB with 64 parallel calls, and train on thumbnails; a callback saves for a while."""
    reserve()

    def decode(_: Any) -> Any:
        return tf.random.uniform((512, 1024, 3))

    pictures = tf.data.Dataset.range(2000).map(decode, num_parallel_calls=64 if cause else 2)
    data = pictures.map(lambda x: (x[::16, ::16], tf.zeros((1,)))).batch(8).take(30)
    model = keras.Sequential([layers.Input((32, 64, 3)), layers.Flatten(), layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    fit(model, data, Each(on_train_batch_end=lambda batch: time.sleep(6 if batch == 15 else 0.02)))


# github.com/tensorflow/tensorflow/issues/54299: more than one shuffle buffer is alive
def two_buffers(*, cause: bool) -> None:
    """Shuffle spectrograms of the training, 120 MiB; the same helper shuffles those of the validation."""
    reserve()

    def read(_: Any) -> tuple[Any, Any]:
        return tf.random.uniform((32, 96, 128)), tf.zeros((32, 1))  # 1.5 MiB

    train = tf.data.Dataset.range(400).map(read).shuffle(80).repeat()
    held_out = tf.data.Dataset.range(400).map(read)
    held_out = held_out.shuffle(80) if cause else held_out
    model = keras.Sequential([layers.Input((96, 128)), layers.AveragePooling1D(8), layers.Flatten(), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    fit(model, train, epochs=2, steps_per_epoch=150, validation_data=held_out, validation_steps=20)


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if callable(each) and not name.startswith("_")})

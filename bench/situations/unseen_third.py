"""Fifth set of trainings that run out of memory: `python unseen_third.py NAME [--without]`; labels.py has reasons.

Programs like those that most users write, with the mistakes that most of them make. Models, data and ways to fail are
others than in the earlier sets. Each takes `cause`: without it, the cause is left out and all else is equal.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras
from shared_device import MIB
from training import Each, fit, play, preallocate, reserve, say, watched
from unseen_second import repeated, stepper

layers = keras.layers


def attending(inputs: Any, width: int, heads: int = 2) -> Any:
    """Add a block of a transformer."""
    hidden = layers.LayerNormalization()(inputs)
    seen = layers.MultiHeadAttention(heads, width // heads, flash_attention=False)(hidden, hidden)
    joined = layers.Add()([inputs, seen])
    return layers.Add()([joined, layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(joined))])


# The batch is too large.


def photos(*, cause: bool) -> None:
    """Classify photos of 32 x 32 with residual blocks: arrays of NumPy, and 384 as the batch of fit()."""
    preallocate()
    inputs = layers.Input((32, 32, 3))
    hidden = layers.Conv2D(24, 3, padding="same")(layers.Rescaling(1 / 255)(inputs))
    for _ in range(3):
        inner = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(24, 3, padding="same")(hidden)))
        hidden = layers.Add()([hidden, inner])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.zeros((384, 32, 32, 3), "uint8"), np.zeros((384,), "int32")
    fit(model, x, y=y, batch_size=384 if cause else 8)


def next_words(*, cause: bool) -> None:
    """Train a language model on 64 texts of 128 tokens a step: 2 MiB of logits a text."""
    preallocate()
    inputs = layers.Input((128,), dtype="int32")
    hidden = attending(layers.Embedding(4000, 48)(inputs), 48)
    model = keras.Model(inputs, layers.Dense(4000)(hidden))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = np.random.default_rng(31).integers(4000, size=(128, 129)).astype("int32")
    texts = tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))
    fit(model, texts.batch(64 if cause else 4))


class Vae(keras.Model):  # type: ignore[misc] # Keras ships no types
    """Variational autoencoder with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        down = {"strides": 2, "padding": "same", "activation": "relu"}
        self.encoder = keras.Sequential([layers.Conv2D(16, 3, **down), layers.Conv2D(32, 3, **down)])
        self.encoder.add(layers.Flatten())
        self.encoder.add(layers.Dense(32))
        self.decoder = keras.Sequential([layers.Dense(16 * 16 * 16), layers.Reshape((16, 16, 16))])
        self.decoder.add(layers.Conv2DTranspose(32, 3, **down))
        self.decoder.add(layers.Conv2DTranspose(32, 3, **down))
        self.decoder.add(layers.Conv2D(3, 3, padding="same", activation="sigmoid"))

    def call(self, x: Any) -> Any:
        """Encode, sample and decode."""
        mean, spread = tf.split(self.encoder(x), 2, axis=1)
        return self.decoder(mean + tf.exp(spread / 2) * tf.random.normal(tf.shape(mean)))

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make a step."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data) - data))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def faces(*, cause: bool) -> None:
    """Train a variational autoencoder on pictures of 64 x 64, 256 a batch."""
    preallocate()
    model = Vae()
    model.compile(optimizer="adam")
    size = 256 if cause else 8
    fit(model, repeated(6, (size, 64, 64, 3), (size,)).map(lambda x, _: x))


def adversaries(*, cause: bool) -> None:
    """Train a generator and a discriminator by turns in a custom loop, 320 pictures each."""
    preallocate()
    generator = keras.Sequential([layers.Input((32,)), layers.Dense(16 * 16 * 8), layers.Reshape((16, 16, 8))])
    generator.add(layers.Conv2DTranspose(16, 4, strides=2, padding="same", activation="relu"))
    generator.add(layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"))
    judge = keras.Sequential([layers.Input((64, 64, 1))])
    for _ in range(2):
        judge.add(layers.Conv2D(16, 3, padding="same"))
        judge.add(layers.LeakyReLU())
    judge.add(layers.GlobalAveragePooling2D())
    judge.add(layers.Dense(1))

    def judged(real: Any, noise: Any) -> Any:
        return tf.reduce_mean(tf.nn.softplus(judge(generator(noise)))) + tf.reduce_mean(tf.nn.softplus(-judge(real)))

    judging = stepper(judge, keras.optimizers.Adam(2e-4), judged)
    forging = stepper(
        generator, keras.optimizers.Adam(2e-4), lambda z: tf.reduce_mean(tf.nn.softplus(-judge(generator(z))))
    )
    size = 320 if cause else 8
    with watched("adversaries") as run:
        for _ in range(8):
            judging(tf.random.normal((size, 64, 64, 1)), tf.random.normal((size, 32)))
            forging(tf.random.normal((size, 32)))
            run.step(batch_size=size)


# Weights and what belongs to them, or one example, are too big: without the cause, with one example, it fails too.


def wide_head(*, cause: bool) -> None:
    """Flatten 64 x 64 x 32 features without pooling, in front of a dense layer of 512: a kernel of 256 MiB."""
    preallocate()
    size = 16 if cause else 1
    with watched("wide_head") as run:
        model = keras.Sequential([layers.Input((64, 64, 3)), layers.Conv2D(32, 3, padding="same", activation="relu")])
        model.add(layers.Flatten())
        model.add(layers.Dense(512, activation="relu"))
        model.add(layers.Dense(10))
        model.compile(optimizer="adam", loss="mse")
        for _ in range(10):
            model.train_on_batch(np.zeros((size, 64, 64, 3), "float32"), np.zeros((size, 10), "float32"))
            run.step(batch_size=size)


def encoder(*, cause: bool) -> None:
    """Train a transformer of six blocks, 72 MiB of weights, with AdamW."""
    preallocate()
    inputs = hidden = layers.Input((32, 512))
    for _ in range(6):
        hidden = attending(hidden, 512, heads=8)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(optimizer="adamw", loss="mse")
    size = 8 if cause else 1
    fit(model, repeated(10, (size, 32, 512), (size, 1)))


def radiographs(*, cause: bool) -> None:
    """Classify radiographs of 2048 x 2048, one a step: 256 MiB for each result of a convolution."""
    _ = cause
    preallocate()
    model = keras.Sequential([layers.Input((2048, 2048, 1))])
    for _ in range(2):
        model.add(layers.Conv2D(16, 3, padding="same", activation="relu"))
    model.add(layers.GlobalMaxPooling2D())
    model.add(layers.Dense(2))
    model.compile(optimizer="adam", loss="mse")
    fit(model, repeated(4, (1, 2048, 2048, 1), (1, 2)))


def vgg(*, cause: bool) -> None:
    """Train Keras's VGG16 on a small device: one of its kernels has 392 MiB."""
    preallocate()
    size = 8 if cause else 1
    with watched("vgg") as run:
        model = keras.applications.VGG16(weights=None, classes=10)
        model.compile(optimizer="sgd", loss="categorical_crossentropy")
        for _ in range(5):
            model.train_on_batch(np.zeros((size, 224, 224, 3), "float32"), np.zeros((size, 10), "float32"))
            run.step(batch_size=size)


def wide_lstm(*, cause: bool) -> None:
    """Predict a series with an LSTM of 2304 units: weights, momentum and gradient of 85 MiB each."""
    preallocate()
    lstm = layers.LSTM(2304, recurrent_initializer="glorot_uniform")
    model = keras.Sequential([layers.Input((20, 128)), lstm, layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="mse")
    size = 16 if cause else 1
    fit(model, repeated(10, (size, 20, 128), (size, 1)))


# Something is kept that grows.


def attention_maps(*, cause: bool) -> None:
    """Keep the attention to eight texts after each epoch, 8 MiB, for a film of how it changes."""
    preallocate()
    attend = layers.MultiHeadAttention(4, 8, flash_attention=False)
    inputs = layers.Input((256,))
    hidden = layers.Embedding(500, 32)(inputs)
    mixed, scores = attend(hidden, hidden, return_attention_scores=True)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalMaxPooling1D()(mixed)))
    looking = keras.Model(inputs, scores)
    model.compile(optimizer="adam", loss="mse")
    shown, film = tf.zeros((8, 256)), []

    def look(_: int) -> None:
        film.append(looking(shown))
        if not cause:
            del film[:-1]

    say("growing")
    fit(model, repeated(10, (4, 256), (4, 1), pause=0.01), Each(on_epoch_end=look), epochs=40)


def exact_auc(*, cause: bool) -> None:
    """Train a recommender, and join the scores and labels of all steps for an exact figure at the end."""
    preallocate()
    users, goods = layers.Embedding(3000, 16), layers.Embedding(2000, 16)
    inputs = layers.Input((1,)), layers.Input((32,))
    model = keras.Model(inputs, layers.Dot(2)([users(inputs[0]), goods(inputs[1])]))
    step = stepper(
        model,
        keras.optimizers.Adam(),
        lambda user, item, wanted: tf.reduce_mean(tf.square(model([user, item]) - wanted)),
    )
    scores = labels = tf.zeros((0, 1, 32))
    say("growing")
    with watched("exact_auc") as run:
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


def never_cut(*, cause: bool) -> None:
    """Train a recurrent language model by hand: one tape records all pieces of a long text, for one update."""
    preallocate()
    weights = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in ((2000, 128), (128, 128), (128, 2000))]
    optimizer = keras.optimizers.SGD(0.1)
    say("growing")
    with watched("never_cut") as run:
        state, done = tf.zeros((64, 128)), 0
        while done < 500:
            with tf.GradientTape() as tape:
                total = tf.zeros(())
                for _ in range(500 if cause else 20):
                    words = tf.random.uniform((64,), maxval=2000, dtype=tf.int32)
                    state = tf.tanh(tf.gather(weights[0], words) + state @ weights[1])
                    logits = state @ weights[2]
                    total += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(words, logits))
                    time.sleep(0.01)
                    done += 1
                    run.step(batch_size=64)
            optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
            state = tf.stop_gradient(state)


# One step, or what happens between steps, needs more.


def views(*, cause: bool) -> None:
    """Train on pictures of 48 x 48; the test averages over 64 flipped and shifted views of each, all at once."""
    preallocate()
    model = keras.Sequential([layers.Input((48, 48, 3)), layers.Conv2D(16, 3, padding="same", activation="relu")])
    model.add(layers.MaxPooling2D(4))
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
    with watched("views") as run:
        for _ in range(250):
            step(tf.random.uniform((32, 48, 48, 3)))
            time.sleep(0.005)
            run.step(batch_size=32)
        with run.phase("test"):
            picture = tf.random.uniform((32, 48, 48, 3))
            moved = [tf.roll(picture, index, axis=2) for index in range(64 if cause else 2)]
            found = model(tf.concat(moved, 0))
        del found


def whole_documents(*, cause: bool) -> None:
    """Train on the first 128 tokens of documents; validation has them whole, up to 3072 tokens."""
    preallocate()
    inputs = layers.Input((None,))
    hidden = attending(layers.Embedding(800, 32)(inputs), 32)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(optimizer="adam", loss="mse")
    length = 3072 if cause else 192
    fit(model, repeated(150, (8, 128), (8, 1)), epochs=2, validation_data=repeated(4, (8, length), (8, 1)))


def full_graph(*, cause: bool) -> None:
    """Train a graph network on samples of 256 nodes; the validation has the whole graph of 9000, as a dense matrix."""
    preallocate()
    first, second = layers.Dense(32, activation="relu"), layers.Dense(7)
    inputs = layers.Input((16,), name="nodes"), layers.Input((None,), name="edges")
    model = keras.Model(inputs, second(inputs[1] @ first(inputs[1] @ inputs[0])))
    step = stepper(
        model, keras.optimizers.Adam(), lambda nodes, edges: tf.reduce_mean(tf.square(model([nodes, edges])))
    )

    def matrix(nodes: int) -> Any:
        rows = tf.range(nodes, dtype=tf.int64)
        links = tf.SparseTensor(tf.stack([rows, (rows + 1) % nodes], 1), tf.ones((nodes,)), (nodes, nodes))
        return tf.sparse.to_dense(links, validate_indices=False)

    with watched("full_graph") as run:
        for _ in range(3):
            for _ in range(80):
                step(tf.random.normal((256, 16)), matrix(256))
                time.sleep(0.005)
                run.step(batch_size=256)
        with run.phase("validation"):
            nodes = 9000 if cause else 900
            found = model([tf.random.normal((nodes, 16)), matrix(nodes)])
        del found


# Another process.


def reviews(*, cause: bool) -> None:
    """Classify reviews, 88 MiB with Adam's slots, while an open notebook has 185 of 256 MiB."""
    _ = cause
    model = keras.Sequential([layers.Input((40,)), layers.Embedding(60_000, 128), layers.Conv1D(32, 5)])
    model.add(layers.GlobalMaxPooling1D())
    model.add(layers.Dense(1))
    model.compile(optimizer="adam", loss="mse")
    fit(model, repeated(10, (32, 40), (32, 1)))


def sentences(*, cause: bool) -> None:
    """Train on words for eight seconds, then on whole sentences, as planned; meanwhile another job has started."""
    _ = cause
    stack = [layers.Conv1D(32, 9, padding="same", activation="relu") for _ in range(2)]
    model = keras.Sequential([layers.Input((None, 8)), *stack, layers.GlobalAveragePooling1D(), layers.Dense(12)])
    step = stepper(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
    with watched("sentences") as run:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            step(tf.random.normal((32, 60, 8)))
            time.sleep(0.02)
            run.step(batch_size=32)
        for _ in range(6):
            step(tf.random.normal((32, 6000, 8)))
            run.step(batch_size=32)


# The input pipeline wants the host's memory, which here is of the same allocator.


def batched_first(*, cause: bool) -> None:
    """Read pictures of 9 MiB, make batches of 48 and shrink those, instead of shrinking each picture first."""
    reserve()

    def shrink(pictures: Any) -> Any:
        return pictures[..., ::16, ::16, :]

    pictures = tf.data.Dataset.range(200).map(lambda _: tf.random.uniform((768, 1024, 3)))
    pictures = pictures.batch(48).map(shrink) if cause else pictures.map(shrink).batch(48)
    model = keras.Sequential([layers.Input((48, 64, 3)), layers.Conv2D(8, 3, strides=2), layers.Flatten()])
    model.add(layers.Dense(1))
    model.compile(optimizer="adam", loss="mse")
    fit(model, pictures.map(lambda x: (x, tf.zeros((tf.shape(x)[0], 1)))), epochs=2)


def raw_label(*, cause: bool) -> None:
    """Encode labels with np.eye in the pipeline; in the 80th batch one is a raw key: a matrix of 72 TB."""
    reserve()

    def encode(labels: Any) -> Any:
        return np.eye(max(labels.max() + 1, 10))[labels][:, :10].astype("float32")

    def prepare(index: Any) -> tuple[Any, Any]:
        key = 3_000_000 if cause else 9
        labels = tf.where(index == 80, key, 3) * tf.ones((32,), tf.int32)
        coded = tf.numpy_function(encode, [labels], tf.float32)
        return tf.ones((32, 20)), tf.ensure_shape(coded, (32, 10))

    model = keras.Sequential([layers.Input((20,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    model.compile(optimizer="adam", loss="mse")
    fit(model, tf.data.Dataset.range(120).map(prepare), Each(on_train_batch_end=lambda _: time.sleep(0.02)))


# Memory is free, but in pieces.


def sessions(*, cause: bool) -> None:
    """Keep features of visits for a model that learns while it serves; most visits end, and then a table is made."""
    preallocate()
    random = np.random.default_rng(32)
    model = keras.Sequential([layers.Input((24,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
    step = stepper(model, keras.optimizers.SGD(0.01), lambda x: tf.reduce_mean(tf.square(model(x))))

    def visit() -> Any:
        return tf.zeros((int(random.integers(1000, 6000)), 64))  # 0.25 to 1.5 MiB

    opened = [visit() for _ in range(245)]
    with watched("sessions") as run:
        for _ in range(250):
            step(tf.random.normal((64, 24)))
            time.sleep(0.005)
            run.step(batch_size=64)
        opened = [each for each in opened if random.random() < 0.4]
        if not cause:
            shapes = [each.shape for each in opened]
            opened.clear()
            opened = [tf.zeros(each) for each in shapes]
        say("before", kept=sum(int(np.prod(each.shape)) for each in opened) * 4 // MIB)
        table = tf.zeros((64, 1024, 192))  # 48 MiB
        run.step(batch_size=64)
        del table


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if callable(each) and not name.startswith("_")})

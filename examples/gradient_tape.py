"""Report a custom TensorFlow loop with GradientTape: epochs, steps, input wait, memory.

Runs on any device, with or without a daemon: `python examples/gradient_tape.py`.
"""

import tensorflow as tf

from gpuwarden import watch

x = tf.random.normal((4096, 32))
y = tf.reduce_sum(x, axis=1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096).batch(64).prefetch(tf.data.AUTOTUNE)

weights = tf.Variable(tf.zeros((32, 1)))
RATE = 0.01


@tf.function
def update(batch: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Train one step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch @ weights - target) ** 2)
    weights.assign_sub(RATE * tape.gradient(loss, weights))
    return loss


with watch("gradient tape") as run:
    for epoch in run.epochs(3):
        for batch, target in run.batches(data):
            loss = update(batch, target)
            run.step(batch_size=batch.shape[0])
        print(f"epoch {epoch}: {loss:.3f}")

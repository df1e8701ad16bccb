"""Report a plain JAX loop: epochs, steps, input wait, and the memory of JAX's GPUs.

Runs on any device, with or without a daemon: `python examples/jax_loop.py`.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from gpuwarden import watch

RATE = 0.01


def batches(key: jax.Array, count: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield batches of 64 examples."""
    for part in jax.random.split(key, count):
        x = jax.random.normal(part, (64, 32))
        yield x, x.sum(axis=1)


def compute_loss(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error of a linear model."""
    return jnp.mean((x @ weights - y) ** 2)


@jax.jit
def update(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Train one step."""
    loss, gradient = jax.value_and_grad(compute_loss)(weights, x, y)
    return weights - RATE * gradient, loss


weights, key = jnp.zeros(32), jax.random.key(0)
with watch("jax loop") as run:
    for epoch in run.epochs(3):
        key, part = jax.random.split(key)
        for x, y in run.batches(batches(part, 64)):
            weights, loss = update(weights, x, y)
            run.step(batch_size=len(x))
        print(f"epoch {epoch}: {loss.item():.3f}")

"""Training loops with real out-of-memories: `function_retry_cases.py FOLDER CASE`, for test_function_retry.py.

Each case is a process of its own with one framework: TensorFlow with the allocator of a GPU in place of the CPU's, and
64 MiB; JAX and torch on the CPU with a limit of the kernel on the process's memory. The first batch sizes do not fit.
"""

# ruff: noqa: D103, PLC0415 - the tests say what each case shows; a case imports its own framework

from __future__ import annotations

import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from receiver import Receiver
from training_cases import find_cases, run_and_print

from gpuwarden import watch, with_oom_retry

EXAMPLES, WIDTH, STEPS = 32_768, 2000, 3
X = np.random.default_rng(0).random((EXAMPLES, 3), "float32")
Y = X.sum(axis=1, keepdims=True)


class RetriedTraining:
    """Training in a case, and the batch sizes that it was called with."""

    def __init__(self, folder: Path) -> None:
        self.sizes: list[int] = []
        self._daemon = Receiver(folder / "daemon.sock")

    def train(self, loop: Callable[[int], Any], size: int = EXAMPLES, **settings: Any) -> Any:
        """Call a loop with the first batch size, and smaller ones while memory runs out."""

        @with_oom_retry(batch_size=size, **settings)
        def call(*, batch_size: int) -> Any:
            self.sizes.append(batch_size)
            with watch("retried", socket=self._daemon.path, devices={"CPU:0": "GPU-1"}):
                return loop(batch_size)

        return call()

    def summarize(self, weights: Any, plain: Any) -> dict[str, Any]:
        """Compare with the weights of a training without retries."""
        last: Any = [each for each in self._daemon.accept().waiting() if type(each).__name__ == "Report"][-1]
        return {
            "sizes": self.sizes,
            "equal": bool(np.allclose(np.asarray(weights), np.asarray(plain), rtol=1e-4, atol=1e-6)),
            "retries": last.oom_retries,
        }


def case_tensorflow(folder: Path) -> Any:
    import tensorflow as tf

    trained = RetriedTraining(folder)
    hidden, out = tf.Variable(tf.zeros((3, WIDTH))), tf.Variable(tf.zeros((WIDTH, 1)))
    start = tf.random.Generator.from_seed(1).normal((3, WIDTH)).numpy()

    def restore() -> None:
        hidden.assign(start)
        out.assign(tf.ones((WIDTH, 1)) / WIDTH)

    def loop(size: int) -> Any:
        hidden.assign_add(tf.ones_like(hidden))  # a change before the memory runs out
        for _ in range(STEPS):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.nn.relu(X[:size] @ hidden) @ out - Y[:size]) ** 2)
            for weights, gradient in zip((hidden, out), tape.gradient(loss, (hidden, out)), strict=True):
                weights.assign_sub(0.01 * gradient)
        return hidden.numpy()

    restore()
    weights = trained.train(loop, 8192, restore=restore)
    restore()
    return trained.summarize(weights, loop(trained.sizes[-1]))


def case_torch(folder: Path) -> Any:
    import torch

    trained = RetriedTraining(folder)

    def loop(size: int) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(torch.from_numpy(X[:size])), torch.from_numpy(Y[:size])).backward()
            optimizer.step()
        return model[0].weight.detach().numpy()

    loop(1024)  # now its threads have their stacks
    with limit_memory(128 << 20):
        weights = trained.train(loop)
    return trained.summarize(weights, loop(trained.sizes[-1]))


def case_jax(folder: Path) -> Any:
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1] - y) ** 2)

    def step(weights: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights, x, y))

    compiled = jax.jit(step)

    def loop(size: int) -> Any:
        weights: Any = (jax.random.normal(jax.random.key(1), (3, WIDTH)), jnp.ones((WIDTH, 1)) / WIDTH)
        for _ in range(STEPS):
            weights = compiled(weights, X[:size], Y[:size])
        return np.asarray(weights[0])

    trained = RetriedTraining(folder)

    loop(1024)  # now its threads have their stacks
    with limit_memory(128 << 20):
        weights = trained.train(loop)
    return trained.summarize(weights, loop(trained.sizes[-1]))


@contextmanager
def limit_memory(room: int) -> Iterator[None]:
    """Let this process allocate `room` bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cases: dict[str, Callable[[Path], Any]] = find_cases(globals())
    run_and_print({name: cases[name] for name in sys.argv[2:]}, lambda path: path.parent)

"""Search and retry on Keras's backend KERAS_BACKEND, for test_oom_retry.py.

A layer asks for more memory than any machine has where the batch is larger than 8: a real out-of-memory of the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import numpy as np

from gpuwarden.keras import find_batch_size, fit_with_oom_retry, keras

FITS = 8
X = np.arange(96, dtype="float32").reshape(32, 3) / 10
Y = X.sum(axis=1, keepdims=True)


class OverAllocatingLayer(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Allocates too much if the batch is too large."""

    def call(self, x: Any) -> Any:  # noqa: D102 - Keras's
        if x.shape[0] is None or x.shape[0] <= FITS:
            return x
        return x + keras.ops.sum(keras.ops.ones((1 << 22, 1 << 22)) * keras.ops.mean(x))

    def compute_output_shape(self, shape: Any) -> Any:  # noqa: D102 - Keras's
        return shape


def model() -> Any:
    """Make the same model each time."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((3,)), OverAllocatingLayer(), keras.layers.Dropout(0.2, seed=3), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("adam", "mse", run_eagerly=True)  # compiled, XLA would never make the ones
    return made


def read_values(of: Any) -> list[Any]:
    """Return the value of each variable."""
    found = (*of.variables, *of.optimizer.variables, *of.metrics_variables)
    return [keras.ops.convert_to_numpy(each).tolist() for each in found]


def search() -> Any:
    """Search with a new model and with one that has trained."""
    tried = []
    for trained in (False, True):
        of = model()
        if trained:
            of.fit(X, Y, batch_size=4, verbose=0)
        before, built, function = read_values(of), of.optimizer.built, of.train_function
        size = find_batch_size(of, (X, Y), margin=0)
        tried.append([size, before == read_values(of), built == of.optimizer.built, function is of.train_function])
        of.fit(X, Y, batch_size=4, verbose=0)
    return tried


def search_wrapped_module() -> Any:
    """Search with a torch module that has buffers, in a model within the model, and with dropout of torch's own."""
    torch = sys.modules["torch"]
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    part = keras.Sequential([keras.layers.Input((3,)), keras.layers.TorchModuleWrapper(module, output_shape=(None, 3))])
    of = keras.Sequential([keras.layers.Input((3,)), part, keras.layers.Dense(1)])
    of.compile("adam", "mse")
    of.fit(X, Y, batch_size=4, verbose=0)
    before, seed = {name: each.clone() for name, each in module.state_dict().items()}, torch.get_rng_state()
    size = find_batch_size(of, (X, Y), smallest=8)
    after = module.state_dict()
    same = {name: bool(torch.equal(each, after[name])) for name, each in before.items()}
    return [size, same, bool(torch.equal(seed, torch.get_rng_state()))]


def retry() -> Any:
    """Retry, and compare with a plain fit of the batch size that fits."""
    of, plain = model(), model()
    history = fit_with_oom_retry(of, lambda _: (X, Y), 32, epochs=2, verbose=0, shuffle=False)
    plain.fit(X, Y, batch_size=FITS, epochs=2, verbose=0, shuffle=False)
    weights = [np.allclose(a, b, atol=1e-6) for a, b in zip(of.get_weights(), plain.get_weights(), strict=True)]
    return [history.batch_sizes, history.oom_retries, all(weights)]


def run_case(call: Any) -> Any:
    """Return what a call returns, or the type that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - of each framework's own type
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cases = {
        "searched": run_case(search),
        "retried": run_case(retry),
    }
    if keras.backend.backend() == "torch":
        cases["wrapped"] = run_case(search_wrapped_module)
    print(json.dumps(cases))  # noqa: T201 - the result
    sys.stdout.flush()
    os._exit(0)

"""Real searches for a batch size in 64 MiB, which the test sets: `batch_size_cases.py FOLDER` prints the results."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import gc
import importlib
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from memory_limited_model import (
    TwoOptimizerModel,
    X,
    Y,
    dataset,
    describe_exception,
    have_same_values,
    make_two_optimizer_model,
    model,
)
from training_cases import find_cases, run_and_print

from gpuwarden.keras import find_batch_size, keras


def batch(size: int) -> tuple[Any, Any]:
    return X[:size], Y[:size]


def read_bytes_in_use() -> int:
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def read_state(of: Any) -> list[Any]:
    """Return everything that training changes in a model."""
    return [
        [np.asarray(each).tolist() for each in (*of.variables, *of.optimizer.variables, *of.metrics_variables)],
        id(of.optimizer),
        of.optimizer.built,
        sorted(vars(of.optimizer)),
        id(of.train_function),
        of.stop_training,
        id(getattr(of, "history", None)),
        hasattr(of, "history"),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),  # noqa: NPY002 - the seeds of programs
    ]


def case_found(_: Path) -> Any:
    """Search with a model that is new, and with one that has trained."""
    outcomes: dict[str, Any] = {}
    for name in ("new", "trained"):
        searched = model()
        if name == "trained":
            searched.fit(dataset(64).take(3), verbose=0)
        before, held = read_state(searched), read_bytes_in_use()
        size = find_batch_size(searched, batch, smallest=1024, largest=2304)  # two do not fit; each takes 10 s
        after = read_state(searched)
        outcomes[name] = {
            "size": size,
            "restored": [one == other for one, other in zip(before, after, strict=True)],
            "held": read_bytes_in_use() - held,
        }
        if name == "new":  # the search has no part in what comes after it
            plain = model()
            searched.fit(dataset(1024), epochs=1, verbose=0)
            plain.fit(dataset(1024), epochs=1, verbose=0)
            outcomes["equal"] = have_same_values(searched, plain)
    return outcomes


def case_short_arrays(_: Path) -> Any:
    """Arrays bound the size by their length."""
    return find_batch_size(model(), (X[:48], Y[:48]), smallest=16, margin=np.float32(0.1))


def case_structures(_: Path) -> Any:
    """Search with the parts of a batch in all the ways that fit takes them."""
    names = {"a": keras.layers.Input((3,), name="a"), "b": keras.layers.Input((3,), name="b")}
    joined = keras.layers.Concatenate()(list(names.values()))
    outputs = {name: keras.layers.Dense(1, name=name)(joined) for name in ("c", "d")}
    two = keras.Model(list(names.values()), list(outputs.values()))
    two.compile("adam", ["mse", "mse"])
    named = keras.Model(names, outputs)
    named.compile("adam", dict.fromkeys(outputs, "mse"))
    weights = np.ones(len(X), "float32")

    def search(made: Any, *data: Any) -> list[int]:
        def cut(size: int) -> Any:
            return keras.tree.map_structure(lambda each: None if each is None else each[:size], data)

        return [find_batch_size(made, each, largest=3) for each in (data, cut)]

    return {
        "no_weights": search(model(), X, Y, None),
        "lists": search(two, [X, X], [Y, Y]),
        "lists_no_weights": search(two, [X, X], [Y, Y], None),
        "tuples": search(two, (X, X), (Y, Y)),
        "weights": search(two, [X, X], [Y, Y], [weights, weights]),
        "one_weight": search(two, [X, X], [Y, Y], [weights, None]),
        "dicts": search(named, {"a": X, "b": X}, {"c": Y, "d": Y}),
    }


def case_several_steps(_: Path) -> Any:
    return find_batch_size(model(steps_per_execution=4), batch, smallest=16, largest=32)


def case_own_functions(_: Path) -> Any:
    """Search with a layer that calls a function of the program's own, and differentiate that afterwards."""

    @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow ships no types
    def threefold(x: Any) -> Any:
        return 2.0 * x, lambda gradient: 3.0 * gradient

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def helper(x: Any) -> Any:
        return tf.nn.silu(x) + tf.cond(tf.reduce_sum(x) > 0.0, lambda: threefold(x), lambda: x)

    class Calls(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
        def call(self, x: Any) -> Any:
            return helper(tf.nn.silu(x))

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    def gradient() -> Any:
        of = tf.ones((16, 3))
        with tf.GradientTape() as tape:
            tape.watch(of)
            total = tf.reduce_sum(helper(of))
        return tape.gradient(total, of)[0, 0]

    registry = importlib.import_module("tensorflow.python.framework.ops").gradient_registry
    before = set(registry.list())
    searched = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3), Calls()])
    searched.compile("adam", "mse")
    find_batch_size(searched, lambda size: (X[:size], X[:size]), smallest=8, largest=16)
    left = [each for each in set(registry.list()) - before if each.startswith("CustomGradient-")]
    return {
        "eager": float(gradient()),
        "traced": float(tf.function(gradient)()),
        "traces": helper.experimental_get_tracing_count(),
        "left": len(left),
    }


class Noise(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
    """Draws from Keras' generator of all that have no seed."""

    def call(self, x: Any) -> Any:  # noqa: D102 - Keras's
        return x + keras.random.normal(keras.ops.shape(x))


def make_noisy_model() -> Any:
    made = keras.Sequential([keras.layers.Input((3,)), Noise(), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile("sgd", "mse")
    return made


def case_seeds(_: Path) -> Any:
    """Train after a search, which runs before anything is drawn and again later, and without one."""

    def losses(*, search: bool) -> list[float]:
        keras.utils.set_random_seed(5)
        trained, losses = make_noisy_model(), []
        for _ in range(2):
            if search:
                find_batch_size(trained, batch, smallest=8, largest=16)
            losses += trained.fit(X, Y, batch_size=1024, shuffle=False, verbose=0).history["loss"]
        return losses

    return [losses(search=True), losses(search=False)]


class TracedPair(TwoOptimizerModel):
    """Has a step that is a TensorFlow function itself: its traces from a search stay in use."""

    train_step = tf.function(TwoOptimizerModel.train_step)


def case_two_optimizers(_: Path) -> Any:
    """Search with a second optimizer that is not built, has trained, or trains in a traced step."""
    outcomes = {}
    for name in ("new", "trained", "traced"):
        searched, plain = (
            make_two_optimizer_model(of=TracedPair if name == "traced" else TwoOptimizerModel) for _ in range(2)
        )
        second = searched.other
        for each in (searched, plain):
            if name == "trained":
                each.fit(X, Y, verbose=0, batch_size=1024, shuffle=False)
            if name == "traced":
                each.optimizer.build(each.first.trainable_variables)
        find_batch_size(searched, batch, smallest=8, largest=16)
        outcomes[name] = searched.other is second
        for each in (searched, plain):
            each.fit(X, Y, verbose=0, batch_size=1024, shuffle=False)
        one, other = ([*of.get_weights(), *map(np.asarray, of.other.variables)] for of in (searched, plain))
        outcomes[name] &= len(one) == len(other) > 6 and all(map(np.allclose, one, other))
    return outcomes


class Unbuildable(keras.optimizers.SGD):  # type: ignore[misc] # Keras ships no types
    """Finds no room for its variables, in TensorFlow's words."""

    def build(self, variables: Any) -> None:  # noqa: ARG002, D102 - Keras's
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]")


def case_search_fails(_: Path) -> Any:
    class Fails(keras.layers.Layer):  # type: ignore[misc] # Keras ships no types
        def call(self, x: Any) -> Any:
            if x.shape[0] == 32:
                raise LookupError("from a layer")
            return x

    broken = keras.Sequential([keras.layers.Input((3,)), Fails(), keras.layers.Dense(1)])
    broken.compile("sgd", "mse", run_eagerly=True)
    before = read_state(broken)
    error = describe_exception(lambda: find_batch_size(broken, batch, smallest=8))
    restored = [one == other for one, other in zip(before, read_state(broken), strict=True)]
    own = Unbuildable()
    searched = model(own)
    no_room = describe_exception(lambda: find_batch_size(searched, batch, smallest=8))
    no_room["restored"] = searched.optimizer is own
    searched = model()
    whole = read_state(searched)
    too_big = describe_exception(lambda: find_batch_size(searched, batch, smallest=8192))
    return {
        "error": error,
        "restored": restored,
        "no_room": no_room,
        "too_big": too_big,
        "restored_too": whole == read_state(searched),
    }


class Layered(keras.Model):  # type: ignore[misc] # Keras ships no types
    """A model without its own build(), which Keras marks as built when its build() is called."""

    def __init__(self) -> None:
        super().__init__()
        self.only = keras.layers.Dense(1, name="only")

    def call(self, x: Any) -> Any:  # noqa: D102
        return self.only(x)


def case_search_arguments(_: Path) -> Any:
    def wrong(data: Any = batch, of: Any = None, **settings: Any) -> dict[str, Any]:
        return describe_exception(lambda: find_batch_size(of or model(), data, **settings))

    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    marked = Layered()
    marked.build((None, 3))
    marked.compile("sgd", "mse")
    return {
        "dataset": wrong(dataset(8)),
        "batched": wrong(lambda _: batch(32)),
        "lengths": wrong((X, Y[:9])),
        "no_batch": wrong(lambda _: X),
        "no_parts": wrong((None,)),
        "four_parts": wrong(lambda size: (X[:size],) * 4),
        "numbers": wrong((X.tolist(), Y.tolist())),
        "a_batch_of_numbers": wrong(lambda size: (X[:size].tolist(), Y[:size])),
        "margin": wrong(margin=1),
        "margin_of_numpy": wrong(margin=np.float32(1)),
        "largest": wrong(smallest=8, largest=4),
        "unbuilt": wrong(of=unbuilt),
        "marked": wrong(of=marked),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Keras's of shuffle
    gc.freeze()  # what is imported stays: collecting need not look at it
    run_and_print(find_cases(globals()), lambda path: path.parent)

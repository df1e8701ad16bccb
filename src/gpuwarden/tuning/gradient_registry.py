"""TensorFlow's registry of gradient functions, freed of what the trials of a search have traced."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import weakref
from typing import Any

from gpuwarden.client.keras_import import keras


class TemporaryTraces:
    """Traces of TensorFlow functions that are made while this is open; unreferenced ones are freed afterwards.

    TensorFlow keeps forever the gradient function of each all-reduce that it traces, and every step of a Keras
    optimizer has one. That holds the graph, and the graph all variables and constants that it uses: their memory would
    stay taken when the function is gone (seen on TensorFlow 2.21). A function of the program's own that was
    traced here, as one that a layer calls, lives on with its graph, and needs its gradient functions.
    """

    def __enter__(self) -> None:
        self._before = set(_find_registry())

    def __exit__(self, *_: object) -> None:
        functions = _find_registry()
        made = [each for each in functions if each.startswith("CustomGradient-") and each not in self._before]
        left = {name: _move_to_graph(functions[name]) for name in made}
        gc.collect()  # graphs and their functions stand in cycles
        for name, reference in left.items():
            if reference is None:
                continue
            if (function := reference()) is None:
                functions.pop(name, None)
            else:
                functions[name]["type"] = function


def _move_to_graph(entry: dict[str, Any]) -> Any:
    """Let only its graph hold a gradient function, the registry a weak reference; give that, None without a graph."""
    function = entry["type"]
    graphs = _find_graphs(function)
    if not graphs:
        return None
    for graph in graphs:
        graph._gpuwarden_gradients = [*getattr(graph, "_gpuwarden_gradients", ()), function]  # noqa: SLF001 - ours
    reference: Any = weakref.ref(function)

    def call_by_graph(*given: Any) -> Any:
        return reference()(*given)  # who asks has the graph

    entry["type"] = call_by_graph
    return reference


def _find_graphs(function: Any) -> list[Any]:
    """Return the graph that a gradient function is of, and those that it is in: of a branch, the function's."""
    found = []
    with contextlib.suppress(Exception):  # it is TensorFlow's, which may write it otherwise
        of_tape = inspect.getclosurevars(function).nonlocals["tape_grad_fn"]
        result = inspect.getclosurevars(of_tape).nonlocals["result"]
        graph = next(each.graph for each in keras.tree.flatten(result) if hasattr(each, "graph"))
        while graph.building_function:
            found.append(graph)
            graph = graph.outer_graph
    return found


def _find_registry() -> dict[str, Any]:
    """Return TensorFlow's registry of gradient functions; an empty one where this version keeps it elsewhere."""
    if keras.backend.backend() == "tensorflow":
        with contextlib.suppress(ImportError, AttributeError):
            ops = importlib.import_module("tensorflow.python.framework.ops")
            registry: dict[str, Any] = ops.gradient_registry._registry  # noqa: SLF001 - it has no way to leave it
            return registry
    return {}

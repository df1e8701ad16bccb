"""Cleanup of TensorFlow's registry of gradient functions after the trials of a search."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import weakref
from typing import Any

from gpuwarden.client.keras_import import keras


class TemporaryTraces:
    """Context in which TensorFlow functions are traced; at its end, unreferenced traces are freed.

    TensorFlow keeps the gradient function of each all-reduce that it traces forever, and every step of a Keras
    optimizer has one. It references the graph, and the graph all variables and constants that it uses: their memory
    would stay allocated after the function is gone (seen on TensorFlow 2.21). A function of the program that was traced
    here, such as one that a layer calls, keeps its graph and its gradient functions.
    """

    def __enter__(self) -> None:
        self._before = set(_find_registry())

    def __exit__(self, *_: object) -> None:
        functions = _find_registry()
        made = [each for each in functions if each.startswith("CustomGradient-") and each not in self._before]
        moved = {name: _move_to_graph(functions[name]) for name in made}
        gc.collect()  # graphs and their functions are in reference cycles
        for name, reference in moved.items():
            if reference is None:
                continue
            if (function := reference()) is None:
                functions.pop(name, None)
            else:
                functions[name]["type"] = function


def _move_to_graph(entry: dict[str, Any]) -> Any:
    """Move a gradient function to its graph, leave a weak reference in the registry and return it; None: no graph."""
    function = entry["type"]
    graphs = _find_graphs(function)
    if not graphs:
        return None
    for graph in graphs:
        graph._gpuwarden_gradients = [*getattr(graph, "_gpuwarden_gradients", ()), function]  # noqa: SLF001 - ours
    reference: Any = weakref.ref(function)

    def call_by_graph(*arguments: Any) -> Any:
        return reference()(*arguments)  # the caller holds the graph

    entry["type"] = call_by_graph
    return reference


def _find_graphs(function: Any) -> list[Any]:
    """Return the graph of a gradient function, and the graphs around it: of a branch, the function's."""
    found = []
    with contextlib.suppress(Exception):  # internals of TensorFlow, which may change
        of_tape = inspect.getclosurevars(function).nonlocals["tape_grad_fn"]
        result = inspect.getclosurevars(of_tape).nonlocals["result"]
        graph = next(each.graph for each in keras.tree.flatten(result) if hasattr(each, "graph"))
        while graph.building_function:
            found.append(graph)
            graph = graph.outer_graph
    return found


def _find_registry() -> dict[str, Any]:
    """Return TensorFlow's registry of gradient functions; an empty one if this version keeps it elsewhere."""
    if keras.backend.backend() == "tensorflow":
        with contextlib.suppress(ImportError, AttributeError):
            ops = importlib.import_module("tensorflow.python.framework.ops")
            registry: dict[str, Any] = ops.gradient_registry._registry  # noqa: SLF001 - it has no method that removes an entry
            return registry
    return {}

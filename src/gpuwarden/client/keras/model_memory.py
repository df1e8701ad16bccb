"""Memory of a model's variables, added to the report of an out-of-memory."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from gpuwarden.protocol.messages import Error
from gpuwarden.protocol.validators import MAX_COUNT

MAX_VARIABLES = 20_000
_BITS = re.compile(r"(\d+)")
_BYTE = 8
_MIN_BITS = {"bool": 8}


def add_model_memory(error: Error, model: Any) -> Error:
    """Add the memory of the model's variables to an out-of-memory of a device; some ms for a thousand variables."""
    if error.kind != "device_oom":
        return error
    sizes = _list_model_sizes(model)
    total = sum(count for _shape, count in sizes)
    trainable = sum(
        count for _shape, count in _list_sizes(_list_variables(model, "trainable_variables", "trainable_weights"))
    )
    if not 0 < total < MAX_COUNT:
        return error
    shapes = {shape for shape, _count in sizes}
    asked = [_parse_shape(each.shape) for each in error.allocations if each.shape]
    like_weight = any(each in shapes for each in asked) if asked else None
    return replace(error, weights=total, trainable=trainable or None, like_weight=like_weight)


def list_variable_bytes(model: Any) -> list[int]:
    """Return the bytes of each variable of a model and its optimizer."""
    return [count for _shape, count in _list_model_sizes(model)]


def _list_model_sizes(model: Any) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and bytes of each variable of a model and its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return _list_sizes([*_list_variables(model, "variables", "weights"), *_list_variables(optimizer, "variables")])


def _list_sizes(variables: Iterable[Any]) -> list[tuple[tuple[int, ...], int]]:
    found: list[tuple[tuple[int, ...], int]] = []
    for each in {id(each): each for each in variables}.values():
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # unknown shape
            shape = tuple(int(side) for side in each.shape)
            found.append((shape, math.prod(shape) * _compute_width(each.dtype)))
    return found


def _list_variables(owner: Any, *names: str) -> Iterable[Any]:
    for name in names:
        found = getattr(owner, name, None)
        if found is not None:
            # Keras 2's optimizers have a method.
            return islice(found() if callable(found) else found, MAX_VARIABLES)
    return []


def _compute_width(dtype: Any) -> int:
    name = str(getattr(dtype, "name", dtype))
    bits = _BITS.search(name)
    return _MIN_BITS.get(name, int(bits[1]) if bits else 32) // _BYTE or 1


def _parse_shape(text: str | None) -> tuple[int, ...]:
    return tuple(int(each) for each in (text or "").split(",") if each.isdigit())

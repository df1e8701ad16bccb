"""The functions that fit, evaluate and predict call each step, with somebody before them who sees what they raise.

Keras tells a callback of no exception. What is set before a function is taken away again at the end, and at an error.
"""

from __future__ import annotations

from typing import Any, Literal

from gpuwarden.client.input_wait import InputMeter
from gpuwarden.client.keras.wrapped_function import Observer, reports_to, unwrap, wrap

FunctionKind = Literal["train", "test", "predict"]
FUNCTION_KINDS: tuple[FunctionKind, ...] = ("train", "test", "predict")


class FunctionPatch:
    """The functions of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def watch(self, kind: FunctionKind, observer: Observer, feed: InputMeter | None = None) -> None:
        """Stand before a function; again each epoch, since `compile` or `make_train_function` makes another.

        `feed` is shown what the function is called with.
        """
        function = getattr(self._model, f"{kind}_function", None)
        if function is not None:
            setattr(self._model, f"{kind}_function", wrap(function, observer, feed))

    def watch_test_early(self, observer: Observer) -> None:
        """Stand before Keras 2's test function before `evaluate` takes hold of it, which no hook comes before.

        `evaluate` itself would make it a moment later, by the same call.
        """
        if hasattr(self._model, "_get_test_function_runner"):
            if getattr(self._model, "_is_compiled", False):
                self._model.make_test_function()
            self.watch("test", observer)

    def leave(self, observer: Observer, *kinds: FunctionKind) -> None:
        """Put the model's own functions back where `observer` stands before them: all of them unless some are named."""
        for kind in kinds or FUNCTION_KINDS:
            if reports_to(getattr(self._model, f"{kind}_function", None), observer):
                self._put_back(kind)

    def clear(self) -> None:
        """Put the model's own functions back, whoever was left standing before them."""
        for kind in FUNCTION_KINDS:
            self._put_back(kind)

    def _put_back(self, kind: FunctionKind) -> None:
        function = getattr(self._model, f"{kind}_function", None)
        if unwrap(function) is not function:
            setattr(self._model, f"{kind}_function", unwrap(function))

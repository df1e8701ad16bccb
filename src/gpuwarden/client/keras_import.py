"""Import of the Keras package that the program makes its models with."""

from __future__ import annotations

import importlib
import os
from typing import Any


def _import_keras() -> Any:
    names = ["keras", "tf_keras", "tensorflow.keras"]
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        names.sort(key="tf_keras".__ne__)
    errors = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ImportError(
        f"gpuwarden.keras: no Keras in this environment; pip install tensorflow, or another backend and keras "
        f"({'; '.join(errors)})"
    )


keras = _import_keras()

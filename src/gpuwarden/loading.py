"""Modules that are not to stay in the daemon's memory, or not to come into it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def without(module: str) -> Iterator[None]:
    """Have an import of the module fail, as documented for sys.modules; where it is loaded already nothing changes."""
    absent = module not in sys.modules
    if absent:
        sys.modules[module] = None  # type: ignore[assignment] # typeshed knows modules alone
    try:
        yield
    finally:
        if absent:
            del sys.modules[module]


def forget(*modules: str) -> None:
    """Give back the memory of modules, and packages whole, that nothing holds any more; an import loads them anew."""
    for name in list(sys.modules):
        if any(name == each or name.startswith(f"{each}.") for each in modules):
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(last, None)
    gc.collect()


def is_installed(module: str) -> bool:
    """Tell whether a package that is optional is there, without loading it."""
    return module in sys.modules or find_spec(module) is not None

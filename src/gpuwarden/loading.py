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


def forget(package: str) -> None:
    """Give back the memory of a package that nothing holds any more; an import of it loads it anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    gc.collect()


def is_installed(module: str) -> bool:
    """Tell whether a package that is optional is there, without loading it."""
    return module in sys.modules or find_spec(module) is not None

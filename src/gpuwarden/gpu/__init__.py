"""The hardware side: ask the driver, name what it answers, freeze it in a snapshot."""

import importlib
import sys
from functools import partial
from types import ModuleType


def _later(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


# nvidia-ml-py imports ctypes.util, and that these two, with which it could run a compiler: 0.65 MiB, which nobody uses
# here. Should somebody, they are imported then.
_absent = [name for name in ("shutil", "tempfile") if name not in sys.modules]
for _name in _absent:
    sys.modules[_name] = ModuleType(_name)
    vars(sys.modules[_name])["__getattr__"] = partial(_later, _name)
importlib.import_module("ctypes.util")
for _name in _absent:
    del sys.modules[_name]

"""Live tensors of TensorFlow, torch and JAX, by their metadata: nothing waits for a device, copies or allocates there.

Tensors are found as the objects that refer to their class, which the garbage collector lists in one pass: 45 ms for
284,000 objects, 85 ms for 1.3 million (TensorFlow 2.21, 2 cores, 2026-11-25).
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

from gpuwarden.client.frameworks import list_running_frameworks

MAX_ALLOCATED_BLOCKS = 12_000_000  # of Python's allocator, up to which all objects are listed: 85 ms at 4 million
MAX_GRAPH_NODES = 30_000  # of torch's autograd graphs: 3 µs each
_NO_NUMBERS = ("resource", "variant", "string")  # TensorFlow's dtypes without a size


class LiveTensor(NamedTuple):
    """Metadata of a tensor; tensors that share one buffer have the same key."""

    key: Any
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    on_host: bool


class TensorReader(ABC):
    """Reader of one framework's tensors."""

    types: frozenset[type]

    def find(self) -> list[Any] | None:
        """Return the live tensors; None where there are too many objects to search."""
        if sys.getallocatedblocks() > MAX_ALLOCATED_BLOCKS:
            return None
        return [each for each in gc.get_referrers(*self.types) if type(each) in self.types]

    @abstractmethod
    def read(self, tensor: Any) -> LiveTensor | None:
        """Return the metadata of a tensor of these types; None where it has no memory. May raise any exception."""

    def follow(self, tensor: Any) -> Iterable[Any]:  # noqa: ARG002 - of a framework without such means
        """Return the tensors that this one keeps alive by other means than Python's references. May raise likewise."""
        return ()

    def inactive(self) -> AbstractContextManager[Any]:
        """Return a context in which reading a tensor runs no code of the program's."""
        return nullcontext()


def make_readers() -> list[TensorReader]:
    """Return the readers of the frameworks in this process. Imports none, and sets up none."""
    readers: list[TensorReader] = []
    if "tensorflow.python.ops.resource_variable_ops" in sys.modules:
        readers.append(_TensorFlowReader())
    if hasattr(sys.modules.get("torch"), "Tensor"):
        readers.append(_TorchReader())
    if "jax" in list_running_frameworks():
        readers.append(_JaxReader())
    return readers


def _list_subclasses(*classes: type) -> frozenset[type]:
    found: set[type] = set()
    left = list(classes)
    while left:
        cls = left.pop()
        if cls not in found:
            found.add(cls)
            left += type.__subclasses__(cls)
    return frozenset(found)


class _TensorFlowReader(TensorReader):
    """Eager tensors and variables. A variable's class is BaseResourceVariable: an optimizer's is no ResourceVariable.

    Buffers have no public address, so tensors that share one, such as reshapes, count once each.
    """

    def __init__(self) -> None:
        eager = sys.modules["tensorflow.python.framework.ops"].EagerTensor
        variable = sys.modules["tensorflow.python.ops.resource_variable_ops"].BaseResourceVariable
        self._eager = _list_subclasses(eager)
        self.types = self._eager | _list_subclasses(variable)
        self._dtypes: dict[int, tuple[str, int]] = {}  # name and size by number: comparing DTypes is slow
        self._on_host: dict[str, bool] = {}  # by device

    def read(self, tensor: Any) -> LiveTensor | None:
        if type(tensor) in self._eager:
            handle, shape = tensor, tensor._shape_tuple()  # noqa: SLF001 - .shape makes a TensorShape, in 3 µs
            dtype, size = self._find_dtype(tensor._datatype_enum(), tensor)  # noqa: SLF001 - likewise
        else:
            handle = tensor._handle  # noqa: SLF001 - .handle of a distributed variable depends on the context
            if type(handle) not in self._eager:  # of a graph
                return None
            shape = tuple(tensor.shape)
            dtype, size = self._find_dtype(tensor.dtype.as_datatype_enum, tensor)
        if dtype in _NO_NUMBERS:
            return None
        device = handle.backing_device
        if device not in self._on_host:
            self._on_host[device] = "CPU:" in device
        return LiveTensor(id(handle), size * prod(shape), shape, dtype, self._on_host[device])

    def _find_dtype(self, number: int, tensor: Any) -> tuple[str, int]:
        if number not in self._dtypes:
            self._dtypes[number] = tensor.dtype.base_dtype.name, tensor.dtype.size
        return self._dtypes[number]


class _TorchReader(TensorReader):
    """Tensors, each with the whole storage that it keeps: of a view that is more than its own elements."""

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]
        self.types = _list_subclasses(self._torch.Tensor)
        self._dtypes: dict[Any, str] = {}
        self._saved: dict[type, list[str]] = {}  # attributes with saved tensors, by type of an autograd node
        self._nodes: set[Any] = set()  # autograd nodes that have been followed

    def read(self, tensor: Any) -> LiveTensor | None:
        device = tensor.device.type
        if device == "meta":
            return None
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).rpartition(".")[2]
        key = storage._cdata  # noqa: SLF001 - data_ptr() of a fake tensor raises, and warns
        return LiveTensor(key, storage.nbytes(), tuple(tensor.shape), self._dtypes[dtype], device == "cpu")

    def follow(self, tensor: Any) -> Iterator[Any]:
        """Yield the gradient, and the tensors that the autograd graph has saved for the backward pass: 3 µs a node.

        A saved tensor is read as it is stored: unpacking it may run the program's hooks, or compute it again.
        """
        if tensor.is_leaf:
            if tensor.grad is not None:
                yield tensor.grad
            return
        left = [tensor.grad_fn]
        while left and len(self._nodes) < MAX_GRAPH_NODES:
            node = left.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            kind = type(node)
            if kind not in self._saved:
                self._saved[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
            leaf = getattr(node, "variable", None)  # of AccumulateGrad
            if leaf is not None:
                yield leaf
            for name in self._saved[kind]:
                yield from _list_saved(node, name)
            left += [each for each, _number in node.next_functions]

    def inactive(self) -> AbstractContextManager[Any]:
        disabled = getattr(self._torch._C, "DisableTorchFunctionSubclass", nullcontext)  # noqa: SLF001 - torch 2.0 on
        context: AbstractContextManager[Any] = disabled()
        return context


def _list_saved(node: Any, name: str) -> Iterator[Any]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed by the backward pass
        return
    for each in saved if isinstance(saved, list | tuple) else (saved,):
        data = getattr(each, "data", None)
        if data is not None:
            yield data


class _JaxReader(TensorReader):
    """Arrays of the default backend. A donated or deleted one is not listed."""

    def __init__(self) -> None:
        self._jax = sys.modules["jax"]
        array = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
        self.types = frozenset() if array is None else frozenset({array})

    def find(self) -> list[Any]:
        return [each for each in self._jax.live_arrays() if type(each) in self.types]

    def read(self, tensor: Any) -> LiveTensor | None:
        if tensor.is_deleted():
            return None
        sharding = tensor.sharding
        devices = sharding.addressable_devices
        size = tensor.nbytes
        key: Any = id(tensor)
        if len(devices) == 1 and sharding.num_devices == 1:
            key = tensor.unsafe_buffer_pointer()
        elif tensor.size:
            size = size // tensor.size * prod(sharding.shard_shape(tensor.shape)) * len(devices)
        on_host = next(iter(devices)).platform == "cpu"
        return LiveTensor(key, size, tuple(tensor.shape), str(tensor.dtype), on_host)


def list_types(readers: Iterable[TensorReader]) -> dict[type, TensorReader]:
    """Return the reader of each type of tensor."""
    return {kind: reader for reader in readers for kind in reader.types}

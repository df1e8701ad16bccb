"""Program that tries one framework on its devices, run by the environment's interpreter: `smoke_program.py NAME KIND`.

It needs the standard library and the framework only, and Python 3.8. KIND is `gpu`, or `cpu` for a trial without GPUs,
on two devices of the CPU. Each step is a line of JSON on standard output when it begins, and one when it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

SIZE = 2048  # of the matrices: 17 billion operations
COPIED_BYTES = 64 * 2**20
REPEATS = 3
COLLECTIVE_SECONDS = 60  # for torch's two processes
# Convolutions by Winograd or FFT round; products of small whole numbers are exact, with TF32 too.
TOLERANCE = 0.01


def report(step: str, device: str = "", **facts: object) -> None:
    """Write one line for the doctor."""
    sys.stdout.write("\n" + json.dumps({"step": step, "device": device, **facts}) + "\n")
    sys.stdout.flush()


def attempt(step: str, device: str, action: Callable[[], dict[str, object]]) -> None:
    """Run a step and report its facts, or its error."""
    report(step, device, state="began")
    try:
        facts = action()
    except Exception as error:  # noqa: BLE001 - any error is the finding
        report(step, device, state="failed", text=describe(error))
    else:
        report(step, device, state="passed", **facts)


def describe(error: Exception) -> str:
    """Return the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class WrongResultError(Exception):
    """A step computed elsewhere, or something else."""


def measure(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs, the first one aside, which sets up libraries."""
    action()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)


class _TensorFlowTrial:
    """TensorFlow, eagerly: each operation says where it ran."""

    def __init__(self, kind: str) -> None:
        self.tf: Any = importlib.import_module("tensorflow")
        self.kind = kind.upper()
        self.tf.config.set_soft_device_placement(enabled=False)  # else an operation moves to the CPU without a word
        if kind == "cpu":
            (cpu,) = self.tf.config.list_physical_devices("CPU")
            configuration = self.tf.config.LogicalDeviceConfiguration
            self.tf.config.set_logical_device_configuration(cpu, [configuration(), configuration()])

    def list_devices(self) -> list[str]:
        """Return the devices' names."""
        return [f"{self.kind}:{index}" for index, _ in enumerate(self.tf.config.list_logical_devices(self.kind))]

    def place(self, device: str, value: Any) -> Any:
        """Copy a value to a device."""
        with self.tf.device(device):
            return self.tf.identity(value)

    def find_place(self, value: Any) -> str:
        """Return the device of a value."""
        return str(value.device).rpartition("device:")[2]

    def fetch(self, value: Any) -> Any:
        """Copy a value to the host, as NumPy has it."""
        return value.numpy()

    def make_numbers(self, shape: Sequence[int]) -> Any:
        """Return small whole numbers in float32 on the host."""
        with self.tf.device("CPU:0"):
            numbers = self.tf.random.stateless_uniform(shape, (1, len(shape)), -4, 5, self.tf.int32)
            return self.tf.cast(numbers, self.tf.float32)

    def multiply(self, device: str, one: Any, other: Any) -> Any:
        """Multiply two matrices."""
        with self.tf.device(device):
            return self.tf.matmul(one, other)

    def convolve(self, device: str, images: Any, kernel: Any) -> Any:
        """Convolve images, channels last."""
        with self.tf.device(device):
            return self.tf.nn.conv2d(images, kernel, strides=1, padding="SAME")

    def add_up(self, devices: list[str]) -> list[float]:
        """Run a step of MirroredStrategy that adds up a gradient of all devices; return what each has then."""
        self.tf.config.set_soft_device_placement(
            enabled=True
        )  # as in training: small parts of a step have no GPU kernel
        strategy = self.tf.distribute.MirroredStrategy(devices)
        with strategy.scope():
            weight = self.tf.Variable(1.0)
        for copy, device in zip(strategy.experimental_local_results(weight), devices):  # noqa: B905 - Python 3.8
            check_place(self, copy, device)

        def step() -> Any:
            replica = self.tf.distribute.get_replica_context()
            factor = self.tf.cast(replica.replica_id_in_sync_group, self.tf.float32) + 1.0
            with self.tf.GradientTape() as tape:
                loss = weight * factor
            return replica.all_reduce("SUM", tape.gradient(loss, weight))

        added = strategy.experimental_local_results(self.tf.function(lambda: strategy.run(step))())
        self.tf.config.set_soft_device_placement(enabled=False)
        return [float(each) for each in added]


class _TorchTrial:
    """torch, eagerly."""

    def __init__(self, kind: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.kind = "cuda" if kind == "gpu" else "cpu"

    def list_devices(self) -> list[str]:
        """Return the devices' names; torch has one CPU, which is tried twice."""
        if self.kind == "cpu":
            return ["cpu", "cpu"]
        return [f"cuda:{index}" for index in range(self.torch.cuda.device_count())]

    def place(self, device: str, value: Any) -> Any:
        copied = value.to(device, copy=True)
        if self.kind == "cuda":
            self.torch.cuda.synchronize(device)
        return copied

    def find_place(self, value: Any) -> str:
        return str(value.device)

    def fetch(self, value: Any) -> Any:
        return value.to("cpu", copy=True)

    def make_numbers(self, shape: Sequence[int]) -> Any:
        generator = self.torch.Generator().manual_seed(len(shape))
        return self.torch.randint(-4, 5, tuple(shape), generator=generator).float()

    def multiply(self, device: str, one: Any, other: Any) -> Any:
        """Multiply two matrices that are on the device, and wait for the product."""
        product = one @ other
        if self.kind == "cuda":
            self.torch.cuda.synchronize(device)
        return product

    def convolve(self, _device: str, images: Any, kernel: Any) -> Any:
        """Convolve images, given with channels last."""
        convolve = self.torch.nn.functional.conv2d
        return convolve(images.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), padding="same")

    def add_up(self, devices: list[str]) -> list[float]:
        """Add up a number of each device, each in a process of its own; return what each has then."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "torch", "cpu" if self.kind == "cpu" else "gpu", folder]
            processes = [
                subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(len(devices))
            ]
            try:
                deadline = time.monotonic() + COLLECTIVE_SECONDS
                texts = [each.communicate(timeout=max(deadline - time.monotonic(), 0.0))[0] for each in processes]
            finally:
                for each in processes:
                    each.kill()
                    each.wait()
        if any(each.returncode for each in processes):
            raise WrongResultError("a process of torch.distributed failed; NCCL_DEBUG=INFO shows more")
        return [float(text.split()[-1]) for text in texts]

    def join(self, folder: str, rank: int) -> None:
        """Be one of the two processes, and print the sum."""
        distributed: Any = importlib.import_module("torch.distributed")
        device = self.list_devices()[rank]
        if self.kind == "cuda":
            self.torch.cuda.set_device(rank)
        backend = "nccl" if self.kind == "cuda" else "gloo"
        distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
        value = self.torch.tensor(rank + 1.0, device=device)
        distributed.all_reduce(value)
        sys.stdout.write(f"\n{float(value)}\n")
        distributed.destroy_process_group()


class _JaxTrial:
    """JAX."""

    def __init__(self, kind: str) -> None:
        if kind == "cpu":
            os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        if os.environ.get("JAX_PLATFORMS"):  # the results are compared with the CPU's
            os.environ["JAX_PLATFORMS"] += ",cpu"
        self.jax: Any = importlib.import_module("jax")
        self.kind = kind

    def list_devices(self) -> list[str]:
        try:
            return [f"{self.kind}:{index}" for index, _ in enumerate(self.jax.devices(self.kind))]
        except RuntimeError:  # no backend of this kind
            return []

    def place(self, device: str, value: Any) -> Any:
        return self.jax.device_put(value, self._device(device)).block_until_ready()

    def find_place(self, value: Any) -> str:
        (device,) = value.devices()
        return next((name for name in self.list_devices() if self._device(name) == device), str(device))

    def fetch(self, value: Any) -> Any:
        numpy: Any = importlib.import_module("numpy")
        return numpy.array(value)

    def make_numbers(self, shape: Sequence[int]) -> Any:
        numpy: Any = importlib.import_module("numpy")
        return numpy.random.default_rng(len(shape)).integers(-4, 5, size=shape).astype("float32")

    def multiply(self, _device: str, one: Any, other: Any) -> Any:
        numpy: Any = importlib.import_module("numpy")
        if isinstance(one, numpy.ndarray):
            return one @ other
        return self.jax.numpy.matmul(one, other).block_until_ready()

    def convolve(self, _device: str, images: Any, kernel: Any) -> Any:
        """Convolve images, channels last; on the CPU those of the host."""
        layout = ("NHWC", "HWIO", "NHWC")
        images, kernel = (
            each if hasattr(each, "devices") else self.jax.device_put(each, self.jax.devices("cpu")[0])
            for each in (images, kernel)
        )
        convolve = self.jax.lax.conv_general_dilated
        return convolve(images, kernel, (1, 1), "SAME", dimension_numbers=layout).block_until_ready()

    def add_up(self, devices: list[str]) -> list[float]:
        """Add up a number of each device by `psum`; return what each has then."""
        chosen = [self._device(each) for each in devices]
        add = self.jax.pmap(lambda value: self.jax.lax.psum(value, "all"), axis_name="all", devices=chosen)
        numbers = self.jax.numpy.arange(1.0, len(devices) + 1)
        return [float(each) for each in self.fetch(add(numbers))]

    def _device(self, name: str) -> Any:
        kind, _, index = name.partition(":")
        return self.jax.devices(kind)[int(index)]


FRAMEWORKS: dict[str, Any] = {"tensorflow": _TensorFlowTrial, "torch": _TorchTrial, "jax": _JaxTrial}


def check_place(framework: Any, value: Any, device: str) -> None:
    """Raise WrongResultError if a value is not on a device."""
    place = framework.find_place(value)
    if place.lower() != device.lower():
        raise WrongResultError(f"the result is on {place}, not on {device}")


def check_numbers(framework: Any, value: Any, expected: Any, tolerance: float) -> None:
    """Raise WrongResultError if a result differs from that of the CPU, by more than a part of its largest number."""
    found, right = framework.fetch(value), framework.fetch(expected)
    error = float(abs(found - right).max() / abs(right).max())
    if not error <= tolerance:  # also if it is not a number
        raise WrongResultError(f"wrong numbers: they differ from the CPU's by {error:.2g} of the largest")


def try_matmul(framework: Any, device: str) -> dict[str, object]:
    """Multiply matrices of whole numbers: the product is exact. Return the speed."""
    one, other = (framework.make_numbers([SIZE, SIZE]) for _ in range(2))
    expected = framework.multiply("CPU:0", one, other)
    placed = [framework.place(device, each) for each in (one, other)]
    product = framework.multiply(device, *placed)
    check_place(framework, product, device)
    check_numbers(framework, product, expected, 0.0)
    seconds = measure(lambda: framework.fetch(framework.multiply(device, *placed)[:1, :1]))
    return {"text": f"{2 * SIZE**3 / seconds / 1e12:.2f} TFLOP/s"}


def try_convolution(framework: Any, device: str) -> dict[str, object]:
    """Convolve images, which needs cuDNN on a GPU. Return the time of the first one, with all that it loads."""
    images, kernel = framework.make_numbers([8, 64, 64, 16]), framework.make_numbers([3, 3, 16, 16])
    expected = framework.convolve("CPU:0", images, kernel)
    placed = [framework.place(device, each) for each in (images, kernel)]
    began = time.perf_counter()
    result = framework.convolve(device, *placed)
    check_place(framework, result, device)
    check_numbers(framework, result, expected, TOLERANCE)
    return {"text": f"{time.perf_counter() - began:.1f} s for the first"}


def try_bandwidth(framework: Any, device: str) -> dict[str, object]:
    """Copy an array to a device and back. Return the rates; the array must come back as it was."""
    array = framework.make_numbers([COPIED_BYTES // 4])
    placed = framework.place(device, array)
    check_place(framework, placed, device)
    check_numbers(framework, placed, array, 0.0)
    up = measure(lambda: framework.fetch(framework.place(device, array)[:1]))
    down = measure(lambda: framework.fetch(placed))
    rates = COPIED_BYTES / up, COPIED_BYTES / down
    return {"text": f"{rates[0] / 1e9:.1f} GB/s to it, {rates[1] / 1e9:.1f} GB/s back", "rate": min(rates)}


def try_collective(framework: Any, devices: list[str]) -> dict[str, object]:
    """Add up a number of two devices: each must have the sum."""
    found = framework.add_up(devices)
    if found != [3.0, 3.0]:
        raise WrongResultError(f"1 + 2 is {found} on {devices}")
    return {"text": "added up on both"}


def main(name: str, kind: str) -> None:
    """Try a framework on each of its devices of a kind."""
    report("devices", state="began")
    try:
        framework = FRAMEWORKS[name](kind)
        devices = framework.list_devices()
    except Exception as error:  # noqa: BLE001 - any error is the finding
        report("devices", state="failed", text=describe(error))
        return
    report("devices", state="passed", text=", ".join(devices), count=len(devices))
    for step, action in (("matmul", try_matmul), ("convolution", try_convolution), ("bandwidth", try_bandwidth)):
        for device in dict.fromkeys(devices):
            attempt(step, device, partial(action, framework, device))
    if len(devices) > 1:
        pair = devices[:2]
        attempt("collective", " and ".join(pair), partial(try_collective, framework, pair))


if __name__ == "__main__":
    if len(sys.argv) > 3:  # noqa: PLR2004 - with the folder and rank of a process of torch.distributed
        _TorchTrial(sys.argv[2]).join(sys.argv[3], int(sys.argv[4]))
    else:
        main(sys.argv[1], sys.argv[2])

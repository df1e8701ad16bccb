"""Device memory and out-of-memory errors of torch, JAX and Keras on both, reported on a machine with a real GPU.

`make gpu-check` runs these where torch or JAX are installed with CUDA. Each case is a separate process, because a
framework keeps its memory until its process ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from receiver import Receiver
from services import Daemon, Process, end_processes, fetch, wait_until

from gpuwarden.nvml.driver import binding, explain_unusable
from gpuwarden.protocol.messages import Error, Hello, Message, Report
from system_parts import skip_without

pytestmark = pytest.mark.gpu

TIME = 240  # seconds; a framework takes long to initialize a GPU
MIB = 1 << 20
MEMORY = 256 * MIB  # that each case allocates

TORCH = """
import json, os, sys
import torch
from gpuwarden import watch
from gpuwarden.client.frameworks import cuda_devices as cuda
with watch("torch", interval=0) as run:
    run.step()
    before = torch.cuda.is_initialized(), cuda.read_uuids()
    torch.cuda.set_per_process_memory_fraction(0.1, 0)
    held = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda:0")
    for _ in range(3):
        held += 1
        run.step()
    properties = torch.cuda.get_device_properties(0)
    print(json.dumps({
        "before": before, "cuda": cuda.read_uuids(), "own": str(getattr(properties, "uuid", "")),
        "current": torch.cuda.memory_allocated(0), "peak": torch.cuda.max_memory_allocated(0),
        "reserved": torch.cuda.memory_reserved(0), "total": properties.total_memory,
    }), flush=True)
    sys.stdin.readline()
    run.step()
    more = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(1000)]
"""

JAX = """
import json, os, sys
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.1"
import jax
from jax._src import xla_bridge
from gpuwarden import watch
from gpuwarden.client.frameworks import cuda_devices as cuda
with watch("jax", interval=0) as run:
    run.step()
    before = bool(xla_bridge._backends), cuda.read_uuids()
    held = jax.numpy.zeros(256 << 20, dtype="uint8")
    for _ in range(3):
        held = (held + 1).block_until_ready()
        run.step()
    statistics = jax.local_devices()[0].memory_stats()
    print(json.dumps({"before": before, "cuda": cuda.read_uuids(), "statistics": statistics}), flush=True)
    sys.stdin.readline()
    run.step()
    more = [jax.numpy.zeros(1 << 30, dtype="uint8").block_until_ready() for _ in range(1000)]
"""

# Allocate all but the last gigabytes of the device, or the pool, at once; then small pieces until it is full.
TORCH_TO_THE_END = """
import time
import torch
from gpuwarden import watch
with watch("torch to the end") as run:
    x = torch.ones((4096, 4096), device="cuda:0")
    torch.nn.functional.conv2d((x @ x)[None, None], x[None, None, :3, :3]).sum().item()
    free, _ = torch.cuda.mem_get_info(0)
    held = [torch.empty(free - (3 << 30), dtype=torch.uint8, device="cuda:0")]
    while True:
        run.step()
        time.sleep(0.2)
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0"))
"""
JAX_TO_THE_END = """
import time
import jax
from gpuwarden import watch
with watch("jax to the end") as run:
    x = jax.numpy.ones((4096, 4096))
    (x @ x).block_until_ready()
    statistics = jax.local_devices()[0].memory_stats()
    rest = statistics["bytes_limit"] - statistics["bytes_in_use"] - (3 << 30)
    held = [jax.numpy.zeros(rest, dtype="uint8").block_until_ready()]
    while True:
        run.step()
        time.sleep(0.2)
        held.append(jax.numpy.zeros(64 << 20, dtype="uint8").block_until_ready())
"""
PIECE = 64 * MIB

KERAS = """
import json, sys
import numpy as np
from gpuwarden.keras import GpuWarden, keras
class Huge(keras.layers.Layer):
    def call(self, x):
        wide = keras.ops.ones((1 << 20, 8)) * keras.ops.mean(x)
        return x + keras.ops.mean(keras.ops.matmul(wide, keras.ops.transpose(wide)))  # 4 TiB that no fusion avoids
def fit(*layers, **compiling):
    model = keras.Sequential([keras.layers.Input((1024,)), *layers, keras.layers.Dense(8192), keras.layers.Dense(1)])
    model.compile("adam", "mse", **compiling)
    x = np.ones((64, 1024), "float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[GpuWarden(interval=0)])
fit()
"""
CAUGHT = """
try:
    fit(Huge(), run_eagerly=True)
except Exception as error:
    print(type(error).__name__)
"""
# JAX raises it outside any wrapper: while Keras builds the model, or when a result is read.
UNCAUGHT = """
fit(Huge(), run_eagerly=True)
"""


@pytest.fixture(scope="module", autouse=True)
def uuids() -> Iterator[list[str]]:
    """Yield the UUIDs of the GPUs in NVML's order; skip without a GPU."""
    reason = explain_unusable(binding(), patience=30)
    if reason:
        pytest.skip(f"no usable GPU: {reason}")
    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    yield [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    pynvml.nvmlShutdown()


def needs(framework: str) -> None:
    """Skip if the framework is missing or has no GPU."""
    skip_without(framework)
    checks = {
        "torch": "import torch; print(torch.cuda.is_available())",
        "jax": "import jax; print(jax.default_backend() == 'gpu')",
    }
    output = subprocess.run([sys.executable, "-c", checks[framework]], capture_output=True, timeout=TIME, check=False)
    if output.stdout.strip() != b"True":
        pytest.skip(f"{framework} has no GPU here")


class Script(Process):
    """A script that prints one line, waits for a line on standard input, and then ends."""

    def __init__(self, script: str, folder: Path, socket: str) -> None:
        super().__init__([sys.executable, "-c", script], folder / "script.log", {"GPUWARDEN_SOCKET": socket})

    def read_line(self) -> dict[str, Any]:
        """Return the line that it printed, parsed; wait for it."""

        def line() -> str:
            assert self.popen.poll() is None, self.output()
            return next((each for each in self.output().splitlines() if each.startswith("{")), "")

        found: dict[str, Any] = json.loads(wait_until(line, "the script's line", TIME))
        return found


def reports(messages: list[Message]) -> list[Report]:
    """Return the reports among the messages."""
    return [each for each in messages if isinstance(each, Report)]


def error_of(messages: list[Message]) -> Error:
    """Return the only error among the messages."""
    (error,) = [each for each in messages if isinstance(each, Error)]
    return error


def test_torch(tmp_path: Path, uuids: list[str]) -> None:
    """Torch's memory is reported by CUDA's UUIDs, within the configured limit, and an out-of-memory error too."""
    needs("torch")
    daemon = Receiver(tmp_path / "run.sock")
    script = Script(TORCH, tmp_path, daemon.path)
    with end_processes(script):
        printed = script.read_line()
        peer = daemon.accept()
        messages = peer.waiting()
        script.send_line("on")
        assert script.popen.wait(TIME) == 1
        after = peer.waiting()
    daemon.close()
    assert printed["before"] == [False, None]
    assert set(printed["cuda"]) <= set(uuids)
    assert not printed["own"] or printed["cuda"][0] == f"GPU-{printed['own']}"
    hello = [each for each in messages if isinstance(each, Hello)][-1]
    assert hello.framework.startswith("torch ")
    assert dict(hello.devices) == {f"GPU:{index}": uuid for index, uuid in enumerate(printed["cuda"])}
    memory = reports(messages)[-1].memory
    assert set(memory) == {"GPU:0"}  # only this GPU was used
    reported = memory["GPU:0"]
    assert (reported.current, reported.peak, reported.reserved) == (
        printed["current"],
        printed["peak"],
        printed["reserved"],
    )
    assert reported.current >= MEMORY
    assert reported.limit == int(printed["total"] * 0.1)
    error = error_of(after)
    assert (error.kind, error.exception) == ("device_oom", "OutOfMemoryError")
    assert [each.requested for each in error.allocations] == [1 << 30]
    assert reports(after)[-1].errors == {"device_oom": 1}
    assert "CUDA out of memory" in script.output()  # raised unchanged


def test_jax(tmp_path: Path, uuids: list[str]) -> None:
    """Watching JAX initializes no device; its memory and out-of-memory error are reported."""
    needs("jax")
    daemon = Receiver(tmp_path / "run.sock")
    script = Script(JAX, tmp_path, daemon.path)
    with end_processes(script):
        printed = script.read_line()
        peer = daemon.accept()
        messages = peer.waiting()
        script.send_line("on")
        assert script.popen.wait(TIME) == 1
        after = peer.waiting()
    daemon.close()
    assert printed["before"] == [False, None]
    hello = [each for each in messages if isinstance(each, Hello)][-1]
    assert hello.framework.startswith("jax ")
    assert hello.devices["GPU:0"] == printed["cuda"][0]
    assert hello.devices["GPU:0"] in uuids
    reported, statistics = reports(messages)[-1].memory["GPU:0"], printed["statistics"]
    assert reported.peak == statistics["peak_bytes_in_use"] >= reported.current >= MEMORY
    assert reported.limit == statistics["bytes_limit"]
    assert reported.reserved is not None, statistics
    assert reported.limit is not None
    assert reported.current <= reported.reserved <= reported.limit
    error = error_of(after)
    assert error.kind == "device_oom"
    assert [each.requested for each in error.allocations] == [1 << 30]


@pytest.mark.parametrize(
    ("backend", "end", "status"), [("torch", CAUGHT, 0), ("jax", UNCAUGHT, 1)], ids=["torch", "jax"]
)
def test_keras(tmp_path: Path, uuids: list[str], backend: str, end: str, status: int) -> None:
    """Keras on torch and on JAX reports memory by the GPU's UUID, and an out-of-memory error."""
    needs(backend)
    skip_without("keras")
    daemon = Receiver(tmp_path / "run.sock")
    done = subprocess.run(
        [sys.executable, "-c", KERAS + end],
        env={**os.environ, "KERAS_BACKEND": backend, "GPUWARDEN_SOCKET": daemon.path},
        capture_output=True,
        text=True,
        timeout=TIME,
        check=False,
    )
    assert done.returncode == status, done.stderr[-4000:]
    messages = daemon.accept().waiting()
    daemon.close()
    hello = messages[0]
    assert isinstance(hello, Hello)
    assert hello.framework.startswith(f"{backend} ")
    assert hello.devices["GPU:0"] in uuids
    gpu_memory = [each.memory["GPU:0"] for each in reports(messages) if each.memory]
    assert gpu_memory[-1].peak > 32 * MIB  # the wide layer's weights
    assert error_of(messages).kind == "device_oom"
    assert reports(messages)[-1].steps >= 16  # JAX may raise it some steps after the failed allocation


@pytest.mark.parametrize(("framework", "script"), [("torch", TORCH), ("jax", JAX)])
def test_headroom(tmp_path: Path, framework: str, script: str, uuids: list[str]) -> None:
    """The daemon joins a real run with its GPU: memory and headroom by UUID, within the allocator's limit."""
    needs(framework)
    daemon = Daemon(tmp_path / "daemon")
    with end_processes(daemon):
        training = Script(script, tmp_path, str(daemon.socket))
        with end_processes(training):
            training.read_line()
            wait_until(lambda: daemon.samples().all("gpuwarden_run_memory_headroom_bytes"), "headroom")
            samples = daemon.samples()
            ((labels, used),) = samples.all("gpuwarden_run_allocator_memory_bytes").items()
            uuid = dict(labels)["uuid"]
            assert uuid in uuids
            limit = samples.value("gpuwarden_run_allocator_memory_limit_bytes", uuid=uuid)
            headroom = samples.value("gpuwarden_run_memory_headroom_bytes", uuid=uuid)
            assert limit is not None
            assert headroom is not None
            assert MEMORY <= used <= limit
            assert 0 < headroom <= limit - used
            assert samples.value("gpuwarden_run_unresolved_devices") == 0


@pytest.mark.parametrize(("framework", "script"), [("torch", TORCH_TO_THE_END), ("jax", JAX_TO_THE_END)])
def test_headroom_is_calibrated(tmp_path: Path, framework: str, script: str) -> None:
    """When a full device or pool fails an allocation, the reported headroom is less than three of its pieces."""
    needs(framework)
    daemon = Daemon(tmp_path / "daemon")
    with end_processes(daemon):
        training = Script(script, tmp_path, str(daemon.socket))
        with end_processes(training):

            def failed() -> dict[str, Any]:
                answer = json.loads(fetch(f"{daemon.url}/api/v1/runs") or '{"live": [], "past": []}')
                errors = [each for run in answer["live"] + answer["past"] for each in run.get("reported_errors", ())]
                return errors[0] if errors else {}

            error = wait_until(failed, "the out-of-memory", TIME)
    ((uuid, left),) = error["headroom_bytes"].items()
    requested = error["allocations"][0]["requested_bytes"]
    least = error["least_headroom_bytes"][uuid]
    print(  # noqa: T201 - for docs/engineering/accuracy.md: pytest -s shows it
        f"\n{framework}: {requested / MIB:.1f} MiB requested, {left / MIB:.1f} MiB left, at least {least / MIB:.1f} MiB"
    )
    assert error["kind"] == "device_oom"
    assert requested == PIECE
    assert 0 <= left < 3 * PIECE

"""Watches in real loops of torch, JAX and TensorFlow, on their CPU builds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from receiver import Receiver
from services import ROOT

from gpuwarden.protocol.messages import Hello, Message, Report
from system_parts import needs_framework

IMPORT_TIME = 120  # seconds until a framework that hangs is ended

pytestmark = pytest.mark.frameworks


def run_and_receive(daemon: Receiver, script: str, **environment: str) -> tuple[str, list[Message]]:
    """Run a script in its own interpreter; return its output and its messages."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **quiet, **environment},
        capture_output=True,
        text=True,
        timeout=IMPORT_TIME,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip(), daemon.accept().waiting()


def hellos(messages: list[Message]) -> list[Hello]:
    """Keep the hellos."""
    return [each for each in messages if isinstance(each, Hello)]


def last(messages: list[Message]) -> Report:
    """Return the last report."""
    return [each for each in messages if isinstance(each, Report)][-1]


@needs_framework("torch")
def test_torch_on_the_cpu(daemon: Receiver) -> None:
    """A torch loop on the CPU reports its steps and input wait, and no device; CUDA is not touched."""
    script = """
import torch
from gpuwarden import watch
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.ones(32, 3), torch.ones(32, 1)), batch_size=8, num_workers=1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters())
with watch("torch", interval=0) as run:
    for epoch in run.epochs(2):
        for x, y in run.batches(data):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(batch_size=len(x), loss=loss.item())
print(torch.__version__, torch.cuda.is_initialized())
"""
    printed, messages = run_and_receive(daemon, script)
    first, hello = hellos(messages)
    assert first == replace(hello, no_gpu=None)
    assert hello.no_gpu == ("cpu_build" if importlib.import_module("torch").version.cuda is None else "no_driver")
    assert printed == f"{hello.framework.removeprefix('torch ')} False"
    assert (hello.framework[:6], hello.devices) == ("torch ", {})
    report = last(messages)
    assert (report.steps, report.examples, report.epoch, report.memory) == (8, 64, 1, {})
    assert report.loss is not None
    assert report.input_wait_seconds is not None
    assert 0 < report.input_wait_seconds < (report.input_observed_seconds or 0)


@needs_framework("torch")
def test_torchrun(daemon: Receiver) -> None:
    """Each process of a torchrun job is a run, with its rank and the same job."""
    script = """
import sys
from torch.distributed.run import main
sys.argv[1:] = ["--standalone", "--nproc-per-node", "2", "examples/torch_loop.py"]
main()
"""
    printed, messages = run_and_receive(daemon, script, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert printed.count("epoch 2:") == 2
    hello, other = hellos(messages)[-1], hellos(daemon.accept().waiting())[-1]
    assert {hello.rank, other.rank} == {0, 1}
    assert hello.world_size == other.world_size == 2
    assert hello.job == other.job is not None


@needs_framework("jax")
def test_jax_on_the_cpu(daemon: Receiver) -> None:
    """A watch does not make JAX's devices; the loop does. A CPU without statistics has none."""
    script = """
import jax
from jax._src import xla_bridge
from gpuwarden import watch
with watch("jax", interval=0, devices={"CPU:0": "GPU-a"}) as run:
    run.step()
    print(bool(xla_bridge._backends), end=" ")
    step = jax.jit(lambda x: x * 0.5)
    x = jax.numpy.ones(8)
    for batch in run.batches([1, 2, 3]):
        x = step(x)
        run.step(batch_size=8, loss=x[0])
print(jax.__version__)
"""
    printed, messages = run_and_receive(daemon, script)
    hello = hellos(messages)[-1]
    assert printed == f"False {hello.framework.removeprefix('jax ')}"
    assert (hello.framework[:4], hello.devices) == ("jax ", {"CPU:0": "GPU-a"})
    assert (last(messages).steps, last(messages).memory, last(messages).loss) == (4, {}, None)


@needs_framework("tensorflow")
def test_tensorflow_on_the_cpu(daemon: Receiver) -> None:
    """A GradientTape loop reports TensorFlow's allocator; until it computes, its devices can be configured."""
    script = """
import tensorflow as tf
from gpuwarden import watch
with watch("tape", interval=0, devices={"CPU:0": "GPU-a"}) as run:
    run.step()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    x = tf.Variable(tf.ones((1 << 18,)))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x)
        x.assign_sub(0.1 * tape.gradient(loss, x))
        run.step(loss=float(loss))
print(len(tf.config.list_logical_devices("CPU")), tf.__version__)
"""
    printed, messages = run_and_receive(daemon, script, TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="512")
    hello = hellos(messages)[-1]
    assert printed == f"2 {hello.framework.removeprefix('tensorflow ')}"
    assert hello.devices == {"CPU:0": "GPU-a"}
    memory = last(messages).memory["CPU:0"]
    assert memory.limit == 512 << 20
    assert memory.peak >= memory.current >= 2 << 20  # the variable, in each of the CPU's halves, which share it
    assert last(messages).steps == 4


@needs_framework("jax")
def test_jax_without_a_gpu(daemon: Receiver) -> None:
    """JAX's CPU build is named as the reason, and its devices are not made to find out."""
    script = """
import jax
from jax._src import xla_bridge
from gpuwarden import watch
with watch("jax", interval=0) as run:
    run.step()
    print(bool(xla_bridge._backends))
    jax.numpy.ones(8).block_until_ready()
    run.step()
    run.step()
"""
    printed, messages = run_and_receive(daemon, script)
    assert printed == "False"
    assert [hello.no_gpu for hello in hellos(messages)] == [None, "cpu_build"]

"""Staged failures: what happens to a box, and the finding that its incident must have, written down beforehand.

Each is played on `scenario_daemon.Box`: a whole daemon that polls scripted GPUs every 5 s, reads a kernel log, and gets
the reports and ends of runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scenario_daemon import GIB, Box, run_scenario
from scenarios import GPU_IS_LOST, SIGKILL, Stage, Trainer

from gpuwarden.health.conditions import severity_of
from gpuwarden.protocol.messages import End, Error, ErrorKind, uncaught_reason

GPUS = 4
SIGABRT, SIGSEGV = 6, 11
DRIVER_UNKNOWN = 999
LAUNCH_FAILED = "INTERNAL: Failed to launch CUDA kernel: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2395, remote process exited or there was a network error"
OOM_KILL = "Out of memory: Killed process {pid} (python) total-vm:1kB"

Script = Callable[[Stage], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Incident that must be recorded: its kind, words of its root, and words that its finding has in this order.

    `runs` are the runs that followed from the root, with those of the root itself left out.
    """

    kind: str
    root: str
    words: tuple[str, ...] = ()
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Staged:
    """Staged failure on a box of GPUS GPUs."""

    name: str
    happens: str
    script: Script
    expected: tuple[Expected, ...]


STAGED: list[Staged] = []


def register(happens: str, *expected: Expected) -> Callable[[Script], Script]:
    """Add a script to the staged failures, under its name."""

    def add(script: Script) -> Script:
        STAGED.append(Staged(script.__name__.removeprefix("_"), happens, script, expected))
        return script

    return add


def expect(kind: str, root: str, *words: str, runs: int = 0) -> Expected:
    """Return the expectation of an incident."""
    return Expected(kind, root, words, runs)


def fail_run(trainer: Trainer, kind: ErrorKind, exception: str, text: str, status: int | None = 256) -> None:
    """Let a run report an error and end with it; `status` is as of wait(2), None while it lives on."""
    trainer.errors = {kind: 1}
    trainer.box.send(trainer.peer, Error(kind, exception, text, "train", trainer.steps, (), trainer._memory(), at=0))
    trainer.box.send(trainer.peer, trainer._report())
    if status is not None:
        trainer.box.send(trainer.peer, End(uncaught_reason(exception), "failed"))
        trainer.box.end(trainer.peer, status)


def fail_collective(*ranks: Trainer) -> None:
    """Let ranks fail that wait for another one."""
    for rank in ranks:
        fail_run(rank, "other", "DistBackendError", NCCL)


async def remove_ended(stage: Stage, *trainers: Trainer) -> None:
    """Remove runs that have ended, and let their outcomes settle."""
    for trainer in trainers:
        stage.remove(trainer)
    await stage.advance(30)


def start_job(stage: Stage, ranks: int) -> list[Trainer]:
    """Start a job with a process on each GPU."""
    return [
        stage.train("llama", gpus=(rank,), job="llama-7", rank=rank, world_size=ranks, uid=1001)
        for rank in range(ranks)
    ]


@register(
    "a GPU falls off the bus under a run",
    expect(
        "GpuDown", "GPU 3 fell off the bus (XID 79)", "run resnet then failed with CUDA_ERROR_LAUNCH_FAILED", runs=1
    ),
)
async def _lost_gpu(stage: Stage) -> None:
    run = stage.train("resnet", gpus=(3,))
    await stage.advance(30)
    stage.box.gpu(3).lose(GPU_IS_LOST)
    stage.box.log_xid(3, 79, "pid=4711, name=python, GPU has fallen off the bus.")
    fail_run(run, "kernel_launch", "InternalError", LAUNCH_FAILED)
    await remove_ended(stage, run)


@register(
    "a GPU is lost, and no XID is known",
    expect("GpuDown", "GPU 1 stopped answering (GPU is lost)", "run resnet then crashed", runs=1),
)
async def _lost_gpu_without_xid(stage: Stage) -> None:
    run = stage.train("resnet", gpus=(1,))
    await stage.advance(30)
    stage.box.gpu(1).lose(GPU_IS_LOST)
    stage.box.end(run.peer, SIGABRT)
    await remove_ended(stage, run)


@register(
    "a GPU of a job falls off the bus",
    expect(
        "GpuDown",
        "GPU 2 fell off the bus (XID 79)",
        "3 ranks of job llama-7",
        "rank 2",
        "CUDA_ERROR_LAUNCH_FAILED",
        runs=4,
    ),
)
async def _lost_gpu_of_a_job(stage: Stage) -> None:
    ranks = start_job(stage, 4)
    await stage.advance(30)
    stage.box.gpu(2).lose(GPU_IS_LOST)
    stage.box.log_xid(2, 79, "GPU has fallen off the bus.")
    fail_collective(*ranks[:2])
    fail_run(ranks[2], "kernel_launch", "RuntimeError", LAUNCH_FAILED)
    fail_collective(*ranks[3:])
    await remove_ended(stage, *ranks)


@register(
    "a GPU falls off the bus, and its run hangs",
    expect("GpuDown", "GPU 1 fell off the bus (XID 79)", "run bert then stalled", runs=1),
)
async def _lost_gpu_stalls_a_run(stage: Stage) -> None:
    run = stage.train("bert", gpus=(1,))
    await stage.advance(60)
    stage.box.gpu(1).lose(GPU_IS_LOST)
    stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
    run.stalled = True
    await stage.advance(120)


@register(
    "a program writes out of bounds",
    expect("GpuXidInfo", "GPU 0 reported XID 31", "then GPU 0 reported XID 43", "run mine then crashed", runs=1),
)
async def _illegal_address(stage: Stage) -> None:
    run = stage.train("mine", gpus=(0,))
    await stage.advance(30)
    stage.box.log_xid(0, 31, "pid=9, name=python, Ch 00000008, intr 00000000. MMU Fault")
    stage.box.log_xid(0, 43, "pid=9, name=python, Ch 00000008")
    fail_run(run, "illegal_address", "RuntimeError", ILLEGAL, SIGABRT)
    await remove_ended(stage, run)


@register("the same without an XID", expect("RunDied", "Run mine had an illegal address error", "and failed"))
async def _illegal_address_without_xid(stage: Stage) -> None:
    run = stage.train("mine", gpus=(0,))
    await stage.advance(30)
    fail_run(run, "illegal_address", "RuntimeError", ILLEGAL)
    await remove_ended(stage, run)


@register(
    "a run allocates more than there is",
    expect("RunOutOfMemory", "Run gpt ran out of device memory on GPU 0", "ended out of memory", "90.0 GiB"),
)
async def _batch_too_large(stage: Stage) -> None:
    run = stage.train("gpt", in_use=30 * GIB)
    await stage.advance(30)
    run.fail(90 * GIB)
    await remove_ended(stage, run)


@register("a run catches an out-of-memory", expect("RunOutOfMemory", "Run gpt ran out of device memory"))
async def _caught_out_of_memory(stage: Stage) -> None:
    run = stage.train("gpt", in_use=30 * GIB)
    await stage.advance(30)
    fail_run(run, "device_oom", "ResourceExhaustedError", "OOM when allocating", None)
    await stage.advance(60)


@register(
    "another user's process takes the memory of a run",
    expect(
        "RunOutOfMemory",
        "Run diffusion ran out of device memory on GPU 0",
        "jupyter process",
        "Before: GPU 0 was almost out of memory",
    ),
)
async def _co_tenant(stage: Stage) -> None:
    run = stage.train("diffusion", in_use=30 * GIB)
    other = stage.box.start(1002, comm="jupyter")
    card = stage.box.cards[0]
    card.memory[other.pid] = 2 * GIB
    await stage.advance(60)
    for _ in range(5):
        card.memory[other.pid] += round(9.2 * GIB)
        await stage.advance(10)
    run.fail(4 * GIB)
    await remove_ended(stage, run)


@register(
    "another user's run takes the memory of a run",
    expect(
        "RunOutOfMemory",
        "Run diffusion ran out of device memory on GPU 0",
        "run sweep (5000002-10000000) of hedy",
        "Before: GPU 0 was almost out of memory",
    ),
)
async def _co_tenant_run(stage: Stage) -> None:
    run, other = stage.train("diffusion", in_use=30 * GIB), stage.train("sweep", in_use=2 * GIB, uid=1002)
    await stage.advance(60)
    for _ in range(5):
        other.in_use += round(9.2 * GIB)
        await stage.advance(10)
    run.fail(4 * GIB)
    await remove_ended(stage, run)


@register("memory runs low, and lasts", expect("GpuMemoryPressureCritical", "GPU 0 was almost out of memory"))
async def _pressure_only(stage: Stage) -> None:
    run = stage.train("wide", in_use=30 * GIB)
    await stage.advance(60)
    other = stage.box.start(1002, comm="jupyter")
    stage.box.cards[run.gpus[0]].memory[other.pid] = round(47.9 * GIB)
    await stage.advance(30)


@register(
    "the kernel kills a run for host memory", expect("RunOutOfMemory", "Run tabular ended out of memory", "OOM killer")
)
async def _host_kill(stage: Stage) -> None:
    run = stage.train("tabular")
    await stage.advance(30)
    stage.box.log_kernel(OOM_KILL.format(pid=run.peer.pid))
    stage.box.end(run.peer, SIGKILL)
    await remove_ended(stage, run)


@register(
    "the kernel kills a rank, and the others fail",
    expect("RunOutOfMemory", "Run llama (rank 0) ended out of memory", "3 other ranks of its job then failed", runs=3),
)
async def _host_kill_of_a_rank(stage: Stage) -> None:
    ranks = start_job(stage, 4)
    await stage.advance(30)
    stage.box.log_kernel(OOM_KILL.format(pid=ranks[0].peer.pid))
    stage.box.end(ranks[0].peer, SIGKILL)
    fail_collective(*ranks[1:])
    await remove_ended(stage, *ranks)


@register(
    "a rank crashes, and the others fail before that is known",
    expect("RunDied", "Run llama (rank 2) crashed (ended by SIGSEGV", "3 other ranks of its job then failed", runs=3),
)
async def _crash_of_a_rank(stage: Stage) -> None:
    ranks = start_job(stage, 4)
    await stage.advance(30)
    fail_collective(*ranks[:2], *ranks[3:])
    stage.box.end(ranks[2].peer, SIGSEGV)
    await remove_ended(stage, *ranks)


@register(
    "a rank runs out of memory, and the others fail",
    expect(
        "RunOutOfMemory", "Run llama (rank 1) ran out of device memory", "3 other ranks of its job then failed", runs=3
    ),
)
async def _out_of_memory_of_a_rank(stage: Stage) -> None:
    ranks = start_job(stage, 4)
    await stage.advance(30)
    ranks[1].fail(90 * GIB)
    fail_collective(*ranks[:1], *ranks[2:])
    await remove_ended(stage, *ranks)


@register(
    "a user kills a run, and its channels are removed",
    expect("RunKilled", "Run vit was killed (ended by SIGKILL)", "then GPU 0 reported XID 45"),
)
async def _killed(stage: Stage) -> None:
    run = stage.train("vit")
    await stage.advance(30)
    stage.box.end(run.peer, SIGKILL)
    stage.box.log_xid(0, 45, "pid=9, name=python, Ch 00000008")
    await remove_ended(stage, run)


@register("a run ends with an exception", expect("RunDied", "Run mnist had", "FileNotFoundError", "and failed"))
async def _exception(stage: Stage) -> None:
    run = stage.train("mnist")
    await stage.advance(30)
    fail_run(run, "other", "FileNotFoundError", "[Errno 2] No such file or directory: '/data/secret'")
    await remove_ended(stage, run)


@register("a run ends with a status other than 0", expect("RunDied", "Run mnist failed (exit status 3)"))
async def _exit_status(stage: Stage) -> None:
    run = stage.train("mnist")
    await stage.advance(30)
    stage.box.end(run.peer, 3 << 8)
    await remove_ended(stage, run)


@register("a run hangs", expect("RunStalled", "Run loader stalled"))
async def _stall(stage: Stage) -> None:
    run = stage.train("loader")
    await stage.advance(60)
    run.stalled = True
    await stage.advance(120)


@register(
    "a rank hangs, the others wait for it, and all are killed",
    expect("RunStalled", "Run llama (rank 3) stalled", "3 other ranks of its job then stalled and were killed", runs=3),
)
async def _stall_of_a_job(stage: Stage) -> None:
    ranks = start_job(stage, 4)
    await stage.advance(60)
    ranks[3].stalled = True
    await stage.advance(20)
    for rank in ranks:
        rank.stalled = True
    await stage.advance(90)
    for rank in ranks:
        stage.box.end(rank.peer, SIGKILL)
    await remove_ended(stage, *ranks)


@register("the hardware slows a hot GPU down", expect("GpuThrottled", "GPU 2 was throttled (hardware thermal slowdown"))
async def _hot(stage: Stage) -> None:
    run = stage.train("vit", gpus=(2,))
    await stage.advance(60)
    stage.box.cards[run.gpus[0]].set_training(temperature=92.0, clock=800, reasons="hw_slowdown hw_thermal_slowdown")
    await stage.advance(30)


@register(
    "a GPU is hotter than its throttle point, and not throttled",
    expect("GpuThermalPressureCritical", "GPU 2 was critically hot"),
)
async def _hot_without_throttling(stage: Stage) -> None:
    run = stage.train("vit", gpus=(2,))
    await stage.advance(60)
    stage.box.cards[run.gpus[0]].set_training(temperature=92.0)
    await stage.advance(30)


@register(
    "a hot GPU falls off the bus",
    expect(
        "GpuThrottled",
        "GPU 2 was throttled (hardware thermal slowdown",
        "then GPU 2 fell off the bus",
        "run vit then crashed",
        runs=1,
    ),
)
async def _too_hot(stage: Stage) -> None:
    await _hot(stage)
    (run,) = stage.trainers
    stage.box.gpu(2).lose(GPU_IS_LOST)
    stage.box.log_xid(2, 79, "GPU has fallen off the bus.")
    stage.box.end(run.peer, SIGABRT)
    await remove_ended(stage, run)


@register(
    "a memory error that ECC cannot correct",
    expect("GpuXidCritical", "GPU 1 reported XID 48", "run bert then failed", runs=1),
)
async def _memory_error(stage: Stage) -> None:
    run = stage.train("bert", gpus=(1,))
    await stage.advance(30)
    stage.box.log_xid(1, 48, "An uncorrectable double bit error (DBE) has been detected on GPU")
    fail_run(run, "hardware", "RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    await remove_ended(stage, run)


@register("a row of memory is to be replaced, and nothing fails", expect("GpuXidWarning", "GPU 0 reported XID 63"))
async def _row_remapped(stage: Stage) -> None:
    stage.train("bert")
    await stage.advance(30)
    stage.box.log_xid(0, 63, "Row Remapper: New row marked for remapping")
    await stage.advance(30)


@register(
    "an NVLink fails under a job",
    expect("GpuXidCritical", "reported XID 74", "then GPU", "2 ranks of job llama-7 then failed", runs=2),
)
async def _nvlink(stage: Stage) -> None:
    ranks = start_job(stage, 2)
    await stage.advance(30)
    for index in range(2):
        stage.box.log_xid(index, 74, "NVLink: fatal error detected on link 3")
    fail_collective(*ranks)
    await remove_ended(stage, *ranks)


@register(
    "all calls to the driver fail",
    expect("GpuwardenDriverFault", "The driver stopped answering", "run resnet then failed", runs=1),
)
async def _driver_fails(stage: Stage) -> None:
    run = stage.train("resnet")
    await stage.advance(30)
    stage.box.break_driver(DRIVER_UNKNOWN)
    fail_run(run, "kernel_launch", "InternalError", LAUNCH_FAILED)
    await remove_ended(stage, run)


@register(
    "two runs of two users die of different causes",
    expect("RunOutOfMemory", "Run gpt ran out of device memory"),
    expect("RunKilled", "Run vit was killed"),
)
async def _two_users(stage: Stage) -> None:
    first, second = stage.train("gpt", gpus=(0,), uid=1000), stage.train("vit", gpus=(3,), uid=1002)
    await stage.advance(30)
    first.fail(90 * GIB)
    stage.box.end(second.peer, SIGKILL)
    await remove_ended(stage, first, second)


@register("an administrator requests it", expect("requested", "Recording requested"))
async def _requested(stage: Stage) -> None:
    stage.train("vit")
    await stage.advance(30)
    stage.box.record_incident("slow since noon")
    await stage.advance(30)


def run_staged(staged: Staged, folder: Path) -> list[Any]:
    """Play a failure on a box; return its incidents, the oldest first."""
    found: list[Any] = []

    async def script(box: Box) -> None:
        await staged.script(Stage(box, whole=False))
        found.extend(await box.incidents())

    run_scenario(script, gpus=GPUS, folder=folder)
    return found


def differences(staged: Staged, incidents: list[Any]) -> list[str]:
    """Return what is wrong with the incidents of a failure."""
    if len(incidents) != len(staged.expected):
        return [f"{len(incidents)} incidents: " + "; ".join(each["finding"]["text"] for each in incidents)]
    wrong = []
    for expected in staged.expected:
        found = next((each for each in incidents if expected.root in each["finding"]["root"]["text"]), None)
        if found is None:
            wrong.append(f"no root {expected.root!r}: {[each['finding']['text'] for each in incidents]}")
            continue
        finding = found["finding"]
        if found["kind"] != expected.kind:
            wrong.append(f"kind {found['kind']}, not {expected.kind}")
        if found["kind"] == "RunOutOfMemory" and found["severity"] != severity_of("RunOutOfMemory"):
            wrong.append(f"severity {found['severity']} is not that of the alert")
        wrong += _wrong_words(finding["text"], expected.words)
        own = finding["root"].get("run_id")
        runs = {each.get("run_id") for each in finding.get("followers", ())} - {None, own}
        if len(runs) != expected.runs:
            wrong.append(f"{len(runs)} runs followed, not {expected.runs}: {finding['text']}")
        if "others" in finding:
            wrong.append(f"others: {finding['others']}")
    return wrong


def _wrong_words(text: str, words: Sequence[str]) -> Iterator[str]:
    place = 0
    for word in words:
        place = text.find(word, place)
        if place < 0:
            yield f"no {word!r} in its place: {text}"
            break
    if re.search(r"\d:\d\d", text):
        yield f"a time of day, of one time zone: {text}"

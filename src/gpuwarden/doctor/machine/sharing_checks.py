"""Checks of the ways to share a GPU: MIG, compute mode and MPS."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gpuwarden.doctor.machine.gpu_findings import GpuFinding, answering_gpus, merge
from gpuwarden.doctor.machine.machine_files import read_text
from gpuwarden.doctor.model import CheckResult, Context, check, passed, warned
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.processes import MPS_COMM
from gpuwarden.owners.users import UserNames

_MPS_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


@check("gpu.mig", "MIG is off, or has instances; no change waits for a reset.")
def _check_mig(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    findings = [finding for gpu in gpus if (finding := _mig_finding(gpu))]
    divided = [gpu for gpu in gpus if gpu.mig]
    profiles = Counter(instance.identity.profile for gpu in divided for instance in gpu.mig)
    counts = ", ".join(f"{count} of {profile}" for profile, count in profiles.items())
    usual = f"{counts}; a program uses one of them" if divided else "off"
    yield merge(findings, usual, gpus)


def _mig_finding(gpu: Gpu) -> GpuFinding | None:
    current, pending = (gpu.value(GpuReadings.mig_mode, setting) for setting in ("current", "pending"))
    index = gpu.identity.index
    if current and not gpu.mig:
        return GpuFinding(
            gpu,
            "fail",
            "MIG is on, without an instance",
            "CUDA finds no device on it.",
            f"sudo nvidia-smi mig -i {index} -cgi PROFILE -C, or without MIG: sudo nvidia-smi -i {index} -mig 0",
        )
    if None not in (current, pending) and current != pending:
        return GpuFinding(
            gpu,
            "warn",
            f"MIG is {'on' if current else 'off'} until the next reset, then {'on' if pending else 'off'}",
            "The setting is not in effect yet.",
            f"sudo nvidia-smi --gpu-reset -i {index}, after the programs on it have ended",
        )
    return None


@check("gpu.compute_mode", "The compute mode lets another program use the GPU.")
def _check_compute_mode(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    findings = [finding for gpu in gpus if (finding := _mode_finding(gpu))]
    exclusive = sum(bool(gpu.value(GpuReadings.compute_mode, "exclusive_process")) for gpu in gpus)
    usual = f"exclusive: one program on each of {exclusive}" if exclusive else "default: programs can share a GPU"
    yield merge(findings, usual, gpus)


def _mode_finding(gpu: Gpu) -> GpuFinding | None:
    fix = f"sudo nvidia-smi -i {gpu.identity.index} -c DEFAULT"
    if gpu.value(GpuReadings.compute_mode, "prohibited"):
        why = "No program can create a CUDA context (all CUDA-capable devices are busy or unavailable)."
        return GpuFinding(gpu, "fail", "compute mode PROHIBITED", why, fix)
    users = [process for process in gpu.processes if process.type == "compute"]
    if users and gpu.value(GpuReadings.compute_mode, "exclusive_process"):
        why = "A second program fails: all CUDA-capable devices are busy or unavailable (unless MPS shares the GPU)."
        text = f"compute mode EXCLUSIVE_PROCESS, and process {users[0].pid} has it"
        return GpuFinding(gpu, "warn", text, why, f"End that process, use another GPU, or: {fix}")
    return None


@check("gpu.mps", "A daemon of MPS that programs would use is alive, of this user, and without limits.")
def _check_mps(context: Context) -> Iterator[CheckResult]:
    pipe = context.environ.get("CUDA_MPS_PIPE_DIRECTORY") or str(context.root / "tmp/nvidia-mps")
    control = Path(pipe) / "control"
    daemons = _mps_processes(context.proc)
    limits = [f"{key}={context.environ[key]}" for key in _MPS_LIMITS if context.environ.get(key)]
    others = sorted({uid for uid in daemons.values() if uid not in (os.getuid(), 0)})
    if not control.exists():
        yield passed("not used")
    elif not daemons:
        yield warned(
            f"{control} is left of an MPS daemon that no longer runs.",
            "CUDA programs that try it fail to start (MPS client failed to connect).",
            f"rm -r {pipe}, or start it: nvidia-cuda-mps-control -d",
        )
    elif others:
        yield warned(
            f"MPS is run by user {UserNames().name(others[0])}.",
            "MPS serves one user at a time: programs of other users wait until that user's have ended.",
            "Let root run it, or end it: echo quit | sudo nvidia-cuda-mps-control",
        )
    elif limits:
        yield warned(
            f"MPS limits programs of this shell: {', '.join(limits)}.",
            "They get only that part of the GPU's multiprocessors or memory.",
            f"unset {' '.join(key for key in _MPS_LIMITS if context.environ.get(key))}",
        )
    else:
        yield passed("the daemon runs; programs share the GPUs through it")


def _mps_processes(proc: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if folder.name.isdecimal() and (read_text(folder / "comm") or "").strip() == MPS_COMM:
            found[int(folder.name)] = folder.stat().st_uid
    return found


SHARING_CHECKS = (_check_mig, _check_compute_mode, _check_mps)

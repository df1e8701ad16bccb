"""Checks of the GPUs' health: answers, memory errors, XIDs, throttling, links and persistence mode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from gpuwarden.doctor.machine.gpu_findings import (
    GpuFinding,
    answering_gpus,
    capitalize,
    gpu_names,
    make_findings,
    merge,
)
from gpuwarden.doctor.machine.machine_files import is_wsl
from gpuwarden.doctor.model import CheckResult, Context, check, flagged, passed, skipped
from gpuwarden.formatting import format_elapsed
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.ecc_conditions import uncorrected_errors
from gpuwarden.health.link_conditions import pcie_shortfall
from gpuwarden.health.thermal_conditions import throttle_reasons
from gpuwarden.host.kernel_log import KernelLog
from gpuwarden.nvml.events.model import XidReport
from gpuwarden.nvml.troubleshooting import error_text, suggest_gpu_fix
from gpuwarden.xid.codes import Xid, find_xid
from gpuwarden.xid.kernel_messages import PREFIXES, normalize_pci_address, parse_xids
from gpuwarden.xid.repeats import RepeatTracker

RECENT_SECONDS = 86400.0  # an XID before that, on a machine that was not restarted since, may be mended
_RESET = "sudo nvidia-smi --gpu-reset -i {gpu}, after the programs on it have ended"


@check("gpu.answers", "Each GPU answers and needs no reset.")
def _check_answers(context: Context) -> Iterator[CheckResult]:
    gpus = context.survey().gpus
    findings = [finding for gpu in gpus if (finding := _answer_finding(gpu))]
    yield merge(findings, f"{gpu_names(gpus, gpus)}: {_models(gpus)}", gpus)


def _answer_finding(gpu: Gpu) -> GpuFinding | None:
    if not gpu.up:
        fault = gpu.fault or "unknown error"
        why = "Programs on it fail or hang."
        return GpuFinding(
            gpu, "fail", f"does not answer ({error_text(fault)})", why, f"{capitalize(suggest_gpu_fix(fault))}."
        )
    needed = gpu.active(GpuReadings.recovery_action)
    if gpu.value(GpuReadings.reset_required) and not needed:
        needed = ["gpu_reset"]
    if not needed or needed[0] == "none":
        return None
    text = f"needs a recovery: {needed[0].replace('_', ' ')}"
    fix = "sudo reboot" if needed[0].endswith("reboot") else _RESET.format(gpu=gpu.identity.index)
    return GpuFinding(gpu, "fail", text, "The driver wants it before the GPU is used again; new programs fail.", fix)


def _models(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(dict.fromkeys(gpu.identity.name for gpu in gpus))


@check("gpu.ecc", "Uncorrectable memory errors, failed repairs, repairs that wait for a reset.")
def _check_ecc(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    modes = [gpu.value(GpuReadings.ecc_mode, "current") for gpu in gpus]
    off = [gpu for gpu, mode in zip(gpus, modes, strict=True) if mode == 0.0]
    if gpus and all(mode is None for mode in modes):
        yield skipped("no GPU here has ECC")
        return
    usual = "no uncorrectable memory error" + (f"; ECC is off on {gpu_names(off, gpus)}" if off else "")
    yield merge([finding for gpu in gpus for finding in _memory_findings(gpu)], usual, gpus)


def _memory_findings(gpu: Gpu) -> Iterator[GpuFinding]:
    reset = _RESET.format(gpu=gpu.identity.index)
    if gpu.value(GpuReadings.row_remap_failed) or gpu.value(GpuReadings.memory_unrepairable):
        why = "A memory cell is broken and has no spare: results can be lost, and programs end with XID 94 or 95."
        yield GpuFinding(
            gpu, "fail", "broken memory cannot be repaired", why, "Stop using it, and have the GPU replaced."
        )
    if lost := uncorrected_errors(gpu):
        why = "A program that used this memory lost data: it failed, or computed with wrong numbers."
        yield GpuFinding(gpu, "fail", f"{lost:.0f} uncorrectable memory errors since the driver was loaded", why, reset)
    pending = (GpuReadings.row_remap_pending, GpuReadings.retired_pages_pending)
    if any(gpu.value(row) for row in pending):
        yield GpuFinding(
            gpu, "warn", "a repair of its memory waits for a reset", "Until then the broken cell is in use.", reset
        )
    current, later = (gpu.value(GpuReadings.ecc_mode, setting) for setting in ("current", "pending"))
    if None not in (current, later) and current != later:
        text = f"ECC is {'off' if later else 'on'} until the next reset, then {'on' if later else 'off'}"
        yield GpuFinding(gpu, "warn", text, "The setting is not in effect yet.", reset)


@check("gpu.xids", "XIDs in the kernel log since the machine started, in words; needs root.")
def _check_xids(context: Context) -> Iterator[CheckResult]:
    log = KernelLog(PREFIXES, context.dev / "kmsg")
    reports = list(parse_xids(log.read()))
    readable, lost, repeats = log.readable, log.lost, RepeatTracker()
    log.close()
    if not readable:
        yield skipped("the kernel log cannot be read; run as root to check it")
        return
    rated: list[tuple[XidReport, Xid]] = []
    for report in map(repeats.rate, reports):
        xid = find_xid(report.code, report.case)
        if xid.ends:
            rated = [each for each in rated if (each[0].gpu, each[0].code) != (report.gpu, xid.ends)]
        rated.append((report, xid))
    worst = next((s for s in ("critical", "warning") if any(xid.severity == s for _, xid in rated)), None)
    if worst is None:
        since = "in the part of the log that is left" if lost else "since the machine started"
        codes = Counter(report.code for report, _ in rated)
        counted = ", ".join(f"XID {code} ({count})" for code, count in sorted(codes.items()))
        yield passed(f"only errors of programs {since}: {counted}" if counted else f"none {since}")
        return
    grave = [(report, xid) for report, xid in rated if xid.severity == worst]
    report, xid = grave[-1]
    more = f" (and {len(grave) - 1} more)" if len(grave) > 1 else ""
    ago = format_elapsed(max(time.time() - report.time, 0.0))
    yield flagged(
        "fail" if worst == "critical" and time.time() - report.time < RECENT_SECONDS else "warn",
        f"{_place(context, report)} had XID {report.code} {ago} ago{more}: {xid.meaning}",
        "An XID is the driver's report of a GPU error; programs on the GPU failed at that time.",
        xid.action.value,
    )


def _place(context: Context, report: XidReport) -> str:
    addresses = {normalize_pci_address(gpu.identity.pci_bus_id): gpu for gpu in context.survey().gpus}
    gpu = addresses.get(report.gpu)
    return gpu_names([gpu]) if gpu else f"The GPU at {report.gpu}"


@check("gpu.throttling", "No GPU is slowed down by heat, power or a fault now.")
def _check_throttling(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    why = "It computes slower than it can, while its utilization looks normal."
    fix = "Clear the air flow, check fans, filters and power supplies; until then: sudo nvidia-smi -pl WATTS"
    findings = make_findings(gpus, _describe_throttling, "warn", why, fix)
    yield merge(findings, "not slowed down by heat, power or a fault", gpus)


def _describe_throttling(gpu: Gpu) -> str:
    if not (reasons := throttle_reasons(gpu)):
        return ""
    celsius = gpu.value(GpuReadings.temperature_celsius, "core")
    return f"slowed down: {reasons[0]}" + (f", at {celsius:.0f} °C" if celsius is not None else "")


@check("gpu.pcie", "PCIe links have all lanes; those of busy GPUs have their full speed.")
def _check_pcie(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    why = "Copies between host and GPU take longer, and a GPU that waits for its input is slower."
    fix = "Reseat the board, its riser and cables; check the slot's lanes and the firmware's link speed."
    yield merge(make_findings(gpus, pcie_shortfall, "warn", why, fix), "links have all their lanes", gpus)


@check("gpu.fabric", "GPUs with NVLink switches have joined their fabric; else CUDA fails with 802.")
def _check_fabric(context: Context) -> Iterator[CheckResult]:
    gpus = [gpu for gpu in answering_gpus(context) if GpuReadings.fabric_joined in gpu.readings]
    if not any(gpu.value(GpuReadings.fabric_joined) is not None for gpu in gpus):
        yield skipped("no NVLink switch here")
        return
    outside = [gpu for gpu in gpus if gpu.value(GpuReadings.fabric_joined) == 0.0]
    why = "CUDA programs fail at their start: error 802, system not yet initialized."
    fix = "sudo systemctl restart nvidia-fabricmanager; its version must be the driver's"
    yield merge(make_findings(outside, lambda _: "has not joined its NVLink fabric", "fail", why, fix), "joined", gpus)


@check("gpu.persistence", "The driver stays loaded between programs.")
def _check_persistence(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    if is_wsl(context):
        yield skipped("WSL2 uses Windows' driver")
        return
    has_display = any(gpu.value(GpuReadings.display_active) for gpu in gpus)
    off = [gpu for gpu in gpus if gpu.value(GpuReadings.persistence_mode) == 0.0 and not has_display]
    why = "The driver unloads between programs: each start takes seconds longer, and power limits are lost."
    fix = "sudo systemctl enable --now nvidia-persistenced, or until the next boot: sudo nvidia-smi -pm 1"
    yield merge(
        make_findings(off, lambda _: "persistence mode is off", "warn", why, fix), "the driver stays loaded", gpus
    )


GPU_CHECKS = (
    _check_answers,
    _check_xids,
    _check_ecc,
    _check_fabric,
    _check_throttling,
    _check_pcie,
    _check_persistence,
)

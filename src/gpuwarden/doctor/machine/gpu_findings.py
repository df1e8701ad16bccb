"""Findings about single GPUs, merged into one result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuwarden.doctor.model import CheckResult, Context, flagged, passed, skipped
from gpuwarden.gpu.snapshot import Gpu

_RANK = {"fail": 0, "warn": 1}


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """Problem of one GPU; `text` continues a sentence that begins with the GPU's name."""

    gpu: Gpu
    status: Literal["warn", "fail"]
    text: str
    why: str
    fix: str


def answering_gpus(context: Context) -> list[Gpu]:
    """Return the GPUs that answered the poll."""
    return [gpu for gpu in context.survey().gpus if gpu.up]


def merge(findings: Iterable[GpuFinding], usual: str, gpus: Sequence[Gpu]) -> CheckResult:
    """Return one result: `usual` without findings, else all of them, the gravest first, with the way to mend that."""
    if not gpus:
        return skipped("no GPU answers")
    ranked = sorted(findings, key=lambda each: _RANK[each.status])
    if not ranked:
        return passed(usual)
    grouped: dict[str, list[Gpu]] = {}
    for each in ranked:
        grouped.setdefault(each.text, []).append(each.gpu)
    found = "; ".join(f"{gpu_names(members, gpus)}: {text}" for text, members in grouped.items())
    return flagged(ranked[0].status, f"{found}.", ranked[0].why, ranked[0].fix)


def capitalize(text: str) -> str:
    """Return a text as a sentence's beginning: its first letter large, the others as they are."""
    return f"{text[:1].upper()}{text[1:]}"


def make_findings(
    gpus: Iterable[Gpu], describe: Callable[[Gpu], str], status: Literal["warn", "fail"], why: str, fix: str
) -> list[GpuFinding]:
    """Return a finding for each GPU that `describe` returns a text for."""
    return [GpuFinding(gpu, status, text, why, fix) for gpu in gpus if (text := describe(gpu))]


def gpu_names(members: Sequence[Gpu], gpus: Sequence[Gpu] = ()) -> str:
    """Name GPUs by their indices, as `GPU 0, 3`; all of several together are `all 8 GPUs`."""
    if len(members) > 1 and len(members) == len(gpus):
        return f"all {len(gpus)} GPUs"
    return "GPU " + ", ".join(str(gpu.identity.index) for gpu in members)

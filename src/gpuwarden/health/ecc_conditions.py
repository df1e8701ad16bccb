"""Conditions of GPU memory errors, and of their repair (row remapping, page retirement)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.model import OUTLIVES_RESTART, Check, Condition, gpu_alert, gpu_text
from gpuwarden.metrics.model import Metric
from gpuwarden.state import Alert, State


def _flag(reading: Metric[Any], text: str) -> Check:
    """Return a check that reports the GPUs whose reading is true."""

    def check(state: State) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            if gpu.value(reading):
                yield gpu_alert(state, gpu, text, f"{gpu_text(gpu)}: {text}.")

    return check


def _repairs(state: State) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        for part, name in (("channel", "memory channel"), ("tpc", "group of SMs (TPC)")):
            if gpu.value(GpuReadings.repair_pending, part):
                text = f"bad {name}, reset pending"
                yield gpu_alert(state, gpu, text, f"{gpu_text(gpu)}: {text}.", {"part": part})


def uncorrected_errors(gpu: Gpu) -> float:
    """Return the number of uncorrected memory errors since the driver was loaded or the GPU reset."""
    errors = gpu.values(GpuReadings.ecc_errors_total)
    return sum(count for labels, count in errors.items() if labels[:2] == _VOLATILE)


_VOLATILE = ("uncorrected", "volatile")

ECC_CONDITIONS = (
    # Errors since the driver was loaded (volatile): errors of the board's earlier life are no news.
    Condition(
        name="GpuUncorrectedMemoryErrors",
        subject="gpu",
        severity="critical",
        expr="""
            round(
              sum by (cluster, job, instance, uuid, location) (
                increase(
                  gpuwarden_gpu_ecc_errors_total{type="uncorrected", lifetime="volatile"}[%{memory_errors_reported}]
                )
              )
            )
              > 0
        """,
        keep_firing_for=OUTLIVES_RESTART,
        summary="%{the_gpu} has uncorrected memory errors",
        description="""%{gpu} had {{ $value | humanize }} uncorrected memory errors ({{ $labels.location }}) within
            %{memory_errors_reported.words}.%{late_users}""",
        fires="for %{memory_errors_reported.words} after the last error",
        meaning="""ECC found new errors in device memory that it could not correct: data of a program is lost, and the
            driver ends it. On Ampere and newer it replaces the memory row at the next reset.""",
        diagnosis="""XID 94 means that one program was affected; 95 or 48, that any could be. `nvidia-smi -q -d
            ECC,ROW_REMAPPER -i GPU` has the counts.""",
        action="""Restart the affected run from its last checkpoint. Reset the GPU after its work, or at once if an XID
            or GpuRecoveryNeeded asks for it. Replace the GPU if errors come back after a reset.""",
        false_positives="""The GPU has been reset and tested since. Lifetime errors (*aggregate*) and corrected ones
            never fire it.""",
    ),
    Condition(
        name="GpuSramErrorsExceeded",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_ecc_sram_threshold_exceeded == 1",
        check=_flag(GpuReadings.ecc_sram_threshold_exceeded, "too many SRAM errors"),
        summary="%{the_gpu} has too many errors in its on-chip memory (SRAM)",
        description="The SRAM of %{gpu} has had more errors than NVIDIA's limit.%{users}",
        meaning="""Caches and registers of the GPU have had so many uncorrected errors that NVIDIA accepts its return.
            SRAM has no spare parts.""",
        diagnosis="""`gpuwarden_gpu_ecc_sram_unit_errors_total` has the unit. The vendor will ask for `nvidia-smi -q -d
            ECC -i GPU`.""",
        action="Plan its replacement; run NVIDIA's field diagnostics if the vendor requests a report.",
        false_positives="The replacement is ordered.",
    ),
    Condition(
        name="GpuRowRemapPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_row_remap_pending == 1",
        check=_flag(GpuReadings.row_remap_pending, "bad memory row, reset pending"),
        summary="%{the_gpu} needs a reset to replace a bad memory row",
        description="%{gpu} has a bad memory row, which its next reset replaces.%{users}",
        meaning="""A row of device memory has had an error. Its page is out of use, so runs continue; the next reset
            replaces it with a spare row.""",
        diagnosis="""XIDs 63 and 94; `gpuwarden_gpu_remapped_rows` has the number of rows replaced. One in a board's
            life is normal, many within a month are not.""",
        action="[Reset the GPU](start/install.md#reset-a-gpu) after its work.",
        false_positives="The reset waits for the next maintenance.",
    ),
    Condition(
        name="GpuRowRemapFailed",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_row_remap_failed == 1",
        keep_firing_for=OUTLIVES_RESTART,
        check=_flag(GpuReadings.row_remap_failed, "bad memory row could not be replaced"),
        summary="%{the_gpu} could not remap a bad memory row: replace the GPU",
        description="A bad memory row of %{gpu} could not be replaced. Take the GPU out of service.%{users}",
        meaning="""No spare row could replace a bad one, so memory with known errors stays in use. By NVIDIA's policy
            the board must be replaced.""",
        diagnosis="`nvidia-smi -q -d ROW_REMAPPER -i GPU` and XID 64.",
        action="""Give the GPU no new work, let its runs save a checkpoint and move them, and replace the GPU. A reset
            does not help.""",
        false_positives="It is out of service and will be replaced.",
    ),
    Condition(
        name="GpuSpareRowsUsedUp",
        subject="gpu",
        severity="warning",
        expr='gpuwarden_gpu_row_remap_banks{spare_rows="none"} > 0',
        summary="%{the_gpu} has memory banks without spare rows",
        description="Memory banks of %{gpu} without a spare row: {{ $value | humanize }}.%{users}",
        meaning="""Each bank of device memory has a few spare rows. In a bank without one, the next error cannot be
            repaired: GpuRowRemapFailed follows.""",
        diagnosis="`gpuwarden_gpu_row_remap_banks` for the other banks, `gpuwarden_gpu_remapped_rows` for the trend.",
        action="Plan its replacement, and ask the vendor whether the board can be returned already.",
        false_positives="The replacement is ordered.",
    ),
    Condition(
        name="GpuMemoryUnrepairable",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_memory_unrepairable == 1",
        keep_firing_for=OUTLIVES_RESTART,
        check=_flag(GpuReadings.memory_unrepairable, "memory cannot be repaired"),
        summary="%{the_gpu} has memory that cannot be repaired",
        description="The memory of %{gpu} has errors that no spare row can repair.%{users}",
        meaning="The driver reports that device memory can no longer be repaired: errors will come back.",
        diagnosis="`nvidia-smi -q -d ECC,ROW_REMAPPER -i GPU`; the vendor will ask for it.",
        action="Same as GpuRowRemapFailed.",
        false_positives="It is out of service and will be replaced.",
    ),
    Condition(
        name="GpuRepairPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_repair_pending == 1",
        check=_repairs,
        summary="%{the_gpu} needs a reset to repair a part",
        description="""The next reset of %{gpu} repairs a {{ if eq $labels.part "tpc" }}group of SMs (TPC){{ else
            }}memory channel{{ end }}.%{users}""",
        meaning="A memory channel or a group of SMs (TPC) is bad, and a reset replaces it with a spare one.",
        diagnosis="`gpuwarden_gpu_repair_pending` has the part, XIDs the time of the failure.",
        action="[Reset the GPU](start/install.md#reset-a-gpu) after its work.",
        false_positives="The reset waits for the next maintenance.",
    ),
    Condition(
        name="GpuRetiredPagesPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_retired_pages_pending == 1",
        check=_flag(GpuReadings.retired_pages_pending, "bad memory page, reset pending"),
        summary="%{the_gpu} needs a reset to retire a bad memory page",
        description="%{gpu} has a bad memory page, which its next reset takes out of use.%{users}",
        meaning="""On GPUs before Ampere: a page of device memory has had an uncorrected error, or two corrected ones.
            Until the next reset programs can still allocate it.""",
        diagnosis="`nvidia-smi -q -d PAGE_RETIREMENT -i GPU`, and XIDs 48 and 63.",
        action="[Reset the GPU](start/install.md#reset-a-gpu) after its work.",
        false_positives="The reset waits for the next maintenance.",
    ),
    Condition(
        name="GpuManyRetiredPages",
        subject="gpu",
        severity="warning",
        expr="sum by (cluster, job, instance, uuid) (gpuwarden_gpu_retired_pages) >= %{many_retired_pages}",
        summary="%{the_gpu} is close to its limit of retired memory pages",
        description="%{gpu} has {{ $value | humanize }} retired memory pages, of 64 at most.%{users}",
        meaning="""On GPUs before Ampere, which can retire 64 pages in their life: at %{many_retired_pages} there is no
            room for the next bad ones.""",
        diagnosis="`gpuwarden_gpu_retired_pages` for the trend and the kind of error.",
        action="Replace the board.",
        false_positives="They are old and no new ones come: raise `--many-retired-pages`.",
    ),
)

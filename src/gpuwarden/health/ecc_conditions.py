"""Conditions of errors of GPUs' memory, and of what a device puts out of use for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.health.model import OUTLIVES_RESTART, Check, Condition, Occurrence, gpu_occurrence, gpu_text
from gpuwarden.metrics.model import Metric
from gpuwarden.state import State


def _flag(reading: Metric[Any], text: str) -> Check:
    """Return the check of a reading that is true where something is wrong with a GPU's memory."""

    def check(state: State) -> Iterator[Occurrence]:
        for gpu in state.snapshot.gpus:
            if gpu.value(reading):
                yield gpu_occurrence(state, gpu, text, f"{gpu_text(gpu)}: {text}.")

    return check


ECC_CONDITIONS = (
    # Those since the driver loaded, as they grow: what the board has had in its life is no news.
    Condition(
        name="GpuUncorrectedMemoryErrors",
        subject="gpu",
        severity="critical",
        expr="""
            round(
              sum by (cluster, job, instance, uuid, location) (
                increase(
                  gpuwarden_gpu_ecc_errors_total{type="uncorrected", lifetime="volatile"}[%{memory_errors_told}]
                )
              )
            )
              > 0
        """,
        keep=OUTLIVES_RESTART,
        summary="A GPU's memory had errors that could not be corrected.",
        description="""%{gpu} had {{ $value | humanize }} new memory errors ({{ $labels.location }}) within
            %{memory_errors_told.words} that ECC could not correct.%{late_users}""",
        told="for %{memory_errors_told.words} after the last one",
        means="""ECC found errors in device memory that it could not correct, new ones within
            %{memory_errors_told.words}: data of a program is lost. The driver ends the program that met them, and on
            Ampere and newer replaces the row at the next reset.""",
        look="""XIDs: 94 says that one program alone was hit, 95 or 48 that any may be. `nvidia-smi -q -d
            ECC,ROW_REMAPPER -i GPU` has the counts; does GpuRowRemapPending or GpuRowRemapFailed fire too?""",
        do="""restart the run that was hit from its last checkpoint. Reset the GPU when its work has ended, at once
            where an XID or GpuRecoveryNeeded asks for it. A GPU on which it comes back after a reset has to be
            replaced.""",
        wrong="""the GPU has been reset and tested since: silence it for the hour. Errors of the board's life
            (*aggregate*) and corrected ones never fire it; nor does a GPU without ECC or with ECC off.""",
    ),
    Condition(
        name="GpuSramErrorsExceeded",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_ecc_sram_threshold_exceeded == 1",
        check=_flag(GpuReadings.ecc_sram_threshold_exceeded, "too many errors of memory on the chip"),
        summary="A GPU's memory on the chip has had more errors than NVIDIA holds acceptable.",
        description="The memory on the chip of %{gpu} has had more errors than NVIDIA holds acceptable.%{users}",
        means="""Caches and registers of the GPU have had so many uncorrected errors in the board's life that NVIDIA
            takes it back. No spare part stands in for them, so more will come.""",
        look="""`gpuwarden_gpu_ecc_sram_unit_errors_total` for the unit, and at `nvidia-smi -q -d ECC -i GPU`, which the
            vendor will ask for.""",
        do="plan its replacement; run NVIDIA's field diagnostics where the vendor wants their report.",
        wrong="the replacement is on its way: silence it until then.",
    ),
    Condition(
        name="GpuRowRemapPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_row_remap_pending == 1",
        check=_flag(GpuReadings.row_remap_pending, "a row of memory waits for a reset"),
        summary="A GPU has to be reset for a bad row of its memory to be replaced.",
        description="A row of the memory of %{gpu} is bad and is replaced at its next reset.%{users}",
        means="""A row of device memory has had an error. The page around it is out of use, so runs go on; a spare row
            takes its place at the next reset.""",
        look="""XIDs 63 and 94, and at `gpuwarden_gpu_remapped_rows` for how many rows have been replaced so far. One in
            a board's life is nothing unusual, many within a month are.""",
        do="[reset the GPU](start/install.md#reset-a-gpu) when its work has ended.",
        wrong="the reset waits for the next maintenance: silence it until then.",
    ),
    Condition(
        name="GpuRowRemapFailed",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_row_remap_failed == 1",
        keep=OUTLIVES_RESTART,
        check=_flag(GpuReadings.row_remap_failed, "a row of memory could not be replaced"),
        summary="A bad row of a GPU's memory could not be replaced.",
        description="""A bad row of the memory of %{gpu} could not be replaced; the GPU has to be taken out of
            service.%{users}""",
        means="""No spare row could take the place of a bad one, so memory with known errors stays in use. By NVIDIA's
            policy the board is to be replaced.""",
        look="`nvidia-smi -q -d ROW_REMAPPER -i GPU` and XID 64.",
        do="""give the GPU no new work, let the runs on it save a checkpoint and move, and have it replaced. It stays
            failed over resets.""",
        wrong="it is out of service and waits for its replacement: silence it until then.",
    ),
    Condition(
        name="GpuSpareRowsUsedUp",
        subject="gpu",
        severity="warning",
        expr='gpuwarden_gpu_row_remap_banks{spare_rows="none"} > 0',
        summary="Parts of a GPU's memory have no spare rows left.",
        description="Banks of the memory of %{gpu} without a spare row left: {{ $value | humanize }}.%{users}",
        means="""Each bank of device memory has a few spare rows. Where they are used up, the next error of the bank
            cannot be repaired, and GpuRowRemapFailed follows.""",
        look="`gpuwarden_gpu_row_remap_banks` for the other banks, and at `gpuwarden_gpu_remapped_rows` for how fast.",
        do="plan its replacement, and ask the vendor whether the board is taken back already.",
        wrong="the replacement is on its way: silence it until then.",
    ),
    Condition(
        name="GpuMemoryUnrepairable",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_memory_unrepairable == 1",
        keep=OUTLIVES_RESTART,
        check=_flag(GpuReadings.memory_unrepairable, "memory cannot be repaired"),
        summary="A GPU's memory has errors that cannot be repaired.",
        description="The memory of %{gpu} has errors that no spare row can stand in for.%{users}",
        means="The driver says that device memory cannot be repaired any more: errors will come back.",
        look="`nvidia-smi -q -d ECC,ROW_REMAPPER -i GPU`, which the vendor will ask for.",
        do="as for GpuRowRemapFailed.",
        wrong="it is out of service and waits for its replacement: silence it until then.",
    ),
    Condition(
        name="GpuRepairPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_repair_pending == 1",
        summary="A GPU has to be reset for a part of it to be repaired.",
        description="""A {{ if eq $labels.part "tpc" }}group of SMs{{ else }}memory channel{{ end }} of %{gpu} is
            repaired at its next reset.%{users}""",
        means="A memory channel or a group of SMs (TPC) is bad, and the GPU can replace it by a spare one at a reset.",
        look="`gpuwarden_gpu_repair_pending` for the part, and at XIDs for when it failed.",
        do="[reset the GPU](start/install.md#reset-a-gpu) when its work has ended.",
        wrong="the reset waits for the next maintenance: silence it until then.",
    ),
    Condition(
        name="GpuRetiredPagesPending",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_retired_pages_pending == 1",
        check=_flag(GpuReadings.retired_pages_pending, "a page of memory waits for a reset"),
        summary="A GPU has to be reset for a bad page of its memory to be taken out of use.",
        description="A page of the memory of %{gpu} is bad and is taken out of use at its next reset.%{users}",
        means="""On GPUs before Ampere: a page of device memory has had an error that could not be corrected, or two
            that could. Until the next reset programs may still be given it.""",
        look="`nvidia-smi -q -d PAGE_RETIREMENT -i GPU`, and at XIDs 48 and 63.",
        do="[reset the GPU](start/install.md#reset-a-gpu) when its work has ended.",
        wrong="the reset waits for the next maintenance: silence it until then.",
    ),
    Condition(
        name="GpuManyRetiredPages",
        subject="gpu",
        severity="warning",
        expr="sum by (cluster, job, instance, uuid) (gpuwarden_gpu_retired_pages) >= %{many_retired_pages}",
        summary="A GPU can hardly take more bad pages of its memory out of use.",
        description="{{ $value | humanize }} pages of the memory of %{gpu} are out of use, of 64 at most.%{users}",
        means="""On GPUs before Ampere, of which each can take 64 pages out of use in its life: at %{many_retired_pages}
            there is no room for the next bad ones.""",
        look="`gpuwarden_gpu_retired_pages` for how fast they came, and by which errors.",
        do="have the board replaced.",
        wrong="they are old and no new ones come: raise `--many-retired-pages`, or silence it for that GPU.",
    ),
)

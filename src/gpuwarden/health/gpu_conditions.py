"""Conditions of GPUs that are gone, have met a fault, or have to be recovered before they can be used again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.config import thresholds
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.health.model import (
    OUTLIVES_RESTART,
    Check,
    Condition,
    Labels,
    Occurrence,
    ago_text,
    gpu_occurrence,
    gpu_text,
)
from gpuwarden.state import State
from gpuwarden.xid.codes import Severity, explain


def _down(state: State) -> Iterator[Occurrence]:
    for gpu in state.snapshot.gpus:
        if gpu.asked and not gpu.up:
            description = f"{gpu_text(gpu)} ({gpu.identity.uuid}) does not answer the driver: {gpu.fault}."
            yield gpu_occurrence(state, gpu, f"does not answer: {gpu.fault}", description)


def _down_ending(labels: Labels, state: State) -> str | None:
    """Return None while the driver as a whole is silent or released, or has GPUs that are not identified yet."""
    snapshot = state.snapshot
    gpu = snapshot.gpu(labels.get("uuid", ""))
    if gpu is not None:
        return "" if gpu.up else None
    if snapshot.asked and snapshot.fault is None and _unidentified_count(snapshot) <= 0:
        return "not seen to be well: the driver lists it no more"
    return None


def _missing(state: State) -> Iterator[Occurrence]:
    snapshot = state.snapshot
    count = _unidentified_count(snapshot)
    if snapshot.enumerated is not None and count > 0 and not snapshot.asleep_count:
        text = f"{count} of the {snapshot.enumerated} GPUs that the driver enumerates could not be read at all so far"
        yield Occurrence(labels={}, text=text, description=f"{text}.", since=snapshot.time)


def _unidentified_count(snapshot: Snapshot) -> int:
    """Count the GPUs that the driver has and that could not be read since the daemon started; below 0 if some went."""
    return (snapshot.enumerated or 0) - len(snapshot.gpus)


# The conditions of XIDs by the severity of their codes; those that programs cause are none.
XID_CONDITIONS: Mapping[Severity, str] = {"page": "GpuXidCritical", "warn": "GpuXidWarning"}


def _xids(name: str) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for gpu in state.snapshot.gpus:
            for code, seen in gpu.xids.items():
                xid = explain(code)
                if (
                    XID_CONDITIONS.get(xid.severity) == name
                    and state.snapshot.time - seen.last < thresholds.XID_SECONDS
                ):
                    text = f"XID {code} {ago_text(state, seen.last)}"
                    description = (
                        f"{gpu_text(gpu)} ({gpu.identity.uuid}) had XID {code} {ago_text(state, seen.last)}: "
                        f"{xid.meaning} {xid.action.value}"
                    )
                    yield gpu_occurrence(state, gpu, text, description, {"xid": str(code)}, happened=seen.last)

    return check


_URGENT_ACTIONS = ("gpu_reset", "bus_reset", "node_reboot", "system_reboot", "recover_imex_domain")


def _recovery(*, urgent: bool) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for gpu in state.snapshot.gpus:
            for action in _recovery_actions(gpu):
                if action != "none" and (action in _URGENT_ACTIONS) is urgent:
                    text = f"the driver wants it recovered: {action.replace('_', ' ')}"
                    description = f"The driver wants {gpu_text(gpu)} recovered: {action.replace('_', ' ')}."
                    yield gpu_occurrence(state, gpu, text, description, {"action": action})

    return check


def _recovery_actions(gpu: Gpu) -> list[str]:
    reading = gpu.readings.get(GpuReadings.recovery_action)
    return [labels[0] for labels, value in reading.items() if value] if isinstance(reading, Mapping) else []


def _reset_required(state: State) -> Iterator[Occurrence]:
    for gpu in state.snapshot.gpus:
        if gpu.value(GpuReadings.reset_required) and GpuReadings.recovery_action not in gpu.readings:
            description = f"The driver wants {gpu_text(gpu)} reset before it is used again."
            yield gpu_occurrence(state, gpu, "the driver wants a reset", description)


GPU_CONDITIONS = (
    # With the whole driver gone every GPU is down: GpuwardenDriverFault says so once.
    Condition(
        name="GpuDown",
        subject="gpu",
        severity="critical",
        expr="""
            (gpuwarden_gpu_up == 0)
              %{of_gpu}
              unless on (cluster, job, instance) gpuwarden_collector_success{collector="nvml"} == 0
        """,
        names=(),
        hold="30s",
        keep=OUTLIVES_RESTART,
        check=_down,
        implied_by="GpuwardenDriverFault",
        ending=_down_ending,
        summary="A GPU does not answer.",
        description="%{gpu} does not answer the driver.%{late_users}",
        means="""A GPU that gpuwarden knows does not answer the driver's calls, or a call hangs. Runs on it fail or
            hang.""",
        look="""`gpuwarden_gpu_errors_total` for the driver's reason, and `dmesg | grep -i xid` for the cause.
            `gpu_is_lost` is a GPU off its bus.""",
        do="""stop the runs on it and [reset it](start/install.md#reset-a-gpu); if it is lost, restart the machine.
            If it
            comes back twice, have it replaced.""",
        wrong="""somebody resets it or takes it out on purpose. While the whole driver is silent, GpuwardenDriverFault
            stands for all GPUs.""",
    ),
    # Without any known GPU the count has no sample, not 0. A GPU that sleeps need not have said who it is.
    Condition(
        name="GpuMissing",
        subject="box",
        severity="critical",
        expr="""
            gpuwarden_gpus
              - on (cluster, job, instance) (
                count by (cluster, job, instance) (gpuwarden_gpu_info) or on (cluster, job, instance) 0 * gpuwarden_gpus
              )
              > 0
              unless on (cluster, job, instance) gpuwarden_gpus_asleep > 0
        """,
        hold="30s",
        keep=OUTLIVES_RESTART,
        check=_missing,
        summary="The driver enumerates GPUs that cannot be read at all.",
        description="""On {{ $labels.instance }} {{ $value | humanize }} of the GPUs that the driver enumerates could
            not be read since gpuwarden started.""",
        means="""The driver counts more GPUs than gpuwarden could ever read since it started; those have no name yet, so
            the alert says how many.""",
        look="`nvidia-smi -L`, and at `gpuwarden_collector_errors_total` for the driver's error.",
        do="as for GpuDown.",
        wrong="""device files are kept from the daemon on purpose (cgroup or container rules): give it access to all of
            them.""",
    ),
    # By its time, as a counter's first value is no increase.
    Condition(
        name="GpuXidCritical",
        subject="gpu",
        severity="critical",
        expr="""
            time() - gpuwarden_gpu_xid_last_event_timestamp_seconds{xid=~"%{xids.page}"}
              < %{xid_told.seconds}
        """,
        keep=OUTLIVES_RESTART,
        check=_xids("GpuXidCritical"),
        event_seconds=thresholds.XID_SECONDS,
        summary="A GPU met a fault that takes it out of service.",
        description="""%{gpu} had XID {{ $labels.xid }} {{ $value | humanizeDuration }} ago.%{late_users}
            %{xids.page.actions}""",
        told="for %{xid_told.words} after the last one",
        means="""The driver reported a fault of the GPU that needs a reset or a restart: the codes of severity *page* in
            [xids.md](reference/xids.md). The description says what to do. That it resolves means an hour without
            another one, not
            that the GPU is mended.""",
        look="""the panel *XIDs* or the status page for the GPU, [xids.md](reference/xids.md) for the code's meaning,
            and `dmesg |
            grep -i xid` for the process and the details. Is GpuDown there too?""",
        do="""stop the runs on that GPU, whose results since then are not to be trusted where the fault is one of memory
            (48, 95, 140), and do what the description says. If it comes back after that, have the GPU replaced.""",
        wrong="""the GPU has been reset since, or somebody tries the alarm
            ([install.md](start/install.md#xids-from-the-kernel-log)): silence it for the hour.""",
    ),
    # All codes but those of GpuXidCritical and those of severity info: one that is new deserves a look.
    Condition(
        name="GpuXidWarning",
        subject="gpu",
        severity="warning",
        expr="""
            time() - gpuwarden_gpu_xid_last_event_timestamp_seconds{xid!~"%{xids.page}", xid!~"%{xids.info}"}
              < %{xid_told.seconds}
        """,
        check=_xids("GpuXidWarning"),
        event_seconds=thresholds.XID_SECONDS,
        summary="A GPU met a fault that is worth a look.",
        description="""%{gpu} had XID {{ $labels.xid }} {{ $value | humanizeDuration }} ago.%{late_users}
            %{xids.warn.actions}""",
        told="for %{xid_told.words} after the last one",
        means="""The driver reported a fault after which the GPU goes on: the codes of severity *warn* in
            [xids.md](reference/xids.md), and any that gpuwarden does not know. Those that programs cause by their
            own faults (13,
            31, 43, 45 and more) do not fire it.""",
        look="[xids.md](reference/xids.md) for the code's meaning; `dmesg | grep -i xid` for the process and details.",
        do="what the description says.",
        wrong="""it is known and waits for its day, such as a bad row of memory (63) that the next reset replaces:
            silence it until then.""",
    ),
    # What cannot wait; all other actions are those of GpuDrainNeeded, new ones too.
    Condition(
        name="GpuRecoveryNeeded",
        subject="gpu",
        severity="critical",
        expr=f"""
            gpuwarden_gpu_recovery_action{{
              action=~"{"|".join(_URGENT_ACTIONS)}"
            }} == 1
        """,
        keep=OUTLIVES_RESTART,
        check=_recovery(urgent=True),
        summary="The driver wants a GPU recovered before it is used again.",
        description="""%{gpu} cannot be used on until it is recovered. {{ if match "reboot" $labels.action -}} Restart
            the machine. {{- else if eq $labels.action "recover_imex_domain" -}} Recover its IMEX domain (restart
            nvidia-imex on all of its boxes). {{- else if eq $labels.action "bus_reset" -}} Stop what runs on it and
            reset its PCIe bus, or restart the machine. {{- else -}} Stop what runs on it and reset it (nvidia-smi
            --gpu-reset). {{- end }}%{late_users}""",
        means="""After a fault the driver names what it takes to use the GPU again: a reset, a restart of the machine,
            or the recovery of its NVLink domain (IMEX). Programs on it fail until then, and new ones do not start.""",
        look="the XIDs that came before (GpuXidCritical), and at `gpuwarden_gpu_recovery_action`.",
        do="""what the description says; for a reset, [have gpuwarden let go](start/install.md#reset-a-gpu) first. If it
            comes back, have the GPU replaced.""",
        wrong="somebody is at it. Drivers before R570 tell no action: GpuResetRequired is there for them.",
    ),
    Condition(
        name="GpuDrainNeeded",
        subject="gpu",
        severity="warning",
        expr=f"""
            gpuwarden_gpu_recovery_action{{
              action!~"none|{"|".join(_URGENT_ACTIONS)}"
            }} == 1
        """,
        check=_recovery(urgent=False),
        summary="The driver wants a GPU to have no new work until it is recovered.",
        description="""%{gpu} should get no new work. {{ if eq $labels.action "drain_p2p" -}} Stop the programs on it
            that exchange data with other GPUs. {{- else if eq $labels.action "drain_and_reset" -}} Reset it when its
            work has ended; until then it goes on. {{- else -}} The driver asks for an action that gpuwarden does not
            know ({{ $labels.action }}): see nvidia-smi -q. {{- end }}%{users}""",
        means="""The GPU has had a fault after which it goes on with less: a part of its memory or of its MIG instances
            is out of use (*drain_and_reset*), or its exchange with other GPUs has to end before it recovers
            (*drain_p2p*). Programs that were not hit may finish.""",
        look="the XIDs that came before, and at GpuRowRemapPending and GpuNvlinkDown.",
        do="""take the GPU out of the scheduler (Slurm: `scontrol update NodeName=… State=DRAIN`), let its runs finish
            or save a checkpoint, then [reset it](start/install.md#reset-a-gpu).""",
        wrong="the reset waits for the next maintenance: silence it until then.",
    ),
    Condition(
        name="GpuResetRequired",
        subject="gpu",
        severity="critical",
        expr="""
            gpuwarden_gpu_reset_required == 1
              unless on (cluster, job, instance, uuid)
            gpuwarden_gpu_recovery_action
        """,
        keep=OUTLIVES_RESTART,
        check=_reset_required,
        summary="The driver wants a GPU reset before it is used again.",
        description="""%{gpu} has to be reset. Stop what runs on it, or let it finish, and reset it (nvidia-smi
            --gpu-reset).%{late_users}""",
        means="""As GpuRecoveryNeeded, from drivers before R570, which only tell that a reset is required, be it at once
            or when the GPU's work has ended.""",
        look="the XIDs that came before, and at `nvidia-smi -q -i GPU`.",
        do="[reset the GPU](start/install.md#reset-a-gpu).",
        wrong="somebody is at it. Where the driver tells the action, that alert stands for this one.",
    ),
)

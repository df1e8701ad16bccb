"""Conditions of GPUs that do not answer, reported an XID, or need a recovery such as a reset."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.config import thresholds
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.health.model import (
    OUTLIVES_RESTART,
    Check,
    Condition,
    Labels,
    ago_text,
    gpu_alert,
    gpu_text,
)
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.severity import Severity
from gpuwarden.state import Alert, State
from gpuwarden.xid.codes import explain, times_by_severity


def _down(state: State) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        if gpu.asked and not gpu.up:
            description = f"{gpu_text(gpu)} ({gpu.identity.uuid}) does not answer the driver: {gpu.fault}."
            place = f", at {gpu.identity.pci_bus_id}" if gpu.identity.is_provisional and gpu.identity.pci_bus_id else ""
            yield gpu_alert(state, gpu, f"not responding: {error_text(gpu.fault)}{place}", description)


def _down_ending(labels: Labels, state: State) -> str | None:
    """Return None while the driver does not answer, is released, or has GPUs that are not identified yet."""
    snapshot = state.snapshot
    uuid = labels.get("uuid", "")
    gpu = snapshot.gpu(uuid) or next((each for each in snapshot.gpus if each.identity.pci_bus_id == uuid), None)
    if gpu is not None:
        return "" if gpu.up else None
    if snapshot.asked and snapshot.fault is None and _hidden_count(snapshot) <= 0:
        return "recovery not confirmed: the driver no longer lists the GPU"
    return None


def _missing(state: State) -> Iterator[Alert]:
    snapshot = state.snapshot
    count = _hidden_count(snapshot)
    if snapshot.enumerated is not None and count > 0 and not snapshot.asleep_count:
        text = f"{count} of {snapshot.enumerated} GPUs are hidden from the daemon"
        yield Alert(
            labels={},
            text=text,
            description=f"The driver lists {snapshot.enumerated} GPUs; the daemon may not open {count} of them.",
            since=snapshot.time,
        )


def _hidden_count(snapshot: Snapshot) -> int:
    """Return how many GPUs the driver lists that the daemon may not open; below 0 if GPUs have disappeared."""
    return (snapshot.enumerated or 0) - len(snapshot.gpus)


def _xids(severity: Severity) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            for code, seen in gpu.xids.items():
                at = times_by_severity(code, seen).get(severity)
                if at is not None and state.snapshot.time - at < thresholds.XID_SECONDS:
                    text, detail = f"XID {code}", explain(code, severity).explanation
                    had = f"{gpu_text(gpu)} ({gpu.identity.uuid}) had {text} {ago_text(state, at)}: {detail}"
                    yield gpu_alert(state, gpu, text, had, {"xid": str(code)}, happened=at, detail=detail)

    return check


_URGENT_ACTIONS = ("gpu_reset", "bus_reset", "node_reboot", "system_reboot", "recover_imex_domain")


def _recovery(*, urgent: bool) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            for action in gpu.active(GpuReadings.recovery_action):
                if action != "none" and (action in _URGENT_ACTIONS) is urgent:
                    text = f"needs recovery: {action.replace('_', ' ')}"
                    description = f"The driver requests a recovery of {gpu_text(gpu)}: {action.replace('_', ' ')}."
                    yield gpu_alert(state, gpu, text, description, {"action": action})

    return check


def _reset_required(state: State) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        if gpu.value(GpuReadings.reset_required) and GpuReadings.recovery_action not in gpu.readings:
            description = f"{gpu_text(gpu)} needs a reset before it can be used again."
            yield gpu_alert(state, gpu, "needs a reset", description)


GPU_CONDITIONS = (
    # If the whole driver fails, every GPU is down: GpuwardenDriverFault reports that once.
    Condition(
        name="GpuDown",
        subject="gpu",
        severity="critical",
        expr="""
            (gpuwarden_gpu_up == 0)
              %{of_gpu}
              unless on (cluster, job, instance) gpuwarden_collector_success{collector="nvml"} == 0
        """,
        joins=(),
        for_="30s",
        keep_firing_for=OUTLIVES_RESTART,
        check=_down,
        implied_by="GpuwardenDriverFault",
        ending=_down_ending,
        summary="%{the_gpu} is not responding",
        description="%{gpu} does not answer the driver.%{late_users}",
        meaning="A GPU does not answer the driver's calls, or a call hangs. Runs on it fail or hang.",
        diagnosis="`gpuwarden_gpu_errors_total` has the driver's error, `dmesg | grep -i xid` the cause.",
        action="""Stop the runs on it and [reset it](start/install.md#reset-a-gpu); if it is lost, restart the machine.
            If it happens again, replace the GPU.""",
        false_positives="The GPU is being reset or removed on purpose.",
    ),
    # Without any known GPU the count has no sample, not 0. A sleeping GPU may not have been identified yet.
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
        for_="30s",
        keep_firing_for=OUTLIVES_RESTART,
        check=_missing,
        summary="A GPU%{on_host} is present but hidden from gpuwarden",
        description="""GPUs on {{ $labels.instance }} that the driver lists and that gpuwarden may not open: {{ $value |
            humanize }}.""",
        meaning="""The driver lists GPUs and refuses gpuwarden access to them (no_permission), so their health is
            unknown. GPUs that fail or hang fire GpuDown.""",
        diagnosis="`nvidia-smi -L`; `gpuwarden_collector_errors_total` has the driver's error.",
        action="Give the daemon access to all device files (`/dev/nvidia0` and the others).",
        false_positives="Device files are hidden from the daemon on purpose.",
    ),
    # By its timestamp, as the first value of a counter is no increase.
    Condition(
        name="GpuXidCritical",
        subject="gpu",
        severity="critical",
        expr="""
            time() - gpuwarden_gpu_xid_severity_last_event_timestamp_seconds{severity="critical"}
              < %{xid_reported.seconds}
        """,
        keep_firing_for=OUTLIVES_RESTART,
        check=_xids("critical"),
        event_seconds=thresholds.XID_SECONDS,
        summary="%{the_gpu} has a fault that needs a reset or restart (XID)",
        description="""%{gpu} reported XID {{ $labels.xid }} {{ $value | humanizeDuration }} ago.%{late_users}
            %{xids.critical.actions}""",
        fires="for %{xid_reported.words} after the last XID",
        meaning="""The driver reported a GPU fault that needs a reset or a restart: the *critical* codes in the [XID
            reference](reference/xids.md). "Resolved" means no further one within %{xid_reported.words}, not that the
            GPU is repaired.""",
        diagnosis="The status page, and `dmesg | grep -i xid` for the process and details.",
        action="""Stop the runs on that GPU and follow the description. Do not trust results computed since a memory
            fault (48, 95, 140). If it happens again after that, replace the GPU.""",
        false_positives="""The GPU has been reset since, or it was [a test
            message](start/install.md#xids-from-the-kernel-log).""",
    ),
    # An unknown code has this severity: it deserves attention.
    Condition(
        name="GpuXidWarning",
        subject="gpu",
        severity="warning",
        expr="""
            time() - gpuwarden_gpu_xid_severity_last_event_timestamp_seconds{severity="warning"}
              < %{xid_reported.seconds}
        """,
        check=_xids("warning"),
        event_seconds=thresholds.XID_SECONDS,
        summary="%{the_gpu} has a fault and is still usable (XID)",
        description="""%{gpu} reported XID {{ $labels.xid }} {{ $value | humanizeDuration }} ago.%{late_users}
            %{xids.warning.actions}""",
        fires="for %{xid_reported.words} after the last XID",
        meaning="""The driver reported a fault after which the GPU keeps working: the *warning* codes in the [XID
            reference](reference/xids.md), and unknown codes. Codes that programs cause themselves (13, 31, 43, 45 and
            others) do not fire it, unless 13 or 31 repeats in one part of the GPU.""",
        diagnosis="`dmesg | grep -i xid` for the process and details.",
        action="Follow the description.",
        false_positives="It waits for maintenance, such as a bad row of memory (63) that the next reset replaces.",
    ),
    Condition(
        name="GpuXidInfo",
        subject="gpu",
        severity="info",
        check=_xids("info"),
        event_seconds=thresholds.XID_SECONDS,
        summary="%{the_gpu} reported an XID that a program caused",
        meaning="""The driver reported a fault that is no fault of the GPU: the *info* codes in the [XID
            reference](reference/xids.md).""",
        diagnosis="`dmesg | grep -i xid` for the process and details.",
        action="Follow the [XID reference](reference/xids.md), mostly by mending the program.",
        false_positives="None: it is shown among the events, and raises no alert.",
    ),
    # Actions that cannot wait; all others, also unknown ones, belong to GpuDrainNeeded.
    Condition(
        name="GpuRecoveryNeeded",
        subject="gpu",
        severity="critical",
        expr=f"""
            gpuwarden_gpu_recovery_action{{
              action=~"{"|".join(_URGENT_ACTIONS)}"
            }} == 1
        """,
        keep_firing_for=OUTLIVES_RESTART,
        check=_recovery(urgent=True),
        summary="%{the_gpu} is unusable until it is recovered (reset or restart)",
        description="""%{gpu} is unusable until it is recovered. {{ if match "reboot" $labels.action -}} Restart the
            machine. {{- else if eq $labels.action "recover_imex_domain" -}} Recover its IMEX domain (restart
            nvidia-imex on all of its hosts). {{- else if eq $labels.action "bus_reset" -}} Stop its programs and reset
            its PCIe bus, or restart the machine. {{- else -}} Stop its programs and reset it (nvidia-smi --gpu-reset).
            {{- end }}%{late_users}""",
        meaning="""After a fault the driver reports what the GPU needs before it can be used again: a reset, a restart
            of the machine, or a recovery of its NVLink domain (IMEX). Until then its programs fail.""",
        diagnosis="Earlier XIDs (GpuXidCritical), and `gpuwarden_gpu_recovery_action`.",
        action="""Follow the description; for a reset, [pause gpuwarden](start/install.md#reset-a-gpu) first. If it
            happens again, replace the GPU.""",
        false_positives="The GPU is being repaired. Drivers before R570 report no action.",
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
        summary="%{the_gpu} must be drained: no new work until it is recovered",
        description="""%{gpu} must get no new work. {{ if eq $labels.action "drain_p2p" -}} Stop its programs that
            exchange data with other GPUs. {{- else if eq $labels.action "drain_and_reset" -}} Reset it when its
            programs have finished. {{- else -}} The driver requests an action that gpuwarden does not know ({{
            $labels.action }}): see nvidia-smi -q. {{- end }}%{users}""",
        meaning="""After a fault the GPU works with reduced resources: a part of its memory or MIG instances is out of
            use (*drain_and_reset*), or its traffic with other GPUs must stop (*drain_p2p*). Programs that were not
            affected may finish.""",
        diagnosis="Earlier XIDs, GpuRowRemapPending and GpuNvlinkDown.",
        action="""Take the GPU out of the scheduler (Slurm: `scontrol update NodeName=… State=DRAIN`), let its runs
            finish or save a checkpoint, then [reset it](start/install.md#reset-a-gpu).""",
        false_positives="The reset waits for the next maintenance.",
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
        keep_firing_for=OUTLIVES_RESTART,
        check=_reset_required,
        summary="%{the_gpu} needs a reset",
        description="""%{gpu} needs a reset. Stop its programs, or let them finish, and reset it (nvidia-smi
            --gpu-reset).%{late_users}""",
        meaning="""The driver reports that the GPU needs a reset, now or after its work; with drivers from R570
            GpuRecoveryNeeded has the details.""",
        diagnosis="Earlier XIDs, and `nvidia-smi -q -i GPU`.",
        action="[Reset the GPU](start/install.md#reset-a-gpu).",
        false_positives="The GPU is being reset.",
    ),
)

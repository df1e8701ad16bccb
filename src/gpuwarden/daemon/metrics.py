"""Metrics of the daemon itself."""

from __future__ import annotations

from typing import get_args

from gpuwarden.gpu.snapshot import HUNG
from gpuwarden.metrics.model import Metric, Reading, Table
from gpuwarden.protocol.codec import Rejection
from gpuwarden.state import State

# Errors of the driver as a whole that are there from the start: increase() does not see a counter's first value.
_GRAVE = (HUNG, "driver_not_loaded", "uninitialized", "lib_rm_version_mismatch")


def _collector_errors(state: State) -> Reading:
    counts = dict.fromkeys(_GRAVE, 0) | dict(state.snapshot.errors)
    return {("nvml", name): count for name, count in counts.items()}


class DaemonReadings(Table[State], prefix="gpuwarden_"):
    """The daemon and its driver as a whole."""

    # fmt: off
    build_info = Metric[State](
        "gpuwarden_build_info", "info", "", "Version of the daemon.",
        lambda state: {(state.version, state.python): 1}, labels=("version", "python"))
    source_info = Metric[State](
        "gpuwarden_source_info", "info", "", "Where the readings come from: nvml is the driver, the others are not this machine's GPUs.",
        lambda state: {(state.source,): 1}, labels=("source",))
    gpus = Metric[State](
        "gpuwarden_gpus", "gauge", "", "Number of GPUs the driver enumerates.",
        lambda state: state.snapshot.enumerated, source="nvmlDeviceGetCount")
    gpus_asleep = Metric[State](
        "gpuwarden_gpus_asleep", "gauge", "", "Number of the machine's GPUs that sleep, whether they have said who they are or not.",
        lambda state: state.snapshot.asleep_count, source="/sys/bus/pci/devices/ADDRESS/power/runtime_status", opt_in="gpus.let_sleep")
    paused = Metric[State](
        "gpuwarden_paused", "gauge", "", "Whether the driver is let go of on request (gpuwarden pause), so that no GPU is read.",
        lambda state: float(state.snapshot.paused_until is not None))
    collector_success = Metric[State](
        "gpuwarden_collector_success", "gauge", "", "Whether the collector's last poll worked; each GPU's own health is gpuwarden_gpu_up.",
        lambda state: {("nvml",): float(state.snapshot.fault is None)} if state.snapshot.asked else None, labels=("collector",))
    collector_duration_seconds = Metric[State](
        "gpuwarden_collector_duration_seconds", "gauge", "seconds", "Duration of the collector's last poll.",
        lambda state: {("nvml",): state.snapshot.duration} if state.snapshot.asked else None, labels=("collector",))
    collector_last_success_timestamp_seconds = Metric[State](
        "gpuwarden_collector_last_success_timestamp_seconds", "gauge", "seconds", "When the collector last worked, in Unix time.",
        lambda state: {("nvml",): state.snapshot.last_success} if state.snapshot.last_success else None, labels=("collector",))
    collector_errors_total = Metric[State](
        "gpuwarden_collector_errors_total", "counter", "", "Failures of the driver as a whole, and of GPUs that have not said yet who they are, by NVML's error.",
        _collector_errors, labels=("collector", "error"))
    poll_timestamp_seconds = Metric[State](
        "gpuwarden_poll_timestamp_seconds", "gauge", "seconds", "When the poll that this page shows began, in Unix time.",
        lambda state: state.snapshot.time)
    poll_interval_seconds = Metric[State](
        "gpuwarden_poll_interval_seconds", "gauge", "seconds", "Configured time from one poll to the next.",
        lambda state: state.poll_interval, source="poll.interval")
    early_polls_total = Metric[State](
        "gpuwarden_early_polls_total", "counter", "", "Polls made before they were due, as something may have happened that a run is to be told of.",
        lambda state: state.counts.early_polls)
    reports_received_total = Metric[State](
        "gpuwarden_reports_received_total", "counter", "", "Messages taken from training runs.",
        lambda state: state.counts.reports_received)
    reports_rejected_total = Metric[State](
        "gpuwarden_reports_rejected_total", "counter", "", "Messages refused from training runs, by reason.",
        lambda state: {(reason,): state.counts.reports_rejected.get(reason, 0) for reason in get_args(Rejection)}, labels=("reason",))
    connections_refused_total = Metric[State](
        "gpuwarden_connections_refused_total", "counter", "", "Connections of training runs closed because there are too many, or no file descriptor is left.",
        lambda state: state.counts.run_connections_refused)
    advice_dropped_total = Metric[State](
        "gpuwarden_advice_dropped_total", "counter", "", "Advice that a run's connection did not take, as the run does not read; it is tried again while it holds.",
        lambda state: state.counts.advice_dropped)
    runs_ended_total = Metric[State](
        "gpuwarden_runs_ended_total", "counter", "", "Runs that ended, by how they did; one that goes on and ends that way again counts once.",
        lambda state: {(outcome,): count for outcome, count in state.counts.runs_ended.items()}, labels=("outcome",), source="docs/use/runs.md")
    series_dropped_total = Metric[State](
        "gpuwarden_series_dropped_total", "counter", "", "Series left out of a page by a limit, summed over polls.",
        lambda state: {(limit,): count for limit, count in state.counts.series_dropped.items()}, labels=("limit",))
    tree_processes_dropped_total = Metric[State](
        "gpuwarden_tree_processes_dropped_total", "counter", "", "Processes of runs left out of their run's figures because it has too many, summed over looks.",
        lambda state: state.counts.tree_processes_dropped)
    receipt_errors_total = Metric[State](
        "gpuwarden_receipt_errors_total", "counter", "", "Faults of the run database, each counted once until it is mended, and run records dropped because of them.",
        lambda state: state.counts.receipt_errors, source="receipts.path")
    alerts_dropped_total = Metric[State](
        "gpuwarden_alerts_dropped_total", "counter", "", "Alerts that the daemon itself tells nobody of, as too many fire.",
        lambda state: state.counts.alerts_dropped, source="docs/use/notifications.md")
    alertmanager_alerts_sent_total = Metric[State](
        "gpuwarden_alertmanager_alerts_sent_total", "counter", "", "Alerts that an Alertmanager has taken from the daemon itself, each time that one was told again included.",
        lambda state: {(url,): posted.sent for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    alertmanager_errors_total = Metric[State](
        "gpuwarden_alertmanager_errors_total", "counter", "", "Messages of alerts that an Alertmanager did not take; the log says why.",
        lambda state: {(url,): posted.failed for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    alertmanager_alerts_dropped_total = Metric[State](
        "gpuwarden_alertmanager_alerts_dropped_total", "counter", "", "Alerts that an Alertmanager was never sent: over before it took a message, or more at once than are kept.",
        lambda state: {(url,): posted.dropped for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    notify_messages_total = Metric[State](
        "gpuwarden_notify_messages_total", "counter", "", "Messages about alerts that a target of notify has taken.",
        lambda state: {(name,): counts.sent for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    notify_errors_total = Metric[State](
        "gpuwarden_notify_errors_total", "counter", "", "Attempts to send a message about alerts that failed; the log says why, and it is tried again.",
        lambda state: {(name,): counts.failed for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    notify_alerts_dropped_total = Metric[State](
        "gpuwarden_notify_alerts_dropped_total", "counter", "", "Alerts that a target of notify was never told of: over for an hour before it took a message, or more at once than are kept.",
        lambda state: {(name,): counts.dropped for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    access = Metric[State](
        "gpuwarden_access", "gauge", "", "Whether the daemon may read a source that needs a permission, or a driver's support.",
        lambda state: {(source,): float(allowed) for source, allowed in state.access.items()}, labels=("source",))
    xid_events_dropped_total = Metric[State](
        "gpuwarden_xid_events_dropped_total", "counter", "", "XIDs that are not counted: unknown_gpu had for a minute an address of no GPU that has answered, which the log names, codes were more than a GPU has series for.",
        lambda state: {(reason,): count for reason, count in state.counts.xids_dropped.items()}, labels=("reason",))
    kernel_log_records_lost_total = Metric[State](
        "gpuwarden_kernel_log_records_lost_total", "counter", "", "Records of the kernel log that were overwritten before they were read.",
        lambda state: state.counts.kernel_log_records_lost, source="/dev/kmsg")
    http_requests_total = Metric[State](
        "gpuwarden_http_requests_total", "counter", "", "HTTP requests answered, by path and status code.",
        lambda state: {(path, str(code)): count for (path, code), count in state.counts.http_requests.items()}, labels=("path", "code"))
    http_connections_lost_total = Metric[State](
        "gpuwarden_http_connections_lost_total", "counter", "", "HTTP connections lost: evicted made room for a newer one, timed_out were too slow, not_accepted found no file descriptor.",
        lambda state: {(reason,): count for reason, count in state.counts.http_connections_lost.items()}, labels=("reason",))
    # fmt: on

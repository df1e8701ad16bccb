"""Metrics of the daemon itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import psutil

from gpuwarden.gpu.snapshot import HUNG
from gpuwarden.metrics.model import Metric, Reading, Table
from gpuwarden.protocol.codec import Rejection
from gpuwarden.state import State

# Exposed as 0 from the start: increase() does not see the first value of a counter.
_GRAVE = (HUNG, "driver_not_loaded", "uninitialized", "lib_rm_version_mismatch")


def _collector_errors(state: State) -> Reading:
    counts = dict.fromkeys(_GRAVE, 0) | dict(state.snapshot.errors)
    return {("nvml", name): count for name, count in counts.items()}


class DaemonReadings(Table[State], prefix="gpuwarden_"):
    """Daemon and driver."""

    # fmt: off
    build_info = Metric[State](
        "gpuwarden_build_info", "info", "", "Versions of gpuwarden and Python; the value is always 1.",
        lambda state: {(state.version, state.python): 1}, labels=("version", "python"), profile="minimal")
    source_info = Metric[State](
        "gpuwarden_source_info", "info", "", "Source of the GPU readings: nvml = the driver; with any other source the GPUs are not this machine's.",
        lambda state: {(state.source,): 1}, labels=("source",), profile="minimal")
    gpus = Metric[State](
        "gpuwarden_gpus", "gauge", "", "Number of GPUs that the driver enumerates.",
        lambda state: state.snapshot.enumerated, source="nvmlDeviceGetCount", profile="minimal")
    gpus_asleep = Metric[State](
        "gpuwarden_gpus_asleep", "gauge", "", "Number of suspended GPUs (runtime D3), including those not yet identified.",
        lambda state: state.snapshot.asleep_count, source="/sys/bus/pci/devices/ADDRESS/power/runtime_status", opt_in="gpus.let_sleep", profile="minimal")
    paused = Metric[State](
        "gpuwarden_paused", "gauge", "", "Whether the driver is released on request (gpuwarden pause), so that no GPU is polled.",
        lambda state: float(state.snapshot.paused_until is not None), profile="minimal")
    collector_success = Metric[State](
        "gpuwarden_collector_success", "gauge", "", "Whether the collector's last poll succeeded; gpuwarden_gpu_up has the state of each GPU.",
        lambda state: {("nvml",): float(state.snapshot.fault is None)} if state.snapshot.asked else None, labels=("collector",), profile="minimal")
    collector_duration_seconds = Metric[State](
        "gpuwarden_collector_duration_seconds", "gauge", "seconds", "Duration of the collector's last poll.",
        lambda state: {("nvml",): state.snapshot.duration} if state.snapshot.asked else None, labels=("collector",))
    collector_last_success_timestamp_seconds = Metric[State](
        "gpuwarden_collector_last_success_timestamp_seconds", "gauge", "seconds", "Unix time of the collector's last successful poll.",
        lambda state: {("nvml",): state.snapshot.last_success} if state.snapshot.last_success else None, labels=("collector",))
    collector_errors_total = Metric[State](
        "gpuwarden_collector_errors_total", "counter", "", "Failures of the driver as a whole and of GPUs that are not yet identified, by NVML error.",
        _collector_errors, labels=("collector", "error"))
    tier_reads_total = Metric[State](
        "gpuwarden_tier_reads_total", "counter", "", "Number of times that the metrics of a tier were read, summed over GPUs.",
        lambda state: {(tier,): number for tier, (number, _) in state.counts.tier_reads.items()}, labels=("tier",))
    tier_read_seconds_total = Metric[State](
        "gpuwarden_tier_read_seconds_total", "counter", "seconds", "Time spent reading the metrics of a tier, summed over GPUs, which are read in parallel.",
        lambda state: {(tier,): seconds for tier, (_, seconds) in state.counts.tier_reads.items()}, labels=("tier",))
    queue_length = Metric[State](
        "gpuwarden_queue_length", "gauge", "", "Entries that wait: driver_calls = not returned; run_records = not on the disk; alerts = not yet sent.",
        lambda state: {(queue,): length for queue, length in state.counts.queue_lengths.items()}, labels=("queue",))
    poll_timestamp_seconds = Metric[State](
        "gpuwarden_poll_timestamp_seconds", "gauge", "seconds", "Unix time at which the poll shown here started.",
        lambda state: state.snapshot.time, profile="minimal")
    poll_interval_seconds = Metric[State](
        "gpuwarden_poll_interval_seconds", "gauge", "seconds", "Configured poll interval.",
        lambda state: state.poll_interval, source="poll.interval", profile="minimal")
    early_polls_total = Metric[State](
        "gpuwarden_early_polls_total", "counter", "", "Polls made before they were due, to send advice or a summary to a run, or to record an incident sooner.",
        lambda state: state.counts.early_polls)
    reports_received_total = Metric[State](
        "gpuwarden_reports_received_total", "counter", "", "Messages received from training runs.",
        lambda state: state.counts.reports_received)
    reports_rejected_total = Metric[State](
        "gpuwarden_reports_rejected_total", "counter", "", "Messages from training runs that were rejected, by reason.",
        lambda state: {(reason,): state.counts.reports_rejected.get(reason, 0) for reason in get_args(Rejection)}, labels=("reason",))
    reports_lost_total = Metric[State](
        "gpuwarden_reports_lost_total", "counter", "", "Messages of training runs that the daemon did not read: still queued when it closed the connection, or missing by the count in the run's last message.",
        lambda state: state.counts.reports_lost)
    connections_refused_total = Metric[State](
        "gpuwarden_connections_refused_total", "counter", "", "Connections of training runs closed because of the connection limit or a lack of file descriptors.",
        lambda state: state.counts.run_connections_refused)
    advice_dropped_total = Metric[State](
        "gpuwarden_advice_dropped_total", "counter", "", "Advice not delivered because the run does not read its connection; retried as long as the advice applies.",
        lambda state: state.counts.advice_dropped)
    runs_ended_total = Metric[State](
        "gpuwarden_runs_ended_total", "counter", "", "Ended runs, by outcome; a run that resumes and ends again with the same outcome counts once.",
        lambda state: {(outcome,): count for outcome, count in state.counts.runs_ended.items()}, labels=("outcome",), source="docs/use/runs.md")
    series_dropped_total = Metric[State](
        "gpuwarden_series_dropped_total", "counter", "", "Series left out of the metrics endpoint by a limit, summed over polls.",
        lambda state: {(limit,): count for limit, count in state.counts.series_dropped.items()}, labels=("limit",), profile="minimal")
    tree_processes_dropped_total = Metric[State](
        "gpuwarden_tree_processes_dropped_total", "counter", "", "Processes of runs left out of the run's totals because the run has too many, summed over samples.",
        lambda state: state.counts.tree_processes_dropped)
    record_errors_total = Metric[State](
        "gpuwarden_record_errors_total", "counter", "", "Failures of the run database (one that lasts counts once), plus run records dropped because of them.",
        lambda state: state.counts.record_errors, source="records.path", profile="minimal")
    incidents_total = Metric[State](
        "gpuwarden_incidents_total", "counter", "", "Incidents that the flight recorder opened, by the kind of what opened them.",
        lambda state: None if state.counts.incidents is None else {(kind,): count for kind, count in state.counts.incidents.items()},
        labels=("kind",), source="docs/use/incidents.md")
    incidents_dropped_total = Metric[State](
        "gpuwarden_incidents_dropped_total", "counter", "", "Incidents not recorded because of the limits for each user and kind.",
        lambda state: None if state.counts.incidents is None else state.counts.incidents_dropped, source="docs/use/incidents.md")
    alerts_dropped_total = Metric[State](
        "gpuwarden_alerts_dropped_total", "counter", "", "Alerts not sent by the daemon because too many are firing.",
        lambda state: state.counts.alerts_dropped, source="docs/use/notifications.md")
    alertmanager_alerts_sent_total = Metric[State](
        "gpuwarden_alertmanager_alerts_sent_total", "counter", "", "Alerts that the Alertmanager accepted from the daemon, re-sent ones included.",
        lambda state: {(url,): posted.sent for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    alertmanager_errors_total = Metric[State](
        "gpuwarden_alertmanager_errors_total", "counter", "", "Failed requests to the Alertmanager; the log has the reason.",
        lambda state: {(url,): posted.failed for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    alertmanager_alerts_dropped_total = Metric[State](
        "gpuwarden_alertmanager_alerts_dropped_total", "counter", "", "Alerts never sent to the Alertmanager: resolved before it accepted a request, or over the queue limit.",
        lambda state: {(url,): posted.dropped for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/use/notifications.md")
    notify_messages_total = Metric[State](
        "gpuwarden_notify_messages_total", "counter", "", "Notifications that the target accepted.",
        lambda state: {(name,): counts.sent for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    notify_errors_total = Metric[State](
        "gpuwarden_notify_errors_total", "counter", "", "Failed attempts to send a notification; they are retried, and the log has the reason.",
        lambda state: {(name,): counts.failed for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    notify_alerts_dropped_total = Metric[State](
        "gpuwarden_notify_alerts_dropped_total", "counter", "", "Alerts never sent to the target: resolved for over an hour before it accepted a message, or over the queue limit.",
        lambda state: {(name,): counts.dropped for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/use/notifications.md")
    access = Metric[State](
        "gpuwarden_access", "gauge", "", "Whether the daemon can read a source that needs a permission or driver support.",
        lambda state: {(source,): float(allowed) for source, allowed in state.access.items()}, labels=("source",))
    xid_events_dropped_total = Metric[State](
        "gpuwarden_xid_events_dropped_total", "counter", "", "XIDs dropped, by reason: unknown_gpu = PCI address not resolved within a minute (logged); codes = too many distinct codes on one GPU.",
        lambda state: {(reason,): count for reason, count in state.counts.xids_dropped.items()}, labels=("reason",))
    kernel_log_records_lost_total = Metric[State](
        "gpuwarden_kernel_log_records_lost_total", "counter", "", "Kernel log records that were overwritten before the daemon read them.",
        lambda state: state.counts.kernel_log_records_lost, source="/dev/kmsg")
    http_requests_total = Metric[State](
        "gpuwarden_http_requests_total", "counter", "", "HTTP requests answered, by path and status code.",
        lambda state: {(path, str(code)): count for (path, code), count in state.counts.http_requests.items()}, labels=("path", "code"))
    http_connections_lost_total = Metric[State](
        "gpuwarden_http_connections_lost_total", "counter", "", "HTTP connections lost, by reason: evicted = closed for a newer one; timed_out = too slow; not_accepted = no file descriptor left.",
        lambda state: {(reason,): count for reason, count in state.counts.http_connections_lost.items()}, labels=("reason",))
    # fmt: on


def _known(read: Callable[[psutil.Process], float]) -> Callable[[psutil.Process], float | None]:
    """Make a reader return None for what the kernel does not show, such as without free file descriptors."""

    def read_if_known(process: psutil.Process) -> float | None:
        try:
            return read(process)
        except (OSError, psutil.Error):
            return None

    return read_if_known


class DaemonProcess(Table[psutil.Process], prefix="process_"):
    """Process of the daemon.

    Names and meanings are those of Prometheus' client libraries. Read at the first scrape after each poll.
    """

    # fmt: off
    cpu_seconds_total = Metric[psutil.Process](
        "process_cpu_seconds_total", "counter", "seconds", "Total user and system CPU time spent in seconds.",
        _known(lambda process: sum(process.cpu_times()[:2])), source="/proc/self/stat")
    virtual_memory_bytes = Metric[psutil.Process](
        "process_virtual_memory_bytes", "gauge", "bytes", "Virtual memory size in bytes.",
        _known(lambda process: float(process.memory_info().vms)), source="/proc/self/statm")
    resident_memory_bytes = Metric[psutil.Process](
        "process_resident_memory_bytes", "gauge", "bytes", "Resident memory size in bytes.",
        _known(lambda process: float(process.memory_info().rss)), source="/proc/self/statm")
    start_time_seconds = Metric[psutil.Process](
        "process_start_time_seconds", "gauge", "seconds", "Start time of the process since unix epoch in seconds.",
        _known(lambda process: process.create_time()), source="/proc/self/stat")
    open_fds = Metric[psutil.Process](
        "process_open_fds", "gauge", "", "Number of open file descriptors.",
        _known(lambda process: float(process.num_fds())), source="/proc/self/fd")
    max_fds = Metric[psutil.Process](
        "process_max_fds", "gauge", "", "Maximum number of open file descriptors.",
        _known(lambda process: float(process.rlimit(psutil.RLIMIT_NOFILE)[0])), source="getrlimit(2)")
    # fmt: on

"""Conditions of the daemon, and of the driver as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.health.model import OUTLIVES_RESTART, Condition, Labels
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.records.writer import MAX_WAITING
from gpuwarden.state import Alert, State

_NVML = {"collector": "nvml"}


def _driver_fault(state: State) -> Iterator[Alert]:
    snapshot = state.snapshot
    if snapshot.fault is not None:
        description = f"The NVIDIA driver does not answer ({snapshot.fault}): no GPU of the host can be read."
        yield Alert(
            labels=_NVML,
            text=f"not responding: {error_text(snapshot.fault)}",
            description=description,
            since=snapshot.time,
        )


def _driver_ending(_labels: Labels, state: State) -> str | None:
    """Return None while the driver is not asked: paused, or all GPUs asleep."""
    return "" if state.snapshot.asked else None


def _no_gpus(state: State) -> Iterator[Alert]:
    snapshot = state.snapshot
    if snapshot.asked and snapshot.fault is None and not snapshot.enumerated and not snapshot.asleep_count:
        description = "The NVIDIA driver answers but lists no GPU."
        yield Alert(labels=_NVML, text="lists no GPU", description=description, since=snapshot.time)


DAEMON_CONDITIONS = (
    Condition(
        name="GpuwardenDown",
        subject="box",
        severity="critical",
        expr="""
            up{job="%{job}"} == 0 or absent(up{job="%{job}"})
        """,
        for_="45s",
        summary="gpuwarden%{on_host} is down: GPUs and training runs are not monitored",
        description="""{{ if $labels.instance }}Prometheus cannot scrape gpuwarden at {{ $labels.instance }};
            on that host, run: systemctl status gpuwarden{{ else
            }}Prometheus has no target of the job %{job}.{{ end }}""",
        meaning="""Prometheus cannot scrape gpuwarden, or has no target of that job, so no other alert of that host
            fires.""",
        diagnosis="`systemctl status gpuwarden`, `journalctl -u gpuwarden`, and the page *Targets* of Prometheus.",
        action="""Start it. `gpuwarden check-config /etc/gpuwarden/config.yaml` shows errors of its
            configuration.""",
        false_positives="""The scrape job has another name: set `gpuwarden rules --job`. Never fires for a host that is
            missing from service discovery while others are there.""",
        links_to_daemon=False,
    ),
    Condition(
        name="GpuwardenStale",
        subject="box",
        severity="warning",
        expr="""
            time() - gpuwarden_poll_timestamp_seconds
              > on (cluster, job, instance)
              clamp_min(%{stale_polls} * gpuwarden_poll_interval_seconds, %{stale.seconds})
        """,
        summary="gpuwarden%{on_host} stopped polling: all its values are stale",
        description="The last poll of gpuwarden at {{ $labels.instance }} was {{ $value | humanizeDuration }} ago.",
        meaning="""The daemon answers, but its last poll is older than %{stale_polls.words} poll intervals and older
            than %{stale.words}: all its values are stale.""",
        diagnosis="`gpuwarden_collector_duration_seconds`, and the daemon's log.",
        action="Restart it, and please report it: a poll is limited to three poll intervals and 30 seconds.",
        false_positives="The clocks of the host and of Prometheus differ by %{stale.words}: repair the time service.",
    ),
    Condition(
        name="GpuwardenDriverFault",
        subject="box",
        severity="critical",
        expr="""
            gpuwarden_collector_success{collector="nvml"} == 0
        """,
        for_="1m",
        keep_firing_for=OUTLIVES_RESTART,
        check=_driver_fault,
        ending=_driver_ending,
        summary="NVIDIA driver%{on_host} is not responding",
        description="The NVIDIA driver on {{ $labels.instance }} does not answer; none of its GPUs can be read.",
        meaning="""The NVIDIA driver as a whole does not answer gpuwarden: it is not loaded, its version differs from
            that of its library, or it hangs.""",
        diagnosis="`nvidia-smi`; `gpuwarden_collector_errors_total` has the driver's error.",
        action="After a driver update, restart the machine or reload the module; gpuwarden retries every five seconds.",
        false_positives="The machine has no NVIDIA GPU: do not run gpuwarden there.",
    ),
    Condition(
        name="GpuwardenPaused",
        subject="box",
        severity="warning",
        expr="""
            gpuwarden_paused == 1
        """,
        for_="%{paused}",
        summary="gpuwarden%{on_host} is paused for too long: GPUs are not monitored",
        description="""gpuwarden at {{ $labels.instance }} has been paused for over %{paused.words}; its GPUs are not
            monitored.""",
        meaning="""`gpuwarden pause` released the driver, and no GPU of the host is read until `gpuwarden resume`.
            Meanwhile no alert of GPUs fires except those on XIDs from the kernel log, and of a run's device memory only
            RunOutOfMemory.""",
        diagnosis="The status page for the end of the pause; who is working on the host?",
        action="`sudo gpuwarden resume`.",
        false_positives="The work on the host takes that long.",
    ),
    # The driver answers without any GPU; GpuMissing is for GPUs that it lists and that cannot be read.
    Condition(
        name="GpuwardenNoGpus",
        subject="box",
        severity="critical",
        expr="""
            gpuwarden_collector_success{collector="nvml"} == 1
              unless on (cluster, job, instance) gpuwarden_gpus > 0
              unless on (cluster, job, instance) gpuwarden_gpus_asleep > 0
              unless on (cluster, job, instance) gpuwarden_paused == 1
        """,
        for_="1m",
        keep_firing_for=OUTLIVES_RESTART,
        check=_no_gpus,
        summary="NVIDIA driver%{on_host} lists no GPU",
        description="The NVIDIA driver on {{ $labels.instance }} answers but lists no GPU.",
        meaning="The driver is loaded, answers, and lists no GPU: nothing can train on this host.",
        diagnosis="""`nvidia-smi -L` and `lspci -d 10de:`. If the second lists GPUs: `dmesg | grep -i nvrm`. In a
            container or a virtual machine: was a GPU passed to it?""",
        action="Restart the machine if all GPUs fell off the bus at once; then check power and risers.",
        false_positives="The machine has no GPU: do not run gpuwarden there.",
    ),
    Condition(
        name="GpuwardenSeriesDropped",
        subject="box",
        severity="warning",
        expr="""
            increase(gpuwarden_series_dropped_total[%{lost_reported}]) > 0
        """,
        summary="gpuwarden%{on_host} reached its series limit and drops some metrics",
        description="gpuwarden at {{ $labels.instance }} drops series: more {{ $labels.limit }} than configured.",
        fires="for %{lost_reported.words} after the last drop",
        meaning="""More owners hold memory of a GPU than `owners.max`, or more processes than `processes.max_series`.
            Those with the least memory are dropped, or summed up as `other`.""",
        diagnosis="`gpuwarden_series_dropped_total` by limit; the status page still lists the processes.",
        action="""Raise the option ([configuration](reference/configuration.md)) if your Prometheus can take more
            series.""",
        false_positives="The small ones do not matter.",
    ),
    # not_json, too_long and no_hello are left out: no client of ours sends them, and no run is lost.
    Condition(
        name="GpuwardenReportsRefused",
        subject="box",
        severity="warning",
        expr="""
            increase(
              gpuwarden_reports_rejected_total{
                reason=~"too_many_runs|too_many_new_runs|unknown_version|unknown_type|invalid|internal"
              }[%{lost_reported}]
            ) > 0
              or
            label_replace(
              increase(gpuwarden_connections_refused_total[%{lost_reported}]) > 0,
              "reason", "too_many_connections", "", ""
            )
              or
            label_replace(
              increase(gpuwarden_reports_lost_total[%{lost_reported}]) > 0,
              "reason", "lost", "", ""
            )
        """,
        summary="gpuwarden%{on_host} refuses or loses reports of training runs",
        description="""gpuwarden at {{ $labels.instance }} refused or lost {{ printf "%.0f" $value }} messages or
            connections of training runs within %{lost_reported.words}: {{ reReplaceAll "_" " " $labels.reason }}.""",
        fires="for %{lost_reported.words} after the last one",
        meaning="""A training run reports, and its reports are refused or lost, so no alert covers it: more runs than
            `runs.max` or `runs.max_per_user` (*too_many_runs*) or new ones than `runs.new_per_minute`
            (*too_many_new_runs*), no file descriptors (*too_many_connections*), a client of an incompatible version
            (*unknown_version*, *unknown_type*), invalid values (*invalid*), a bug in the daemon (*internal*), or unread
            messages in a closed connection (*lost*).""",
        diagnosis="The daemon's log, which names the process: `journalctl -u gpuwarden -p warning`.",
        action="""Depends on the reason: raise the option, or find the job that starts so many runs; use the same
            version of client and daemon; please report *invalid*, *internal*, and *lost* without another reason
            to us. The runs themselves continue.""",
        false_positives="A user tries out messages on the socket: the log has the process and its user.",
    ),
    Condition(
        name="GpuwardenRunRecordsFailing",
        subject="box",
        severity="warning",
        expr="""
            increase(gpuwarden_record_errors_total[%{lost_reported}]) > 0
        """,
        summary="gpuwarden%{on_host} cannot write run records to disk",
        description="gpuwarden at {{ $labels.instance }} could not write run records to its database, or dropped some.",
        fires="for %{lost_reported.words} after the last error",
        meaning=(
            "The disk of the run database (`records.path`) is full, read-only or missing. Up to "
            f"{MAX_WAITING} records wait in memory and are written when it works again; a restart of the daemon loses "
            "them."
        ),
        diagnosis="The daemon's log, which has the folder and the error; `df` for that folder.",
        action="Free disk space, or give the folder to the daemon's user; no restart is needed.",
        false_positives="""Run records are not needed there: set `records.path: none`
            ([configuration](reference/configuration.md)).""",
    ),
    Condition(
        name="GpuwardenWatchdog",
        subject="box",
        severity="info",
        expr="""
            vector(1)
        """,
        summary="Watchdog%{on_host}: this alert always fires while alerts reach you",
        description="If it stops, Prometheus, the rules or Alertmanager do not work, and no other alert arrives.",
        fires="always",
        meaning="""Nothing is wrong: it always fires. A service outside of this Prometheus must raise the alarm when it
            stops ([notifications](use/notifications.md#watchdog)).""",
        diagnosis="If it does not arrive: the pages *Alerts* and *Status* of Prometheus, and the log of Alertmanager.",
        action="Route it only to that service.",
        false_positives="None.",
    ),
)

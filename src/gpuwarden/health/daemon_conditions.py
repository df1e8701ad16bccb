"""Conditions of the daemon itself, and of what it can read of a box."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.health.model import OUTLIVES_RESTART, Condition, Occurrence
from gpuwarden.records.writer import MAX_WAITING
from gpuwarden.state import State

_NVML = {"collector": "nvml"}


def _driver_fault(state: State) -> Iterator[Occurrence]:
    snapshot = state.snapshot
    if snapshot.fault is not None:
        description = f"The NVIDIA driver does not answer ({snapshot.fault}): no GPU of the box can be read."
        yield Occurrence(
            labels=_NVML, text=f"does not answer: {snapshot.fault}", description=description, since=snapshot.time
        )


def _no_gpus(state: State) -> Iterator[Occurrence]:
    snapshot = state.snapshot
    if snapshot.asked and snapshot.fault is None and not snapshot.enumerated and not snapshot.asleep_count:
        description = "The NVIDIA driver answers, and knows of no GPU in the box."
        yield Occurrence(labels=_NVML, text="knows of no GPU", description=description, since=snapshot.time)


DAEMON_CONDITIONS = (
    Condition(
        name="GpuwardenDown",
        subject="box",
        severity="critical",
        expr="""
            up{job="%{job}"} == 0 or absent(up{job="%{job}"})
        """,
        hold="45s",
        summary="GPUs and training runs are not watched.",
        description="""{{ if $labels.instance }}Prometheus cannot scrape gpuwarden at {{ $labels.instance }}.{{ else
            }}Prometheus has no target of the job %{job}.{{ end }}""",
        means="""Prometheus cannot scrape gpuwarden, or has no target of that job at all. Nothing else here can fire
            meanwhile.""",
        look="`systemctl status gpuwarden` and `journalctl -u gpuwarden`; then at Prometheus' page *Targets*.",
        do="""start it; `/opt/gpuwarden/bin/gpuwarden check-config /etc/gpuwarden/config.yaml` tells what is wrong with
            its configuration.""",
        wrong="""the scrape job has another name: say so by `gpuwarden rules --job`. Silent for a box that is no target
            any more, while others are: what your service discovery forgets, nobody misses.""",
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
        summary="gpuwarden answers but does not poll.",
        description="""The page of gpuwarden at {{ $labels.instance }} shows a poll from {{ $value | humanizeDuration }}
            ago.""",
        means="""The daemon answers, but the page it serves is from a poll more than %{stale_polls.words} intervals ago,
            and more than %{stale.words}: all its values are old.""",
        look="`gpuwarden_collector_duration_seconds`, and the daemon's log.",
        do="restart it, and please report it: a poll is bounded to three poll intervals and 30 seconds.",
        wrong="the clocks of the box and of Prometheus differ by %{stale.words} (repair the time service).",
    ),
    Condition(
        name="GpuwardenDriverFault",
        subject="box",
        severity="critical",
        expr="""
            gpuwarden_collector_success{collector="nvml"} == 0
        """,
        hold="1m",
        keep=OUTLIVES_RESTART,
        check=_driver_fault,
        summary="The NVIDIA driver does not answer.",
        description="""gpuwarden at {{ $labels.instance }} gets no answer from the NVIDIA driver; no GPU of the box can
            be read.""",
        means="""The NVIDIA driver as a whole does not answer gpuwarden: not loaded, of another version than its
            library, or hanging.""",
        look="`nvidia-smi`, and at `gpuwarden_collector_errors_total` for the driver's error.",
        do="""after an update of the driver, restart the machine or reload the module; gpuwarden tries again every five
            seconds by itself.""",
        wrong="the machine has no NVIDIA GPU: do not run gpuwarden there.",
    ),
    Condition(
        name="GpuwardenPaused",
        subject="box",
        severity="warning",
        expr="""
            gpuwarden_paused == 1
        """,
        hold="%{paused}",
        summary="GPUs are not watched, because gpuwarden was told to pause.",
        description="""gpuwarden at {{ $labels.instance }} has been paused for over %{paused.words}; it reads no GPU
            meanwhile.""",
        means="""Somebody has told gpuwarden to let go of the driver (`gpuwarden pause`), and no GPU of the box is read
            meanwhile. Silent are all alerts on GPUs (*Gpu…*) but those on XIDs, which the kernel log tells; those on a
            run's device memory but RunOutOfMemory; GpuwardenDriverFault and GpuwardenNoGpus.""",
        look="the status page, which says how long the pause lasts, and at who is at work on the box.",
        do="`sudo /opt/gpuwarden/bin/gpuwarden resume`.",
        wrong="the work on the box takes that long.",
    ),
    # The driver answers, and has none; GpuMissing is for some that it has and cannot read.
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
        hold="1m",
        keep=OUTLIVES_RESTART,
        check=_no_gpus,
        summary="The NVIDIA driver answers and has no GPU.",
        description="gpuwarden at {{ $labels.instance }} works, and the NVIDIA driver there knows of no GPU.",
        means="The driver is loaded, answers, and enumerates no GPU at all: the box trains nothing.",
        look="""`nvidia-smi -L` and `lspci -d 10de:`. Where the second has GPUs, the kernel log says why the driver has
            none: `dmesg | grep -i nvrm`. In a container or a virtual machine, at whether any was passed on to it.""",
        do="restart the machine where GPUs fell off the bus, all at once; then look at power and risers.",
        wrong="the GPUs were given to virtual machines, or the machine never had one: do not run gpuwarden there.",
    ),
    # What the page lacks is not seen on it.
    Condition(
        name="GpuwardenSeriesDropped",
        subject="box",
        severity="warning",
        expr="""
            increase(gpuwarden_series_dropped_total[%{lost_told}]) > 0
        """,
        summary="gpuwarden leaves series out, because a limit is reached.",
        description="""gpuwarden at {{ $labels.instance }} leaves series out of its page: there are more {{
            $labels.limit }} than it may tell of.""",
        told="for %{lost_told.words} after the last one",
        means="""More owners hold a GPU's memory than `owners.max`, or more processes than `processes.max_series`. Those
            that hold the least are left out; owners are summed up as `other`, so that sums stay right.""",
        look="`gpuwarden_series_dropped_total`, by limit, and at the status page, which has the processes.",
        do="raise the option ([configuration.md](reference/configuration.md)) if your Prometheus can take more series.",
        wrong="nobody needs the small ones: silence it for that box, or for that `limit`.",
    ),
    # What anybody can send to the socket and no client of ours does (not_json, too_long, no_hello) is not told of:
    # nothing is lost by it.
    Condition(
        name="GpuwardenReportsRefused",
        subject="box",
        severity="warning",
        expr="""
            increase(
              gpuwarden_reports_rejected_total{
                reason=~"too_many_runs|unknown_version|unknown_type|invalid|internal"
              }[%{lost_told}]
            ) > 0
              or
            label_replace(
              increase(gpuwarden_connections_refused_total[%{lost_told}]) > 0,
              "reason", "too_many_connections", "", ""
            )
        """,
        summary="gpuwarden refuses what training runs report.",
        description="""gpuwarden at {{ $labels.instance }} refused {{ printf "%.0f" $value }} messages or connections of
            training runs within %{lost_told.words}: {{ $labels.reason }}.""",
        told="for %{lost_told.words} after the last one",
        means="""A training run reports and is not heard, so that no alert can tell of it: there are more runs than
            `runs.max` (*too_many_runs*) or more connections than the daemon has descriptors for
            (*too_many_connections*); its client is of another version than the daemon understands (*unknown_version*,
            *unknown_type*) or says what cannot be (*invalid*); or the daemon met an error of its own (*internal*).""",
        look="the daemon's log, which names the process: `journalctl -u gpuwarden -p warning`.",
        do="""by the reason: raise `runs.max`; bring client and daemon to one version; report *invalid* and *internal*
            to us, please. The runs themselves train on.""",
        wrong="somebody who may write to the socket plays with it: the log has the process and its user.",
    ),
    Condition(
        name="GpuwardenReceiptsFail",
        subject="box",
        severity="warning",
        expr="""
            increase(gpuwarden_receipt_errors_total[%{lost_told}]) > 0
        """,
        summary="gpuwarden cannot write the records of training runs.",
        description="""gpuwarden at {{ $labels.instance }} could not write records of training runs to its database, or
            had to give some up.""",
        told="for %{lost_told.words} after the fault was met, whether it is mended by then or not",
        means=(
            "The disk of the run database (`receipts.path`) is full, read-only or gone. Records wait in memory, "
            f"{MAX_WAITING} at most, and are written once it is mended; a restart of the daemon loses them."
        ),
        look="the daemon's log, which has the folder and the error, and at `df` for that folder.",
        do="make room, or give the folder to the daemon's user; nothing has to be restarted.",
        wrong="nobody needs receipts there: `receipts.path: none` ([configuration.md](reference/configuration.md)).",
    ),
)

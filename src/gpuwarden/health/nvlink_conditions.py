"""Conditions of a GPU's links: PCIe to the machine, NVLink and its fabric to other GPUs."""

from __future__ import annotations

from gpuwarden.health.model import OUTLIVES_RESTART, Condition


def _number_template(expression: str) -> str:
    """Return a template of the number that an expression has; in it `{$gpu}` selects the GPU of the alert."""
    asked = expression.replace("{$gpu", "{%s")
    return f'{{{{ with query (printf "{asked}" $gpu) }}}}{{{{ . | first | value | humanize }}}}{{{{ end }}}}'


_GPU = (
    '{{- $gpu := printf "cluster=%q,job=%q,instance=%q,uuid=%q" '
    "$labels.cluster $labels.job $labels.instance $labels.uuid }}"
)
_GENERATION = _number_template("max_over_time(gpuwarden_gpu_pcie_link_generation{$gpu}[%{link_window}])")
_MAX_GENERATION = _number_template("gpuwarden_gpu_pcie_link_max_generation{$gpu,of='link'}")
_WIDTH = _number_template("max_over_time(gpuwarden_gpu_pcie_link_width{$gpu}[%{link_window}])")
_MAX_WIDTH = _number_template("gpuwarden_gpu_pcie_link_max_width{$gpu}")

NVLINK_CONDITIONS = (
    # The best that was seen in the window, as links of idle GPUs are slow by design, and bandwidth doubles with each
    # generation. Against the link's generation, not the GPU's, which the slot may not have.
    Condition(
        name="GpuPcieLinkDegraded",
        subject="gpu",
        severity="warning",
        expr="""
            max_over_time(gpuwarden_gpu_pcie_link_width[%{link_window}]) / gpuwarden_gpu_pcie_link_max_width
              * 2 ^ (
                max_over_time(gpuwarden_gpu_pcie_link_generation[%{link_window}])
                  - on (cluster, job, instance, uuid) gpuwarden_gpu_pcie_link_max_generation{of="link"}
              )
              < 1
              and on (cluster, job, instance, uuid)
            rate(gpuwarden_gpu_busy_seconds_total[%{link_window}]) > %{link_busy}
        """,
        summary="A GPU's PCIe link is slower than it could be, though the GPU works.",
        description=(
            f"{_GPU}The PCIe link of %{{gpu}} has only {{{{ $value | humanizePercentage }}}} of its bandwidth under "
            f"load: generation {_GENERATION} of {_MAX_GENERATION}, {_WIDTH} of {_MAX_WIDTH} lanes.%{{users}}"
        ),
        means="""In the last %{link_window.words} the GPU was busy for more than %{link_busy.words} of the time, and its
            link was never as fast and as wide as GPU and slot together can be. Copies from the host take longer, which
            shows as waits for input. Links of idle GPUs are slow by design and do not fire it.""",
        look="""`nvidia-smi -q -i GPU | grep -A8 'GPU Link Info'`, `sudo lspci -vv -s ADDRESS | grep LnkSta`, and at
            GpuPcieReplays: a link with errors trains to a lower speed.""",
        do="""seat the board, its riser and cables anew when its work has ended; look in the firmware's settings for a
            speed that somebody set.""",
        wrong="""the slot has fewer lanes than the board by design, and the driver does not know: silence it for that
            GPU. Laptops slow their links to save power. Silent for GPUs that tell no utilization, as with MIG.""",
    ),
    Condition(
        name="GpuPcieReplays",
        subject="gpu",
        severity="warning",
        expr="60 * rate(gpuwarden_gpu_pcie_replays_total[%{link_window}]) > %{pcie_replays}",
        summary="Packets on a GPU's PCIe link are lost and sent again.",
        description="""Over the last %{link_window.words} {{ $value | humanize }} packets a minute had to be sent again
            on the PCIe link of %{gpu}.%{users}""",
        means="""More than %{pcie_replays} packets a minute arrived damaged and were sent again, over
            %{link_window.words}. No data is lost, but the link is bad: it may become slower, or the GPU fall off the
            bus (XID 79).""",
        look="""`gpuwarden_gpu_pcie_errors_total` for the types of errors, and `dmesg | grep -i -e pcieport -e AER` for
            the place on the way.""",
        do="seat the board, its riser and cables anew; if that does not help, try another slot, then another board.",
        wrong="a GPU is being reset or taken out, which makes a few at once and then no more.",
    ),
    # A link without a partner never is up. One that was, or that most GPUs of the box have up, has lost it. Looked at
    # in three moments of the past: to look through a whole day of hundreds of links costs Prometheus too much.
    Condition(
        name="GpuNvlinkDown",
        subject="gpu",
        severity="warning",
        expr="""
            count by (cluster, job, instance, uuid) (
              gpuwarden_gpu_nvlink_up == 0
                and on (cluster, job, instance, uuid, link)
              (
                gpuwarden_gpu_nvlink_up offset %{link_window} == 1
                  or
                gpuwarden_gpu_nvlink_up offset 1h == 1
                  or
                gpuwarden_gpu_nvlink_up offset %{nvlink_remembered} == 1
              )
              or
              gpuwarden_gpu_nvlink_up == 0
                and on (cluster, job, instance, link)
              (
                avg by (cluster, job, instance, link) (gpuwarden_gpu_nvlink_up) > 0.5
              )
            )
              unless on (cluster, job, instance, uuid)
            gpuwarden_gpu_mig_mode{setting="current"} == 1
        """,
        hold="1m",
        summary="NVLinks of a GPU are down.",
        description="""NVLinks of %{gpu} that are down, and were up or are up on the other GPUs: {{ $value | humanize
            }}.%{users}""",
        means="""A link to another GPU or to a switch is down that was up %{link_window.words}, 1 hour or
            %{nvlink_remembered.words} ago, or that most GPUs of the box have up. Runs over several GPUs are slower, or
            fail when they start.""",
        look="""`gpuwarden_gpu_nvlink_up == 0` for which, at the GPU at their other end (`nvidia-smi topo -m`), XIDs 74
            and 144 to 150, and GpuNvlinkErrors for before.""",
        do="""[reset the GPU](start/install.md#reset-a-gpu) and those it is linked to, when their work has ended. If
            they
            stay down, seat bridges or the module anew, or have it replaced.""",
        wrong="""somebody took a bridge out, or divided GPUs for a while: it forgets after %{nvlink_remembered.words}.
            Links that have no partner by design do not fire it, as long as most GPUs of the box lack them too; nor do
            GPUs with MIG, which use none.""",
    ),
    # Replays and recoveries come from errors of checksums (crc), which come alone too; symbol and effective are of
    # the wire before its own correction. Those are no faults by themselves.
    Condition(
        name="GpuNvlinkErrors",
        subject="gpu",
        severity="warning",
        expr="""
            60 * sum by (cluster, job, instance, uuid) (
              rate(
                gpuwarden_gpu_nvlink_errors_total{
                  type!~"crc.*|ecc_data|symbol|effective|transmit_discard"
                }[%{link_window}]
              )
            )
              > %{nvlink_errors}
        """,
        summary="A GPU's NVLinks have errors.",
        description="""Over the last %{link_window.words} the NVLinks of %{gpu} had {{ $value | humanize }} errors a
            minute that made them send again or recover.%{users}""",
        means="""More than %{nvlink_errors} errors a minute on NVLink, over %{link_window.words}: replays, recoveries,
            damaged packets, overruns. No data is lost as long as links recover, but runs over several GPUs become
            slower, and the link may go down. Single checksum errors do not count.""",
        look="""`gpuwarden_gpu_nvlink_link_errors_total` for the link and the type, and at the GPU at its other end,
            which mostly counts errors too.""",
        do="as for GpuNvlinkDown, before it goes down.",
        wrong="other GPUs of the fabric are being reset, which makes links recover.",
    ),
    Condition(
        name="GpuFabricNotJoined",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_fabric_joined == 0",
        hold="5m",
        keep=OUTLIVES_RESTART,
        summary="A GPU has not joined its NVLink fabric.",
        description="%{gpu} has not joined its NVLink fabric; CUDA programs fail to start on it.%{users}",
        means="""On boxes with NVLink switches each GPU joins the fabric after a start or a reset, and CUDA waits for
            it: programs fail with *system not yet initialized* (802). This one has not for five minutes, or with an
            error.""",
        look="""`systemctl status nvidia-fabricmanager`, its log, and `nvidia-smi -q -i GPU | grep -A4 Fabric`. All GPUs
            of the box: it is the fabric manager; one: it is the GPU or its links.""",
        do="""start the fabric manager, in the same version as the driver; where only one GPU is left out, reset it,
            then restart the box.""",
        wrong="the box is used without its fabric on purpose, as some virtual machines are: silence it there.",
    ),
    Condition(
        name="GpuFabricFault",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_fabric_fault == 1",
        hold="1m",
        summary="A GPU's place in its NVLink fabric has a fault.",
        description="The NVLink fabric of %{gpu} has the fault {{ $labels.fault }}.%{users}",
        means="""The fabric manager tells a fault of the GPU's place in the fabric: less bandwidth (*bandwidth*), a
            route that is bad (*route_unhealthy*) or being mended (*route_recovery*), or accesses that ran into their
            timeout (*access_timeout_recovery*).""",
        look="GpuNvlinkDown and GpuNvlinkErrors of the same box, and the fabric manager's log.",
        do="""what holds for the links. A fault that stays needs a reset of the GPU when its work has ended; one of
            several boxes at once is the switch's.""",
        wrong="a part of the fabric is under maintenance: silence it until it is over.",
    ),
)

"""Conditions of a GPU's links: PCIe, NVLink and the NVLink fabric."""

from __future__ import annotations

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.model import OUTLIVES_RESTART, Condition

BUSY_RATIO = 0.2  # utilization above which a link runs at its full speed


def pcie_shortfall(gpu: Gpu) -> str:
    """Return what a GPU's PCIe link lacks: lanes, or while the GPU is busy its speed; empty if nothing."""
    width, full = gpu.value(GpuReadings.pcie_link_width), gpu.value(GpuReadings.pcie_link_max_width)
    generation = gpu.value(GpuReadings.pcie_link_generation)
    highest = gpu.value(GpuReadings.pcie_link_max_generation, "link")
    if width is not None and full is not None and width < full:
        return f"PCIe uses {width:.0f} of {full:.0f} lanes"
    is_busy = (gpu.value(GpuReadings.utilization_ratio) or 0.0) > BUSY_RATIO
    if is_busy and generation is not None and highest is not None and generation < highest:
        return f"PCIe runs at generation {generation:.0f} of {highest:.0f} although the GPU is busy"
    return ""


def _number_template(expression: str) -> str:
    """Return a template of an expression's value; `{$gpu}` in it selects the GPU of the alert."""
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

LINK_CONDITIONS = (
    # The best of the window, as links of idle GPUs are slow by design; bandwidth doubles with each generation. Compared
    # with the generation of the link, not of the GPU, which the slot may not support.
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
        summary="%{the_gpu} is busy with its PCIe link below full speed",
        description=(
            f"{_GPU}The PCIe link of %{{gpu}} has only {{{{ $value | humanizePercentage }}}} of its bandwidth under "
            f"load: generation {_GENERATION} of {_MAX_GENERATION}, {_WIDTH} of {_MAX_WIDTH} lanes.%{{users}}"
        ),
        meaning="""In the last %{link_window.words} the GPU was busy for more than %{link_busy.words} of the time, and
            its link never reached the speed and width that GPU and slot support. Copies from the host take longer.""",
        diagnosis="""`nvidia-smi -q -i GPU | grep -A8 'GPU Link Info'`, `sudo lspci -vv -s ADDRESS | grep LnkSta`, and
            GpuPcieReplays: a link with errors falls back to a lower speed.""",
        action="""After its work, reseat the board, its riser and cables; check the firmware settings for a fixed link
            speed.""",
        false_positives="""The slot has fewer lanes than the board by design. Laptops slow their links to save power.
            Never fires for GPUs without utilization, as with MIG.""",
    ),
    Condition(
        name="GpuPcieReplays",
        subject="gpu",
        severity="warning",
        expr="60 * rate(gpuwarden_gpu_pcie_replays_total[%{link_window}]) > %{pcie_replays}",
        summary="%{the_gpu} loses packets on its PCIe link",
        description="""The PCIe link of %{gpu} retransmitted {{ $value | humanize }} packets per minute over the last
            %{link_window.words}.%{users}""",
        meaning="""More than %{pcie_replays} packets per minute arrived damaged and were retransmitted, over
            %{link_window.words}. No data is lost, but the link is bad: it can become slower, or the GPU can fall off
            the bus (XID 79).""",
        diagnosis="""`gpuwarden_gpu_pcie_errors_total` has the types of errors, `dmesg | grep -i -e pcieport -e AER` the
            place.""",
        action="Reseat the board, its riser and cables; if that does not help, try another slot, then another board.",
        false_positives="A GPU is being reset or removed.",
    ),
    # A link without a partner is never up: so it counts only if it was up before, or is up on most GPUs of the host.
    # Three moments of the past are compared: a whole day of hundreds of links costs Prometheus too much.
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
        for_="1m",
        summary="%{the_gpu} has NVLinks that are down",
        description="""NVLinks of %{gpu} down: {{ $value | humanize }}. They were up before, or are up on the other
            GPUs.%{users}""",
        meaning="""A link to another GPU or to a switch is down that was up %{link_window.words}, 1 hour or
            %{nvlink_remembered.words} ago, or that is up on most GPUs of the host. Runs on several GPUs are slower, or
            fail at their start.""",
        diagnosis="""`gpuwarden_gpu_nvlink_up == 0` has the links; check the GPU at their other end (`nvidia-smi topo
            -m`), XIDs 74 and 144 to 150, and earlier GpuNvlinkErrors.""",
        action="""After their work, [reset the GPU](start/install.md#reset-a-gpu) and those that it is linked to. If the
            links stay down, reseat the bridges or the module, or replace it.""",
        false_positives="""A bridge was removed: it resolves after %{nvlink_remembered.words}. Links that are down on
            most GPUs of the host do not fire it, nor do GPUs with MIG.""",
    ),
    # Not counted: checksum errors (crc), which cause replays and recoveries but also occur alone, and symbol and
    # effective errors, which are counted before the wire's own correction.
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
        summary="%{the_gpu} has NVLink errors",
        description="""The NVLinks of %{gpu} had {{ $value | humanize }} errors per minute over the last
            %{link_window.words} (replays, recoveries or damaged packets).%{users}""",
        meaning="""More than %{nvlink_errors} errors per minute on NVLink, over %{link_window.words}: replays,
            recoveries, damaged packets, overruns. No data is lost while links recover, but runs on several GPUs become
            slower, and the link can go down.""",
        diagnosis="""`gpuwarden_gpu_nvlink_link_errors_total` has the link and the type; the GPU at its other end
            usually counts errors too.""",
        action="Same as GpuNvlinkDown, before the link goes down.",
        false_positives="Other GPUs of the fabric are being reset, which makes links recover.",
    ),
    Condition(
        name="GpuFabricNotJoined",
        subject="gpu",
        severity="critical",
        expr="gpuwarden_gpu_fabric_joined == 0",
        for_="5m",
        keep_firing_for=OUTLIVES_RESTART,
        summary="%{the_gpu} has not joined its NVLink fabric; CUDA programs fail",
        description="%{gpu} has not joined its NVLink fabric: CUDA programs fail to start on it.%{users}",
        meaning="""On hosts with NVLink switches each GPU joins the fabric after a start or a reset. This GPU has not
            within five minutes, or failed: CUDA programs fail with *system not yet initialized* (802).""",
        diagnosis="""`systemctl status nvidia-fabricmanager`, its log, and `nvidia-smi -q -i GPU | grep -A4 Fabric`. All
            GPUs of the host: the fabric manager. One GPU: the GPU or its links.""",
        action="""Start the fabric manager, in the same version as the driver. If only one GPU has not joined, reset it,
            then restart the host.""",
        false_positives="The host is used without its fabric on purpose, as some virtual machines are.",
    ),
    Condition(
        name="GpuFabricFault",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_fabric_fault == 1",
        for_="1m",
        summary="%{the_gpu} has a fault in its NVLink fabric",
        description="The NVLink fabric of %{gpu} has a fault: {{ $labels.fault }}.%{users}",
        meaning="""The fabric manager reports a fault of the GPU in its fabric: reduced bandwidth (*bandwidth*), a bad
            route (*route_unhealthy*), a route being repaired (*route_recovery*), or accesses that timed out
            (*access_timeout_recovery*).""",
        diagnosis="GpuNvlinkDown and GpuNvlinkErrors of the same host, and the fabric manager's log.",
        action="""Check the links (GpuNvlinkDown). If the fault lasts, reset the GPU after its work; a fault of several
            hosts at once is the switch's.""",
        false_positives="A part of the fabric is under maintenance.",
    ),
)

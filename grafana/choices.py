"""What a person chooses at the top of a dashboard: the same on all of them, so that links keep it."""

from __future__ import annotations

from classic import SOURCE, Json
from series import BOX

from gpuwarden.alerts.prometheus_rules import RECORDED
from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.owners.metrics import OwnerReadings
from gpuwarden.runs.metrics import RunReadings

_RECORDED = RECORDED["gpuwarden:box:build_info:group"].name
_LONG = 3 * 3600.0  # seconds, of which Grafana draws no more than a point each two minutes where a fleet is drawn
_HERE = '{cluster=~"$cluster",instance=~"$instance"}'


def choices(*, one_box: bool = False) -> list[Json]:
    """Choose boxes, then among what is on them, by what people call it; at first all, or `one_box`."""
    build = DaemonReadings.build_info.name
    gpus = f'label_join({GpuHealth.info.name}{_HERE}, "label", " · ", "gpu", "name", "instance")'
    runs = f'label_join(last_over_time({RunReadings.info.name}{_HERE}[$__range]), "label", " · ", "run_name", "run_id")'
    owners = f"{OwnerReadings.owner_gpu_memory_used_bytes.name}{_HERE}"
    # Those of the chosen GPUs; none where all are chosen, whose matcher takes every UUID.
    parts = f'{MigReadings.info.name}{_HERE[:-1]},gpu_uuid=~"$gpu",uuid!~"$gpu"}}'
    boxes = _choice("instance", "Box", f'label_values({build}{{cluster=~"$cluster"}}, instance)')
    if one_box:
        boxes |= {"current": {}}  # the first: what is drawn for each GPU or run is too much of a whole fleet
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        _choice("cluster", "Cluster", f"label_values({build}, cluster)"),  # few sites have that label
        boxes,
        _choice("gpu", "GPU", f"query_result({gpus})", regex=_labelled("uuid")),
        _choice("mig", "MIG instances", f"label_values({parts}, uuid)", every="", hide=2),
        _choice("owner", "Owner", f"label_values({owners}, owner)"),
        _choice("run", "Run", f"query_result({runs})", regex=_labelled("run_id")),
    ]


def where_recorded() -> Json:
    """Tell by a hidden variable whether to read what rules record once a minute of boxes, owners and GPUs.

    That is so in a time range of more than some hours, whose steps are no shorter, where all GPUs and runs are chosen,
    of which the records are. And only where rules recorded all of it, of each box: with no rules, or as long as some
    of the time range is from before them, all is read.
    """
    daemon, told = f"{DaemonReadings.build_info.name}{_HERE}", f"{_RECORDED}{_HERE}"
    everything = 'label_replace(vector(1), "chosen", ".* .*", "", "")'
    long = f'label_replace(vector($__range_s) > {_LONG:g}, "chosen", "$gpu $run", "", "") and on (chosen) {everything}'
    # Not at the end of the time range: that may be in the future.
    some = f"last_over_time({told}[$__range:1h])"
    # Times at which a box was there, long enough to be recorded, and was not. A Prometheus that is away shows for five
    # minutes what it found before, so what it recorded is looked for further back.
    gaps = f"last_over_time(({daemon} offset 2m unless on ({BOX}) present_over_time({told}[10m]))[$__range:10m])"
    recorded = f"{long} and on () {some} unless on () {gaps}"
    query = (
        f'label_replace({recorded}, "label", ".+", "", "") or on () label_replace(vector(0), "label", "none", "", "")'
    )
    return {
        "name": "recorded",
        "label": "Recorded",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"query_result({query})", "refId": "Prometheus-recorded"},
        "regex": '/label="([^"]+)"/',
        "refresh": 2,
        "sort": 0,
        # Neither: the value is a pattern, which Grafana would escape as one of several.
        "multi": False,
        "includeAll": False,
        "allValue": None,
        "hide": 2,
        "skipUrlSync": True,
        "current": {},
    }


def _choice(name: str, label: str, query: str, *, regex: str = "", every: str = ".*", hide: int = 0) -> Json:
    """Let people choose several values, or all; they are looked up anew when the time range changes.

    `every` is what stands for all, "" for each by name; 2 is Grafana's number to `hide` it. Of thousands of values
    Prometheus takes a pattern that matches none too far faster than one that wants some, for which it joins the series
    of each.
    """
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": f"Prometheus-{name}"},
        "regex": regex,
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": every or None,
        "hide": hide,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _labelled(value: str) -> str:
    # Grafana writes a result with its labels in the order of their names, so `label` comes before either.
    return rf'/label\W+(?<text>[^"]+)".*\b{value}\W+(?<value>[^"]+)"/'

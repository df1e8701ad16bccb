"""Variables of the dashboards: the same on all, so that links keep the selection."""

from __future__ import annotations

from classic import SOURCE, Json
from series import BOX

from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.owners.metrics import OwnerReadings
from gpuwarden.runs.metrics import RunReadings

_RECORDED = "gpuwarden:box:build_info:group"
_LONG = 3 * 3600.0  # seconds, above which Grafana draws at most one point per two minutes of a fleet
_HERE = '{cluster=~"$cluster",instance=~"$instance"}'


def choices(*, one_box: bool = False) -> list[Json]:
    """Return the variables: hosts, then what is on them, by readable names; initially all, or one host."""
    build = DaemonReadings.build_info.name
    gpus = f'label_join({GpuHealth.info.name}{_HERE}, "label", " · ", "gpu", "name", "instance")'
    runs = f'label_join(last_over_time({RunReadings.info.name}{_HERE}[$__range]), "label", " · ", "run_name", "run_id")'
    owners = f"{OwnerReadings.owner_gpu_memory_used_bytes.name}{_HERE}"
    # Instances of the chosen GPUs; none if all are chosen, whose matcher accepts every UUID.
    parts = f'{MigReadings.info.name}{_HERE[:-1]},gpu_uuid=~"$gpu",uuid!~"$gpu"}}'
    boxes = _choice("instance", "Host", f'label_values({build}{{cluster=~"$cluster"}}, instance)')
    if one_box:
        boxes |= {"current": {}}  # the first host: panels with a line per GPU or run are too much for a fleet
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        _choice("cluster", "Cluster", f"label_values({build}, cluster)"),  # few sites have this label
        boxes,
        _choice("gpu", "GPU", f"query_result({gpus})", regex=_labelled("uuid")),
        _choice("mig", "MIG instances", f"label_values({parts}, uuid)", every="", hide=2),
        _choice("owner", "Owner", f"label_values({owners}, owner)"),
        _choice("run", "Run", f"query_result({runs})", regex=_labelled("run_id")),
    ]


def where_recorded() -> Json:
    """Return the hidden variable that decides whether to read recorded series, which have one sample a minute.

    They are read in a time range of more than some hours, whose steps are no shorter, if all GPUs and runs are chosen,
    and if rules recorded all of it for every host. Without rules, or if part of the time range is older than the rules,
    raw series are read.
    """
    daemon, written = f"{DaemonReadings.build_info.name}{_HERE}", f"{_RECORDED}{_HERE}"
    everything = 'label_replace(vector(1), "chosen", ".* .*", "", "")'
    long = f'label_replace(vector($__range_s) > {_LONG:g}, "chosen", "$gpu $run", "", "") and on (chosen) {everything}'
    # Not at the end of the time range, which may be in the future.
    some = f"last_over_time({written}[$__range:1h])"
    # Times at which a host was up, long enough to be recorded, and was not. While Prometheus is down, samples stay
    # visible for five minutes, so recorded ones are looked up further back.
    gaps = f"last_over_time(({daemon} offset 2m unless on ({BOX}) present_over_time({written}[10m]))[$__range:10m])"
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
        # Neither multi nor all: the value is a pattern, which Grafana would escape as one of several.
        "multi": False,
        "includeAll": False,
        "allValue": None,
        "hide": 2,
        "skipUrlSync": True,
        "current": {},
    }


def _choice(name: str, label: str, query: str, *, regex: str = "", every: str = ".*", hide: int = 0) -> Json:
    """Return a variable with several values or all, refreshed when the time range changes.

    `every` is the value of all, "" for a list of names; `hide` is Grafana's number, 2 hides it. With thousands of
    values a pattern that also matches the empty value is much faster than one that does not, for which Prometheus joins
    the series of each value.
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
    # Grafana writes the labels of a result in alphabetical order, so `label` comes before either.
    return rf'/label\W+(?<text>[^"]+)".*\b{value}\W+(?<value>[^"]+)"/'

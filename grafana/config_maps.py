"""Dashboards as Kubernetes' ConfigMaps, which the sidecar of Grafana's Helm chart finds by their label."""

from __future__ import annotations

import json
from collections.abc import Sequence

from classic import Json

_HEADER = """\
# Written by `python grafana/dashboards.py`: its dashboards for the sidecar of Grafana's Helm chart.
#   kubectl apply --server-side -f deploy/kubernetes/grafana-dashboards.yaml
# Server-side, as kubectl would keep a copy in an annotation, which these are too large for.
"""
_CONFIG_MAP = """\
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: gpuwarden
    grafana_dashboard: "1" # the sidecar's default
  annotations:
    grafana_folder: gpuwarden
data:
  {name}.json: |
    {text}
"""


def config_maps(dashboards: Sequence[Json]) -> str:
    """Return one ConfigMap a dashboard, in YAML."""
    maps = (
        _CONFIG_MAP.format(name=each["uid"], text=json.dumps(each, ensure_ascii=False, sort_keys=True))
        for each in dashboards
    )
    return "".join((_HEADER, *maps))

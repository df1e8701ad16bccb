"""Generator of the packed Helm chart and of plain Kubernetes manifests rendered from it: `make manifests`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python as helm

CHART = Path(__file__).parents[1] / "deploy/helm/gpuwarden"
# File by file: the values that render it, and its templates.
MANIFESTS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "kubernetes.yaml": ({}, ("configmap", "daemonset")),
    "kubernetes-monitoring.yaml": (
        {"monitor": {"kind": "PodMonitor"}, "rules": {"enabled": True}},
        ("monitor", "rules"),
    ),
    "kubernetes-dashboards.yaml": ({"dashboards": {"enabled": True}}, ("dashboards",)),
}


def render_chart(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the manifests of a release `gpuwarden`, by the names of their templates; empty ones are left out."""
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(dict(values), name="gpuwarden", namespace="gpuwarden")
    return {Path(path).stem: text for path, text in rendered.items() if text.strip()}


def write_manifests(folder: Path) -> None:
    """Write the packed chart, whose links become files, and the manifests."""
    folder.mkdir(parents=True, exist_ok=True)
    with helm.Chart.load(str(CHART)) as chart:
        chart.save(str(folder))
    for name, (values, templates) in MANIFESTS.items():
        rendered = render_chart(values)
        text = "\n---\n".join(rendered[each].strip().removeprefix("---\n") for each in templates)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write_manifests(Path(sys.argv[1]))
